"""One model on two machines with half of the memory each, against one such machine that streams from disk.

    .venv/bin/python tests/bench/nodes.py ~/.cache/penstock/shapes/tinyllama-1.1b --host-memory 700MiB
    .venv/bin/python tests/bench/nodes.py FOLDER --host-memory 700MiB --delay 0.3ms --rate 1gbit    # as root

Both machines are processes of this one, each with one thread, in network namespaces of their own that a veth
pair connects; --delay (there and back) and --rate are netem's. Without root rights both use the loopback
device. Prints the step of one sequence beside the sum of its stages, and tokens/s of groups of sequences; the
answers of both ways must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.measure import measure_hardware
from penstock.memory.hardware import HardwareProfile
from penstock.nodes.worker import Worker
from penstock.nodes_config import NodesConfig
from penstock.text.tokenizer import NoText
from penstock_server.settings.settings import CACHE_DIR
from penstock_server.settings.values import parse_bytes

SPACES, ADDRESSES = ("penstock-a", "penstock-b"), ("10.213.7.1", "10.213.7.2")
SECRET, PORT = "known to this benchmark", 18570


def config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        num_threads=1,
        device="cpu",
        host_memory_bytes=options.host_memory,
        num_kv_tokens=4096,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        speculation="off",
        enable_prefix_caching=False,
    )


def hardware(options: argparse.Namespace) -> HardwareProfile:
    return measure_hardware(options.model, config(options), CACHE_DIR / "hardware.json")


def work(options: argparse.Namespace) -> None:
    nodes = NodesConfig(SECRET, 2, 1, options.address, PORT)
    Worker(nodes, config(options), model=str(options.model), hardware=lambda model: hardware(options)).run()


class Clock:
    """Seconds in some functions of an engine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - began_s

        return call


def run(engine: Engine, num_seqs: int, num_tokens: int) -> dict[str, Any]:
    """Answers of `num_tokens` to short prompts: seconds from the moment when all have their first token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    dice, found = random.Random(num_seqs), dict[str, list[str]]()
    for index in range(num_seqs):
        prompt = [dice.randrange(10, 30000) for _ in range(4)]
        engine.add(GenerationRequest(prompt, params, str(index)))
    own, clock = Clock(), time.perf_counter
    sweep, head = engine.executor.sweep, engine.executor.head
    engine.executor.sweep, engine.executor.head = own.timed(sweep), own.timed(head)  # type: ignore[method-assign]
    began_s, steps, busy_s, last_s = 0.0, 0, 0.0, 0.0
    gained = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            known = found.setdefault(output.request_id, [])
            known += [*map(str, output.token_ids), repr(output.logprobs)]
            gained += len(output.token_ids) if began_s else 0
        steps += bool(outputs and began_s)
        if not began_s and len(found) == num_seqs:
            began_s, own.seconds, busy_s = clock(), 0.0, others_s(engine)
        last_s = clock()
    del engine.executor.sweep, engine.executor.head  # type: ignore[attr-defined]
    return {
        "step_s": (last_s - began_s) / steps,
        "stages_s": (own.seconds + others_s(engine) - busy_s) / steps,
        "tokens_per_s": gained / (last_s - began_s),
        "answers": sorted(found.items()),
    }


def others_s(engine: Engine) -> float:
    """Seconds in which workers computed."""
    return sum(each.busy_s for each in engine.nodes if each.rank)


def lead(options: argparse.Namespace) -> None:
    nodes = NodesConfig(SECRET, 2, 0, options.address, PORT) if options.part == "lead" else None
    with Engine.load(
        options.model, config(options), tokenizer=NoText(), hardware=hardware(options), nodes=nodes
    ) as engine:
        run(engine, 1, 3)
        results = {str(each): run(engine, each, options.tokens) for each in (1, 32)}
        layers = engine.metrics.num_resident_layers, engine.metrics.num_streamed_layers
        print(json.dumps({"results": results, "layers": layers}))


def connect(options: argparse.Namespace) -> None:
    """Two namespaces with a link between them."""
    for space in SPACES:
        ip("netns", "add", space)
    ip("link", "add", "pst0", "netns", SPACES[0], "type", "veth", "peer", "name", "pst1", "netns", SPACES[1])
    for index, (space, address) in enumerate(zip(SPACES, ADDRESSES, strict=True)):
        ip("-n", space, "addr", "add", f"{address}/24", "dev", f"pst{index}")
        ip("-n", space, "link", "set", f"pst{index}", "up")
        ip("-n", space, "link", "set", "lo", "up")
        if options.delay or options.rate:
            delay = f"{float(options.delay.removesuffix('ms') or 0) / 2}ms"
            netem = ["tc", "-n", space, "qdisc", "add", "dev", f"pst{index}", "root", "netem", "delay", delay]
            done = subprocess.run([*netem, *(["rate", options.rate] if options.rate else [])], check=False)
            if done.returncode:
                sys.exit("this system has no netem: leave --delay and --rate out")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def part(options: argparse.Namespace, name: str, address: str, space: str = "") -> list[str]:
    inside = ["ip", "netns", "exec", space] if space else []
    memory = ["--host-memory", str(options.host_memory), "--tokens", str(options.tokens)]
    return [
        *inside,
        sys.executable,
        __file__,
        str(options.model),
        *memory,
        "--part",
        name,
        "--address",
        address,
    ]


def both(options: argparse.Namespace) -> None:
    has_root = os.geteuid() == 0
    spaces, address = (SPACES, ADDRESSES[0]) if has_root else (("", ""), "127.0.0.1")
    try:
        if has_root:
            connect(options)
        worker = subprocess.Popen(part(options, "work", address, spaces[1]))
        try:
            two = json.loads(subprocess.check_output(part(options, "lead", address, spaces[0])))
        finally:
            worker.terminate()
            worker.wait()
    finally:
        for space in SPACES if has_root else ():
            subprocess.run(["ip", "netns", "del", space], check=False)
    alone = json.loads(subprocess.check_output(part(options, "alone", address)))
    print("layers resident and streamed: two machines (leader)", two["layers"], "one", alone["layers"])
    for name, found in two["results"].items():
        one = alone["results"][name]
        assert found["answers"] == one["answers"], "the answers differ"
        stages, speed = found["step_s"] / found["stages_s"], found["tokens_per_s"] / one["tokens_per_s"]
        print(
            f"{name:>2} sequences: a step {found['step_s'] * 1e3:.1f} ms, its stages "
            f"{found['stages_s'] * 1e3:.1f} ms ({stages:.3f}x)"
        )
        print(
            f"   {found['tokens_per_s']:.2f} tokens/s, one machine {one['tokens_per_s']:.2f} ({speed:.2f}x)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--host-memory", type=parse_bytes, required=True, help="of each machine")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--delay", default="", help="there and back, such as 0.3ms")
    parser.add_argument("--rate", default="", help="such as 1gbit")
    parser.add_argument("--part", choices=("both", "lead", "work", "alone"), default="both")
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    {"both": both, "lead": lead, "alone": lead, "work": work}[options.part](options)


if __name__ == "__main__":
    main()
