"""How much a process that computes on one core slows a step of one sequence: tokens/s without and with it,
in turn in one run, ours beside llama.cpp's (if llama-cpp-python is there: peer_llama_cpp.py says how). The
weights are random, of a known shape. Two cores of which another process shares one are worth 1.5 cores, which
leave 75%. Products in fixed halves wait for the shared core, which leaves 50%. Prints a line for each, and
one JSON line last.

    python tests/bench/busy_core.py [--peers llama.cpp] [--shape tinyllama-1.1b] [--weights int4] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable

import torch
from ceilings import memory_read_gbps
from decode import LlamaCpp, busy, decode_step_s
from synthetic import step_weight_bytes, synthetic_engine

from penstock.config import EngineConfig
from penstock.memory.hardware import num_physical_cores
from penstock.model.known_shapes import find_shape

#: Steps of a round: enough for the system to move threads to the core that is free.
STEPS = 16


def measure(
    steps: dict[str, Callable[[], float]], memory_gbps: Callable[[], float], num_rounds: int
) -> dict[str, float]:
    """Median seconds of a step of each, idle and busy, and the memory's rate, in rounds that take turns."""
    samples: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for state, num_busy in (("idle", 0), ("busy", 1)):
            with busy(num_busy):
                samples.setdefault(f"memory_{state}_gbps", []).append(memory_gbps())
                for name, step_s in steps.items():
                    samples.setdefault(f"{name}_{state}_s", []).append(step_s())
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--weights", choices=("int8", "int4"), default="int8")
    parser.add_argument("--peers", nargs="*", choices=("llama.cpp",), default=[])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config = EngineConfig(weights=options.weights)
    engine = synthetic_engine(find_shape(options.shape), config, num_kv_tokens=4096)
    steps: dict[str, Callable[[], float]] = {"penstock": lambda: decode_step_s(engine, 1, STEPS)}
    if options.peers:
        peer = LlamaCpp(options.shape, "Q4_0" if options.weights == "int4" else "Q8_0")
        steps["llama.cpp"] = lambda: peer.decode_step_s(1, STEPS)
    own_threads = torch.get_num_threads()

    def memory_gbps() -> float:
        torch.set_num_threads(num_physical_cores())
        try:
            return memory_read_gbps()
        finally:
            torch.set_num_threads(own_threads)

    found = measure(steps, memory_gbps, options.rounds)
    weight_gb = step_weight_bytes(engine) / 1e9
    print(
        f"{options.shape}, {options.weights}, {num_physical_cores()} threads on {os.cpu_count()} cores; "
        f"memory {found['memory_idle_gbps']:.1f} GB/s, {found['memory_busy_gbps']:.1f} with a busy core"
    )
    for name in steps:
        idle, taken = found[f"{name}_idle_s"], found[f"{name}_busy_s"]
        print(f"{name}: {1 / idle:.1f} tokens/s, {1 / taken:.1f} with a busy core ({idle / taken:.0%})")
    limit = found["memory_idle_gbps"] / weight_gb
    print(f"the memory's limit: {limit:.1f} tokens/s of {weight_gb:.2f} GB each")
    print(json.dumps({"bench": f"busy core {options.shape}", "weights": options.weights, **found}))


if __name__ == "__main__":
    main()
