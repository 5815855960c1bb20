"""One model on two machines with half of the memory each, against one such machine that streams from disk.

    PYTHONPATH=tests .venv/bin/python tests/bench/nodes.py ~/.cache/penstock/shapes/tinyllama-1.1b \\
        --host-memory 760MiB

Both machines are processes of this one, each with one thread, in network namespaces of their own that a veth
pair connects; --rate is that of the link, and --delay is there and back (by netem, or by
machines/slow_network.py, whose processor time is printed). Without root rights both use the loopback device.
Prints the step of one sequence beside the sum of its stages and the round trip of as many bytes over the same
link, and tokens/s of groups of sequences; the answers of both ways must be equal. What a machine does in a
step is printed beside: a pipe is full where its slowest stage computes all the time. Other programs may not
compute meanwhile, since two machines take two cores: what others took of the cores is printed, too, what the
system and a virtual machine's host took among it. `--sequences` makes shorter runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machines.network_namespaces import Link, can_make_namespaces, enter, processor_seconds
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.measure import measure_hardware
from penstock.memory.hardware import HardwareProfile, num_physical_cores
from penstock.memory.other_work import now
from penstock.nodes.piped_executor import PipedExecutor
from penstock.nodes.wire.peer import Peer
from penstock.nodes.worker import Worker
from penstock.nodes_config import NodesConfig
from penstock.text.tokenizer import NoText
from penstock_server.settings.settings import CACHE_DIR
from penstock_server.settings.values import parse_bytes

SECRET, PORT, ECHO_PORT = "known to this benchmark", 18570, 18571
#: Round trips that are timed, and seconds between two.
NUM_TRIPS, PAUSE_S = 20, 0.05


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
    listener = socket.create_server(("", ECHO_PORT))
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    nodes = NodesConfig(SECRET, 2, 1, options.address, PORT)
    Worker(nodes, config(options), model=str(options.model), hardware=lambda model: hardware(options)).run()


def echo(listener: socket.socket) -> None:
    """Answer each message with as many bytes as it asks for. It begins with its own size and the answer's."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while head := connection.recv(8, socket.MSG_WAITALL):
            num_asked, num_answered = (int.from_bytes(part, "little") for part in (head[:4], head[4:]))
            connection.recv(num_asked - 8, socket.MSG_WAITALL)
            connection.sendall(bytes(num_answered))


def round_trip_s(connection: socket.socket, num_asked: int, num_answered: int) -> float:
    """Seconds in which so many bytes go to the worker's machine, and so many come back."""
    head = num_asked.to_bytes(4, "little") + num_answered.to_bytes(4, "little")
    samples = list[float]()
    for _ in range(NUM_TRIPS):
        time.sleep(PAUSE_S)
        began_s = time.perf_counter()
        connection.sendall(head + bytes(num_asked - 8))
        connection.recv(num_answered, socket.MSG_WAITALL)
        samples.append(time.perf_counter() - began_s)
    return statistics.median(samples)


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


class Totals:
    """What has been counted since all sequences had their first token."""

    def __init__(self, engine: Engine, own: Clock, worker: int) -> None:
        """worker: the process of the other machine; 0: there is none."""
        self._engine, self._own, self._worker = engine, own, worker
        self._began = self._now()

    def _now(self) -> list[float]:
        engine = self._engine
        others_s = sum(each.busy_s for each in engine.nodes if each.rank)
        metrics = engine.metrics
        streamed = engine.streamer.tiers.streamed_bytes
        channel = None if (peer := peer_of(engine)) is None else peer.channel
        sent, received = (channel.bytes_sent, channel.bytes_received) if channel else (0, 0)
        seconds = time.perf_counter(), self._own.seconds, others_s, metrics.stall_seconds
        moment = now()
        busy_s = moment.busy_s - moment.own_s
        busy_s -= processor_seconds(self._worker) if self._worker else 0.0
        return [*seconds, streamed, sent, received, busy_s]

    def of_each(self, num_steps: int, num_tokens: int) -> dict[str, float]:
        """Seconds of a step, of which the first machine computes and waits for its disk, and the second one
        computes; bytes that are read, that go to the second machine, and that come back; and the share of all
        cores that others took."""
        total, *each = (now - then for now, then in zip(self._now(), self._began, strict=True))
        names = "own_s", "other_s", "stall_s", "streamed_bytes", "sent_bytes", "received_bytes", "others_s"
        found = {name: value / num_steps for name, value in zip(names, each, strict=True)}
        share = found["others_s"] * num_steps / total / num_physical_cores()
        return found | {"step_s": total / num_steps, "tokens_per_s": num_tokens / total, "others": share}


def peer_of(engine: Engine) -> Peer | None:
    """The connection to the other machine."""
    pipe = engine.executor
    return pipe.leader.members[0].peer if isinstance(pipe, PipedExecutor) else None


def run(engine: Engine, num_seqs: int, num_tokens: int, worker: int = 0) -> dict[str, Any]:
    """Answers of `num_tokens` to short prompts."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    dice, found = random.Random(num_seqs), dict[str, list[str]]()
    for index in range(num_seqs):
        prompt = [dice.randrange(10, 30000) for _ in range(4)]
        engine.add(GenerationRequest(prompt, params, str(index)))
    totals, num_steps, gained = None, 0, 0
    with timed(engine) as own:
        while engine.has_work:
            outputs = engine.step()
            for output in outputs:
                known = found.setdefault(output.request_id, [])
                known += [*map(str, output.token_ids), repr(output.logprobs)]
                gained += len(output.token_ids) if totals else 0
            num_steps += bool(outputs and totals)
            if totals is None and len(found) == num_seqs:
                totals = Totals(engine, own, worker)
    assert totals is not None
    return {**totals.of_each(num_steps, gained), "answers": sorted(found.items())}


@contextlib.contextmanager
def timed(engine: Engine) -> Iterator[Clock]:
    """The leader's layers, its head and the choice of tokens."""
    own, sweep, sample = Clock(), engine.model.executor.sweep, engine.chooser.choose
    engine.model.executor.sweep = own.timed(sweep)  # type: ignore[method-assign]
    engine.chooser.choose = own.timed(sample)  # type: ignore[method-assign]
    try:
        yield own
    finally:
        del engine.model.executor.sweep, engine.chooser.choose  # type: ignore[attr-defined]


