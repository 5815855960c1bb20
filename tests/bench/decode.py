"""A model of a known shape, with random weights in INT8 or 4 bits, all in RAM: decode tokens/s at 1, 8 and
32 sequences and prompt tokens/s at 512, beside this machine's ceilings and peers (our own INT8; transformers'
eager bfloat16; llama.cpp with Q8_0, or Q4_0 where our weights have 4 bits, if llama-cpp-python is there:
peer_llama_cpp.py says how), all in turn in one run. The kernels are tuned first, as a server does when it
first starts. Prints a card, and one JSON line last.

    make bench            (or: python tests/bench/decode.py [--activations int8] [--peers llama.cpp]
                                                            [--shape solar-10.7b]
                                                            [--weights int4 --peers int8]
                                                            [--sequences 1 8] [--no-prompt] [--build avx2]
                                                            [--busy-cores 1]
                                                            [--kernel-tuning default])
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from ceilings import int8_gops, memory_read_gbps
from synthetic import step_weight_bytes, synthetic_engine

from penstock import kernels
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import cpu_builds
from penstock.kernels.cpu_builds import compiled_builds
from penstock.measure import measure_hardware
from penstock.memory.hardware import num_physical_cores
from penstock.model.known_shapes import find_shape

Clock = Callable[[], float]
BATCHES = (1, 8, 32)
CONTEXT = 64  # tokens before the decode steps that are timed
PROMPT = 512
ROUNDS = 3
OUTSIDE_STEPS = 12


def prompt_tokens(num_tokens: int, seed: int) -> list[int]:
    """Token ids that every vocabulary has."""
    return torch.randint(3, 30000, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_step_s(engine: Engine, num_seqs: int, num_steps: int, clock: Clock = time.perf_counter) -> float:
    """Median seconds of a step in which each of `num_seqs` sequences gains a token."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for index in range(num_seqs):
        engine.add(GenerationRequest(prompt_tokens(CONTEXT, index), params, str(index)))
    while any(seq.num_pending_tokens > 1 for seq in engine.scheduler):
        engine.step()
    times = []
    for _ in range(num_steps):
        started = clock()
        outputs = engine.step()
        times.append(clock() - started)
        assert len(outputs) == num_seqs
    for index in range(num_seqs):
        engine.abort(str(index))
    return statistics.median(times)


