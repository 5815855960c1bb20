"""A server with two models, of which one fits: from a request for the model that is not loaded to its first
token, over HTTP, against the same direct reads alone, once over and over into a little memory (the disk's
best) and once into memory as fresh as ours. The page cache is dropped before each, which needs root.

    python tests/bench/model_swap.py COLD_FOLDER OTHER_FOLDER [--rounds 3] [--host-memory 13GiB]
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from cold_start import CACHE, KINDS, ON_CPU

from penstock.measure import measure_hardware
from penstock.memory.direct_io import PopulatedAhead, aligned_buffer
from penstock.weights.checkpoints.hub import SHIPPED


def with_tokenizer(folder: Path, into: Path) -> Path:
    """The folder's weights by links, with the demo's tokenizer, which random models lack."""
    target = into / folder.name
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (target / name).exists():
            shutil.copy(SHIPPED["demo"] / name, target)
    return target


def first_token_s(url: str, model: str) -> float:
    body: dict[str, Any] = {"model": model, "prompt": [5] * 16, "max_tokens": 2, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}  # a token of random weights may have no text
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        line = next(line for line in answer if line.startswith(b"data: "))
        seconds = time.perf_counter() - begun
        answer.read()
    assert b"error" not in line, line
    return seconds


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cold", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-memory", default="13GiB")
    options = parser.parse_args()
    measure_hardware(options.cold, ON_CPU, CACHE)
    total = sum(path.stat().st_size for path in options.cold.glob("*.safetensors"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, seconds = f"http://127.0.0.1:{port}", dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        names = [with_tokenizer(path, Path(folder)) for path in (options.other, options.cold)]
        flags: list[Any] = ["--host-memory", options.host_memory, "--kv-tokens", "2048", "--device", "cpu"]
        words = [sys.executable, "-m", "penstock_server", "serve", *map(str, names), "--port", str(port)]
        server = subprocess.Popen([*words, *flags, "--max-num-seqs", "8"], stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(url, server)
            for _ in range(options.rounds):
                first_token_s(url, options.other.name)  # the other model has the memory
                drop_caches()
                seconds.setdefault("first token", []).append(first_token_s(url, options.cold.name))
        finally:
            server.terminate()
            server.wait()
    for _ in range(options.rounds):
        for kind in ("disk", "fresh memory"):
            PopulatedAhead(aligned_buffer(total)).wait()
            drop_caches()
            seconds.setdefault(kind, []).append(KINDS[kind](options.cold, CACHE))
    for kind, found in seconds.items():
        print(f"{kind}: {', '.join(f'{each:.2f}' for each in found)} s")
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    first = medians["first token"]
    print(
        f"{total / 1e9:.2f} GB; the first token takes {first / medians['disk']:.2f} of the disk alone, "
        f"{first / medians['fresh memory']:.2f} of reading into fresh memory"
    )
    print(json.dumps({"bench": "model swap", "bytes": total, **medians}))


if __name__ == "__main__":
    main()
