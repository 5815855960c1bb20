"""From nothing to the first token of a converted model that is to be resident, against the same direct
reads into memory as fresh as ours. Each run is a process of its own, with the page cache dropped, which needs
root; Python's start is not counted.

    python tests/bench/cold_start.py FOLDER [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.sequence import SamplingParams
from penstock.loader import measure_hardware
from penstock.memory.direct_io import PAGE, DirectReader, aligned_buffer
from penstock.text.tokenizer import NoText

PROMPT = [5] * 16
#: Of the machine's rates, for all runs.
CACHE = Path(tempfile.gettempdir()) / "penstock-cold-start.json"


def plain_reads_s(folder: Path, cache: Path) -> float:
    """All weight files into one buffer, as the disk likes to be asked."""
    disk = measure_hardware(folder, cache).disk
    assert disk is not None
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size // PAGE * PAGE for file in files]
    started = time.perf_counter()
    buffer = aligned_buffer(sum(sizes))
    with DirectReader(disk.block_bytes, disk.depth) as reader:
        reads, end = [], 0
        for file, size in zip(files, sizes, strict=True):
            reads.append(reader.submit(file, 0, size, buffer[end : end + size]))
            end += size
        for read in reads:
            read.result()
        return time.perf_counter() - started


def first_token_s(folder: Path, cache: Path) -> float:
    hardware = measure_hardware(folder, cache)
    config = EngineConfig(device="cpu", num_kv_tokens=2048)
    started = time.perf_counter()
    with Engine.load(folder, config, tokenizer=NoText(), hardware=hardware, is_patient=False) as engine:
        engine.add("first", PROMPT, SamplingParams(temperature=0, ignore_eos=True))
        while not engine.step():
            pass
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--once", choices=("plain", "first"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        measure = plain_reads_s if options.once == "plain" else first_token_s
        print(measure(options.folder, options.cache))
        return
    measure_hardware(options.folder, options.cache)
    seconds: dict[str, list[float]] = {"plain": [], "first": []}
    for _ in range(options.rounds):
        for kind, found in seconds.items():
            Path("/proc/sys/vm/drop_caches").write_text("3")
            arguments = [str(options.folder), "--cache", str(options.cache), "--once", kind]
            run = subprocess.run(
                [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
            )
            found.append(float(run.stdout.split()[-1]))
        print(f"plain reads {seconds['plain'][-1]:6.2f} s, first token {seconds['first'][-1]:6.2f} s")
    plain, first = (statistics.median(found) for found in seconds.values())
    print(f"medians: plain reads {plain:.2f} s, first token {first:.2f} s, {first / plain:.2f} times as long")
    print(json.dumps({"bench": "cold start", "plain_s": plain, "first_token_s": first}))


if __name__ == "__main__":
    main()