def outside_matrices(engine: Engine) -> float:
    """Which share of a step with one sequence is spent in anything but products. The products are timed in
    steps of their own, which compute operation by operation: inside of sublayers nobody sees them."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    engine.add(GenerationRequest(prompt_tokens(CONTEXT, 0), params, "0"))
    engine.step()
    kernels: Any = engine.model.executor.family.kernels
    sublayers, products_s, steps_s = kernels.sublayers, list[float](), list[float]()
    try:
        for _ in range(OUTSIDE_STEPS):
            kernels.sublayers = None
            products_s.append(_products_s(engine, kernels))
            kernels.sublayers = sublayers
            started = time.perf_counter()
            engine.step()
            steps_s.append(time.perf_counter() - started)
    finally:
        kernels.sublayers = sublayers
        engine.abort("0")
    return 1 - statistics.median(products_s) / statistics.median(steps_s)


def _products_s(engine: Engine, kernels: Any) -> float:
    """Seconds of a step that its products take, where each is a call of its own."""
    multiply, spent = kernels.linear, 0.0

    def timed(*operands: Any) -> torch.Tensor:
        nonlocal spent
        started = time.perf_counter()
        y: torch.Tensor = multiply(*operands)
        spent += time.perf_counter() - started
        return y

    kernels.linear = timed
    try:
        engine.step()
        return spent
    finally:
        del kernels.linear  # the method is there again


def prompt_s(engine: Engine, clock: Clock = time.perf_counter) -> float:
    """Seconds of the one step that computes a prompt of 512."""
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(GenerationRequest(prompt_tokens(PROMPT, 0), params, "prompt"))
    started = clock()
    outputs = engine.step()
    assert len(outputs) == 1
    return clock() - started


class Peer(Protocol):
    def decode_step_s(self, num_seqs: int, num_steps: int) -> float: ...

    def prompt_s(self) -> float: ...


class Eager:
    """transformers' own model of the same shape in bfloat16."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**{k: v for k, v in shape.items() if k != "architectures"})
        config._attn_implementation = "eager"
        torch.set_default_dtype(torch.bfloat16)
        self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)

    @torch.inference_mode()
    def decode_step_s(self, num_seqs: int, num_steps: int) -> float:
        ids = torch.tensor([prompt_tokens(CONTEXT, index) for index in range(num_seqs)])
        result = self.model(ids, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            token = result.logits[:, -1:].argmax(-1)
            result = self.model(token, past_key_values=result.past_key_values, use_cache=True)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    @torch.inference_mode()
    def prompt_s(self) -> float:
        ids = torch.tensor([prompt_tokens(PROMPT, 0)])
        started = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started


class Int8:
    """Our own engine with INT8 weights, beside one with 4 bits."""

    def __init__(self, shape: dict[str, Any], config: EngineConfig) -> None:
        int8 = replace(config, weights="int8", group_size=None)
        self._engine = synthetic_engine(shape, int8, num_kv_tokens=8192)

    def decode_step_s(self, num_seqs: int, num_steps: int) -> float:
        return decode_step_s(self._engine, num_seqs, num_steps)

    def prompt_s(self) -> float:
        return prompt_s(self._engine)


class LlamaCpp:
    """llama.cpp's of the same shape, whose file is written once. A process of its own: its OpenMP and torch's
    don't get along in one."""

    def __init__(self, shape: str, kind: str) -> None:
        script = Path(__file__).with_name("peer_llama_cpp.py")
        words = [sys.executable, str(script), "--answer", "--shape", shape, "--kind", kind]
        words += ["--context", str(PROMPT), "--threads", str(num_physical_cores())]
        words += ["--sequences", str(max(BATCHES))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask([])  # until the model is there

    def decode_step_s(self, num_seqs: int, num_steps: int) -> float:
        first, *rest = self._ask([[num_seqs, position] for position in range(num_steps + 1)])
        return statistics.median(rest)

    def prompt_s(self) -> float:
        return self._ask([[1, prompt_tokens(PROMPT, 0)]])[0]

    def _ask(self, steps: list[list[Any]]) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(steps), file=self._process.stdin, flush=True)
        seconds: list[float] = json.loads(self._process.stdout.readline())
        return seconds


@contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """Meanwhile, a process on each of the first `num_cores` cores computes without end."""
    spin = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    others = [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in cores]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(
    engine: Engine, peers: dict[str, Peer], batches: Sequence[int], has_prompt: bool
) -> dict[str, Any]:
    """Rounds of everything in turn, so that a drift of the machine meets all alike; medians."""
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    # The engine's kernels have their own threads, and torch has one. Torch's other threads, which wait by
    # computing, would take the kernels' cores. transformers gets all of torch's.
    build = getattr(engine.model.executor._family.kernels, "build", None)
    own_threads, num_threads = torch.get_num_threads(), num_physical_cores()
    for _ in range(ROUNDS):
        torch.set_num_threads(num_threads)
        note("memory_read_gbps", memory_read_gbps())
        note("int8_gops", int8_gops(num_threads, build=build))
        for name, peer in peers.items():
            torch.set_num_threads(num_threads if isinstance(peer, Eager) else own_threads)
            for num_seqs in batches:
                note(f"{name}_decode_{num_seqs}_s", peer.decode_step_s(num_seqs, 4))
            if has_prompt:
                note(f"{name}_prompt_s", peer.prompt_s())
        torch.set_num_threads(own_threads)
        for num_seqs in batches:
            note(f"decode_{num_seqs}_s", decode_step_s(engine, num_seqs, 12 if num_seqs < 32 else 6))
        if has_prompt:
            note("prompt_s", prompt_s(engine))
        note("outside_matrices", outside_matrices(engine))
    return {name: statistics.median(values) for name, values in samples.items()}


def report(engine: Engine, shape: str, activations: str, peers: Collection[str], m: dict[str, Any]) -> None:
    """The card, then the JSON line."""
    weight_bytes, elements = step_weight_bytes(engine), step_elements(engine)
    rows = 2 if activations == "int16" else 1
    kinds = ", ".join(sorted({tensor.format.name for tensor in engine.model.store.tensors.multiplied}))
    print(f"{shape}, weights {kinds}, {activations} activations, kernels {engine_kernels(engine)},")
    print(f"tuning {engine.config.kernel_tuning or 'default'},")
    print(f"{num_physical_cores()} threads; weights read per step: {weight_bytes / 1e9:.2f} GB")
    print(f"ceilings: memory read {m['memory_read_gbps']:.1f} GB/s, INT8 {m['int8_gops']:.0f} GOPS")

    def beside(what: str, num_tokens: int) -> str:
        """The peers' rates, and how many times as fast we are."""
        return "".join(
            f"; {name} {num_tokens / m[f'{name}_{what}']:.1f} ({m[f'{name}_{what}'] / m[what]:.1f} times)"
            for name in peers
        )

    for num_seqs in [each for each in BATCHES if f"decode_{each}_s" in m]:
        seconds = m[f"decode_{num_seqs}_s"]
        floor = max(
            weight_bytes / m["memory_read_gbps"] / 1e9,
            2 * rows * num_seqs * elements / m["int8_gops"] / 1e9,
        )
        m[f"decode_{num_seqs}_floor_share"] = floor / seconds
        print(
            f"decode, {num_seqs:2} sequences: {num_seqs / seconds:7.1f} tokens/s, {seconds * 1e3:6.1f} ms a "
            f"step, {floor / seconds:4.0%} of the floor ({weight_bytes / seconds / 1e9:.1f} GB/s)"
            + beside(f"decode_{num_seqs}_s", num_seqs)
        )
    if (seconds := m.get("prompt_s", 0.0)) > 0:
        floor = 2 * rows * PROMPT * layer_elements(engine) / m["int8_gops"] / 1e9
        m["prompt_floor_share"] = floor / seconds
        rate = f"{PROMPT / seconds:.0f} tokens/s, {floor / seconds:.0%} of the INT8 ceiling"
        print(f"prompt of {PROMPT}: {rate}{beside('prompt_s', PROMPT)}")
    print(f"outside the matrices: {m['outside_matrices']:.1%} of a step with one sequence")
    print(json.dumps({"bench": f"decode {shape}", "activations": activations, **m}))


def layer_elements(engine: Engine) -> int:
    """Elements of all layers' matrices."""
    units = engine.model.store.tensors.units
    return sum(tensor.num_elements for unit in units for tensor in unit.tensors if tensor.is_matrix)


def step_elements(engine: Engine) -> int:
    """Elements of the matrices that a token meets in a step."""
    return layer_elements(engine) + engine.model.store.tensors.output_matrix.num_elements


def engine_kernels(engine: Engine) -> str:
    kernels = engine.model.executor._family.kernels
    return f"{kernels.traits.name} {getattr(kernels, 'build', '')}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--activations", choices=("int16", "int8"), default="int16")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument(
        "--peers", nargs="*", choices=("transformers", "llama.cpp", "int8"), default=["transformers"]
    )
    parser.add_argument("--weights", choices=("int8", "int4"), default="int8")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128))
    parser.add_argument("--sequences", nargs="*", type=int, choices=BATCHES, default=BATCHES)
    parser.add_argument("--no-prompt", action="store_true", help="leave the prompt of 512 out")
    parser.add_argument("--build", choices=compiled_builds(), help="of cpu.c; the best one unless told")
    parser.add_argument("--kernel-tuning", type=KernelTuning.parse, help="default: as measured now")
    parser.add_argument("--busy-cores", type=int, default=0, help="cores on which another process computes")
    options = parser.parse_args()
    if options.build:
        cpu_builds.compiled_builds = kernels.compiled_builds = lambda: [options.build]
    config = EngineConfig(
        activations=options.activations,
        kernels=options.kernels,
        weights=options.weights,
        group_size=options.group_size,
    )
    if kernels.native_build(config):
        tuning = options.kernel_tuning or measure_hardware(None, config, measures_disk=False).kernels.tuning
        config = replace(config, kernel_tuning=tuning)
    shape = find_shape(options.shape)
    engine = synthetic_engine(shape, config, num_kv_tokens=8192)
    makers: dict[str, Callable[[], Peer]] = {
        "transformers": lambda: Eager(shape),
        "llama.cpp": lambda: LlamaCpp(options.shape, "Q4_0" if options.weights == "int4" else "Q8_0"),
        "int8": lambda: Int8(shape, config),
    }
    peers = {name: makers[name]() for name in options.peers}
    with busy(options.busy_cores):
        measured = measure(engine, peers, options.sequences, not options.no_prompt)
    report(engine, options.shape, options.activations, peers, measured)


if __name__ == "__main__":
    main()
