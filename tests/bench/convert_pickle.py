"""`penstock convert --allow-pickle` of a file that torch.save wrote, beside `penstock convert` of the same
tensors as safetensors: memory and time. The model is TinyLlama's shape in float16 (2.2 GB) with random
weights, in both of torch's forms and in safetensors. The time is that of the whole command, as the person who
types it waits. The memory is that of another process, whose baseline is its peak before the conversion, with
everything imported. The sources are in the page cache.

    python tests/bench/convert_pickle.py [--folder /tmp/convert-pickle] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = "tinyllama-1.1b"
FORMS = ("safetensors", "zip", "legacy")
#: What the process may take beyond its largest tensor.
MOST_MORE_BYTES = 100e6


def make(folder: Path) -> None:
    """The same tensors in every form, each in a folder of its own."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.model.known_shapes import find_shape

    with torch.device("meta"):
        shapes = LlamaForCausalLM(LlamaConfig(**find_shape(SHAPE))).state_dict()
    tensors = {name: 0.02 * torch.randn(empty.shape, dtype=torch.float16) for name, empty in shapes.items()}
    for form in FORMS:
        (folder / form).mkdir(parents=True)
        (folder / form / "config.json").write_text(json.dumps(find_shape(SHAPE)))
    save_file(tensors, folder / "safetensors" / "model.safetensors")
    for form in ("zip", "legacy"):
        file = folder / form / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=form == "zip")
    largest = max(tensor.nbytes for tensor in tensors.values())
    print(json.dumps({"all": sum(tensor.nbytes for tensor in tensors.values()), "largest": largest}))


def convert_once(folder: Path, target: Path) -> None:
    """Prints the process's peaks before and after as JSON."""
    from penstock_server import cli
    from penstock_server.commands import converting  # noqa: F401

    before = peak_bytes()
    with contextlib.redirect_stdout(sys.stderr):
        code = cli.main(["convert", "--allow-pickle", str(folder), str(target)])
    assert code == 0
    print(json.dumps({"before": before, "after": peak_bytes()}))


def peak_bytes() -> int:
    """VmHWM: ru_maxrss would include the process that started this one."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def run(*arguments: str) -> dict[str, float]:
    """What another process of this script prints."""
    command = [sys.executable, __file__, *arguments]
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    found: dict[str, float] = json.loads(printed.stdout)
    return found


def command_s(folder: Path, target: Path) -> float:
    """Seconds of the command."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "penstock_server", "convert", "--allow-pickle", str(folder), str(target)]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(folder: Path, rounds: int, sizes: dict[str, float]) -> None:
    target, seconds = folder / "converted", dict[str, list[float]]()
    for number in range(rounds):
        for form in random.Random(number).sample(FORMS, len(FORMS)):
            seconds.setdefault(form, []).append(command_s(folder / form, target))
    for form in FORMS:
        shutil.rmtree(target, ignore_errors=True)
        peaks = run("--convert", str(folder / form), "--target", str(target))
        ratios = [a / b for a, b in zip(seconds[form], seconds["safetensors"], strict=True)]
        print(
            f"{form:12} {statistics.median(seconds[form]):6.2f} s, {min(seconds[form]):.2f} at best; the "
            f"median of the rounds' ratios to safetensors {statistics.median(ratios):.3f}; "
            f"{(peaks['after'] - peaks['before']) / 1e6:.0f} MB "
            f"above the baseline of {peaks['before'] / 1e6:.0f} MB; the largest tensor and 100 MB "
            f"are {(sizes['largest'] + MOST_MORE_BYTES) / 1e6:.0f} MB"
        )
    print(json.dumps({"bench": "convert pickle", **seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "penstock-convert-pickle"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.folder)
    elif options.convert:
        convert_once(options.convert, options.target)
    else:
        shutil.rmtree(options.folder, ignore_errors=True)
        try:
            sizes = run("--make", "--folder", str(options.folder))
            measure(options.folder, options.rounds, sizes)
        finally:
            shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
