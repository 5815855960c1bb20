"""From nothing to the first token of a converted model that is to be resident, against the same direct
reads alone, once over and over into a little memory (the disk's best) and once into memory as fresh as ours:
the system has to find and clear 10 GB of pages on the way. Each run is a process of its own, with the page
cache dropped, which needs root; Python's start is not counted. A virtual machine may have to get pages from
its host first, at its host's pace: right before it is measured a process takes as much memory, and gives it
back.

    python tests/bench/cold_start.py FOLDER [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.measure import measure_hardware
from penstock.memory.direct_io import DirectReader, PopulatedAhead, aligned_buffer
from penstock.memory.pages import PAGE
from penstock.text.tokenizer import NoText

PROMPT = [5] * 16
ON_CPU = EngineConfig(device="cpu", num_kv_tokens=2048)
#: Of the machine's rates, for all runs.
CACHE = Path(tempfile.gettempdir()) / "penstock-cold-start.json"


def disk_s(folder: Path, cache: Path) -> float:
    return _reads_s(folder, cache, is_fresh=False)


def fresh_s(folder: Path, cache: Path) -> float:
    return _reads_s(folder, cache, is_fresh=True)


def _reads_s(folder: Path, cache: Path, is_fresh: bool) -> float:
    """All weight files, as the disk likes to be asked."""
    disk = measure_hardware(folder, ON_CPU, cache).disk
    assert disk is not None
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size // PAGE * PAGE for file in files]
    ring = 3 * max(sizes)
    if not is_fresh:
        touched = aligned_buffer(ring).fill_(1)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        buffer = aligned_buffer(sum(sizes)) if is_fresh else touched
        if is_fresh:
            stack.callback(PopulatedAhead(buffer).close)
        reader = stack.enter_context(DirectReader(disk.block_bytes, disk.depth))
        reads, end = [], 0
        for file, size in zip(files, sizes, strict=True):
            if not is_fresh and end + size > ring:
                end = 0
            reads.append(reader.submit(file, 0, size, buffer[end : end + size]))
            end += size
        for read in reads:
            read.result()
    return time.perf_counter() - started


def first_token_s(folder: Path, cache: Path) -> float:
    hardware = measure_hardware(folder, ON_CPU, cache)
    started = time.perf_counter()
    with Engine.load(folder, ON_CPU, tokenizer=NoText(), hardware=hardware, is_patient=False) as engine:
        engine.add(GenerationRequest(PROMPT, SamplingParams(temperature=0, ignore_eos=True), "first"))
        while not engine.step():
            pass
        return time.perf_counter() - started


def _total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


KINDS = {"disk": disk_s, "fresh memory": fresh_s, "first token": first_token_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--once", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        PopulatedAhead(aligned_buffer(_total_bytes(options.folder))).wait()
        print(KINDS[options.once](options.folder, options.cache))
        return
    measure_hardware(options.folder, ON_CPU, options.cache)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    kinds = list(KINDS)
    for number in range(options.rounds):
        for kind in random.Random(number).sample(kinds, len(kinds)):
            Path("/proc/sys/vm/drop_caches").write_text("3")
            arguments = [str(options.folder), "--cache", str(options.cache), "--once", kind]
            run = subprocess.run(
                [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
            )
            seconds[kind].append(float(run.stdout.split()[-1]))
        print("  ".join(f"{kind} {found[-1]:.2f} s" for kind, found in seconds.items()))
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    first = medians["first token"]
    print(
        "medians: " + ", ".join(f"{kind} {found:.2f} s" for kind, found in medians.items()) + f"; the first "
        f"token takes {first / medians['disk']:.2f} of the disk alone, "
        f"{first / medians['fresh memory']:.2f} of reading into fresh memory"
    )
    print(json.dumps({"bench": "cold start", **medians}))


if __name__ == "__main__":
    main()