def lead(options: argparse.Namespace) -> None:
    nodes = NodesConfig(SECRET, 2, 0, options.address, PORT) if options.part == "lead" else None
    with Engine.load(
        options.model, config(options), tokenizer=NoText(), hardware=hardware(options), nodes=nodes
    ) as engine:
        run(engine, 1, 3)
        results = {str(each): run(engine, each, options.tokens, options.worker) for each in options.sequences}
        if (peer := peer_of(engine)) is not None:
            host = peer.channel.address.rsplit(":", 1)[0]
            with socket.create_connection((host, ECHO_PORT)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for each in results.values():
                    sizes = int(each["sent_bytes"]), int(each["received_bytes"])
                    each["network_s"] = round_trip_s(connection, *sizes)
        layers = engine.metrics.num_resident_layers, engine.metrics.num_streamed_layers
        print(json.dumps({"results": results, "layers": layers}))


def parse_seconds(text: str) -> float:
    """Such as "0.3ms"."""
    if not (match := re.fullmatch(r"([\d.]+)(us|ms|s)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 0.3ms")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def parse_rate(text: str) -> float:
    """Bits a second, such as "1gbit"."""
    if not (match := re.fullmatch(r"([\d.]+)([kmg])bit", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate, such as 1gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def command(options: argparse.Namespace, name: str, link: Link | None) -> list[str]:
    """A part of this benchmark as a process of its own."""
    space = link.spaces[name == "work"] if link else ""
    address = link.addresses[0] if link else "127.0.0.1"
    given = {
        "host-memory": options.host_memory, "tokens": options.tokens,
        "part": name, "address": address, "space": space,
    }  # fmt: skip
    flags = [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
    flags += ["--sequences", *map(str, options.sequences)]
    return [sys.executable, __file__, str(options.model), *flags]


def both(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        link = None
        if can_make_namespaces():
            link = stack.enter_context(Link(options.delay, options.rate))
        elif options.rate or options.delay:
            sys.exit("--rate and --delay need root rights")
        worker = subprocess.Popen(command(options, "work", link))
        try:
            lead = command(options, "lead", link)
            two = json.loads(subprocess.check_output([*lead, "--worker", str(worker.pid)]))
        finally:
            worker.terminate()
            worker.wait()
        if link is not None and link.carrying_s:
            print(f"the slow network took {link.carrying_s:.2f} s of a processor in all")
        alone = json.loads(subprocess.check_output(command(options, "alone", None)))
    print("layers resident and streamed: two machines (leader)", two["layers"], "one", alone["layers"])
    for name, found in two["results"].items():
        report(name, found, alone["results"][name])


def report(name: str, two: dict[str, Any], one: dict[str, Any]) -> None:
    assert two["answers"] == one["answers"], "the answers differ"
    stages_s, network_s = two["own_s"] + two["other_s"], two["network_s"]
    full = max(two["own_s"], two["other_s"]) / two["step_s"]
    ms = {key: f"{1e3 * value:.0f} ms" for key, value in two.items() if key.endswith("_s")}
    print(
        f"{name:>2} sequences, two machines: {two['tokens_per_s']:.2f} tokens/s, a step every "
        f"{ms['step_s']}; {ms['own_s']} and {ms['other_s']} at the machines "
        f"({two['step_s'] / stages_s:.3f}x of the sum, the slower one computes {full:.0%} of the time; "
        f"others took {two['others']:.0%} of the cores)"
    )
    print(
        f"   network: {two['sent_bytes'] / 1e3:.1f} kB there and {two['received_bytes'] / 1e3:.1f} kB back "
        f"take {1e3 * network_s:.2f} ms ({(two['step_s'] - network_s) / stages_s:.3f}x without them)"
    )
    ratio, gbps = two["tokens_per_s"] / one["tokens_per_s"], one["streamed_bytes"] / one["step_s"] / 1e9
    print(
        f"   one machine: {one['tokens_per_s']:.2f} tokens/s ({ratio:.2f}x), a step "
        f"{1e3 * one['step_s']:.0f} ms, which waits {1e3 * one['stall_s']:.0f} ms for the disk "
        f"({one['streamed_bytes'] / 1e6:.0f} MB, {gbps:.2f} GB/s; others took {one['others']:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host-memory", type=parse_bytes, required=True, help="of each machine")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--delay", type=parse_seconds, default=0.0, help="there and back, such as 0.3ms")
    parser.add_argument("--rate", type=parse_rate, default=0.0, help="of the link, such as 1gbit")
    parser.add_argument("--part", choices=("both", "lead", "work", "alone"), default="both")
    parser.add_argument("--worker", type=int, default=0, help="the worker's process")
    parser.add_argument("--address", default="")
    parser.add_argument("--space", default="")
    options = parser.parse_args()
    if options.part == "both":
        both(options)
        return
    if options.space:
        enter(options.space)
    {"lead": lead, "alone": lead, "work": work}[options.part](options)


if __name__ == "__main__":
    main()
