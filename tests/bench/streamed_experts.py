"""A model whose experts have no room in memory: decode steps of one sequence, beside llama.cpp with its file
mapped into memory. Each has a process of its own, and the same limit of memory (a cgroup, so root is needed);
their steps are timed in turn. Random weights in 4 bits; llama.cpp's are Q4_0, embedding and head Q8_0. Needs
`pip install llama-cpp-python gguf` and 34 GB of disk.

    python tests/bench/streamed_experts.py [--memory 6] [--popularity uniform] [--read-ahead 128]

Our choices of experts are drawn (penstock/model/mixture/drawn_routing.py). llama.cpp's routers choose, from
hidden states that are random: their rows have norms by which as many experts are chosen again
(random_gguf.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory_limit import LimitedProcess, forget_pages, read_ahead
from random_gguf import NORM_EXPONENTS, SHAPES, model_file, set_popularity

HERE = Path(__file__).parent
#: Our steps of a round. Our process fills its slots beforehand.
OUR_STEPS = 24
#: Steps of each before its timed ones in a round, until caches and memory are its own again.
OUR_SETTLING, PEER_SETTLING = 6, 1
NUM_THREADS = 2
#: Tokens of keys and values for which both have room.
CONTEXT = 1024


@dataclass(frozen=True)
class Steps:
    """What our process tells of steps."""

    seconds: list[float]
    floors_s: list[float]
    num_experts: float
    num_hits: float


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, path: Path, shape: str, limit_bytes: int, kib: int | None, num_warm: int) -> None:
        words = [sys.executable, str(HERE / "peer_llama_cpp.py"), "--answer", "--shape", shape]
        words += ["--kind", "Q4_0", "--mapped", "--threads", str(NUM_THREADS)]
        words += ["--sequences", "1", "--context", str(CONTEXT)]
        forget_pages(path)
        with read_ahead(path, kib):
            self._process = LimitedProcess("peer", limit_bytes, words)
            self._process.ask("[]")
        self._position = 0
        self.steps(num_warm)

    def steps(self, number: int) -> list[float]:
        """Seconds of each step. Its tokens were in no step before."""
        first = self._position
        self._position += number
        found: list[float] = json.loads(
            self._process.ask(json.dumps([[1, first + i] for i in range(number)]))
        )
        return found

    def close(self) -> None:
        self._process.close()


class Ours:
    """Penstock in a process of its own."""

    def __init__(self, shape: str, popularity: str, limit_bytes: int, host_gib: float) -> None:
        words = [sys.executable, __file__, "--answer", "--shape", shape, "--popularity", popularity]
        words += ["--host-memory", str(host_gib)]
        self._process = LimitedProcess("ours", limit_bytes, words)
        self._process.ask("0")

    def steps(self, number: int) -> Steps:
        return Steps(**json.loads(self._process.ask(str(number))))

    def close(self) -> None:
        self._process.close()


def answer(shape: str, popularity: str, host_gib: float) -> None:
    """Our process: reads numbers of steps, and writes a line of Steps for each. The first answer comes when
    the slots of experts are full."""
    from penstock import Engine
    from penstock.text.tokenizer import NoText
    from penstock_server.commands import benchmark
    from penstock_server.facade.inside import draw_routing
    from penstock_server.facade.machine import profile
    from penstock_server.settings.settings import Settings

    settings = Settings(weights="int4", host_memory=int(host_gib * 2**30), kv_tokens=CONTEXT)
    folder = benchmark._random_folder(settings, shape)
    config = benchmark.engine_config(settings)
    size, hardware = benchmark.footprint_at(folder, config), profile(settings, folder)
    loaded = Engine.load(folder, config, tokenizer=NoText(), hardware=hardware, is_patient=False)
    with loaded as engine:
        draw_routing(engine, popularity, size, hardware)
        benchmark._first_token(engine, time.perf_counter())
        benchmark._fill_slots(engine)
        benchmark._add(engine, "0", benchmark.CONTEXT, 0)
        while not engine.step():
            pass
        for line in sys.stdin:
            samples = benchmark._timed(engine, int(line), 1)
            found = Steps(
                [each.seconds for each in samples],
                [each.floor_s for each in samples],
                sum(each.num_experts for each in samples),
                sum(each.num_expert_hits for each in samples),
            )
            print(json.dumps(asdict(found)), flush=True)


def report(ours: list[Steps], peer: list[float]) -> None:
    seconds = [each for steps in ours for each in steps.seconds]
    floor = statistics.mean(each for steps in ours for each in steps.floors_s)
    hits = sum(steps.num_hits for steps in ours) / sum(steps.num_experts for steps in ours)
    share = floor / statistics.mean(seconds)
    print(f"Penstock: {told(seconds)}, {share:.0%} of the floor, experts {hits:.1%} hits")
    found: dict[str, Any] = {"ours_s": statistics.median(seconds), "floor_s": floor, "hit_rate": hits}
    if peer:
        found["llama.cpp_s"] = statistics.median(peer)
        times = statistics.median(peer) / statistics.median(seconds)
        print(f"llama.cpp: {told(peer)}, {times:.1f} times as long (medians)")
    print(json.dumps({"bench": "streamed_experts"} | found))


def told(seconds: list[float]) -> str:
    mean, median = (1e3 * f(seconds) for f in (statistics.mean, statistics.median))
    return f"median {median:.0f} ms a step (mean of {len(seconds)} steps: {mean:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--memory", type=float, default=6.0, metavar="GIB", help="limit of each process")
    parser.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="our plan's; else the limit less half a GiB for Python",
    )
    parser.add_argument("--popularity", choices=NORM_EXPONENTS, default="usual")
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--read-ahead", type=int, metavar="KIB", help="the kernel's, for llama.cpp's file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=8, help="steps of llama.cpp before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="steps of llama.cpp in a round")
    parser.add_argument("--answer", action="store_true", help="our process: take steps from standard input")
    options = parser.parse_args()
    host_gib = options.host_memory or options.memory - 0.5
    if options.answer:
        answer(options.shape, options.popularity, host_gib)
        return
    limit_bytes = int(options.memory * 2**30)
    sides: dict[str, Any] = {}
    try:
        sides["ours"] = Ours(options.shape, options.popularity, limit_bytes, host_gib)
        if not options.no_peer:
            path = model_file(options.shape, "Q4_0", SHAPES)
            set_popularity(path, options.popularity)
            sides["llama.cpp"] = Peer(path, options.shape, limit_bytes, options.read_ahead, options.warm)
        found: dict[str, list[Any]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                is_ours = name == "ours"
                side.steps(OUR_SETTLING if is_ours else PEER_SETTLING)
                found[name].append(side.steps(OUR_STEPS if is_ours else options.steps))
                print(f"{name}: {found[name][-1]}", file=sys.stderr)
    finally:
        for side in sides.values():
            side.close()
    report(found["ours"], [each for steps in found.get("llama.cpp", []) for each in steps])


if __name__ == "__main__":
    main()
