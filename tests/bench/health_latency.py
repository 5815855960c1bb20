"""How long /health takes while the engine steps as hard as it can.

    python tests/bench/health_latency.py [--model demo] [--url http://...] [--streams 8] [--probes 300]

Without --url it starts a server of its own. Prints a card, and one line of JSON last. The event loop
and the engine's thread share the interpreter, so this is where a step that holds on to it would show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1]))

from end_to_end.server_process import ServerProcess  # noqa: E402


def generate(url: str, num_choices: int, stop: threading.Event, has_begun: threading.Event) -> None:
    """Keeps the engine busy until told to stop."""
    body = {"prompt": "Once upon a time", "n": num_choices, "max_tokens": 400, "stream": True}
    body["ignore_eos"] = True
    while not stop.is_set():
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    has_begun.set()
                if stop.is_set():
                    return


def probe(url: str, num_probes: int) -> list[float]:
    """Seconds of each request, over one connection as a probe keeps it."""
    latencies = []
    with httpx2.Client(base_url=url) as client:
        for _ in range(num_probes):
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            latencies.append(time.perf_counter() - start)
    return latencies


def measure(url: str, num_choices: int, num_probes: int) -> dict[str, float]:
    """Milliseconds when idle and under load."""
    idle = probe(url, num_probes)
    stop, has_begun = threading.Event(), threading.Event()
    load = threading.Thread(target=generate, args=(url, num_choices, stop, has_begun))
    load.start()
    has_begun.wait()
    busy = sorted(probe(url, num_probes))
    stop.set()
    load.join()
    return {
        "idle_median_ms": 1000 * statistics.median(idle),
        "busy_median_ms": 1000 * statistics.median(busy),
        "busy_p99_ms": 1000 * busy[int(0.99 * len(busy))],
        "busy_max_ms": 1000 * busy[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--streams", type=int, default=8, help="answers generated at the same time")
    parser.add_argument("--probes", type=int, default=300)
    options = parser.parse_args()
    with ExitStack() as stack:
        url = options.url
        if url is None:
            server = ServerProcess(options.model, is_warm=False)
            url = stack.enter_context(server).wait_until_ready().url
        found = measure(url, options.streams, options.probes)
    print(f"/health over {options.probes} probes, {options.streams} answers running")
    for name, value in found.items():
        print(f"  {name:16} {value:8.2f}")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
