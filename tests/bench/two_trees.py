"""Two checkouts of Penstock on one machine: whether they answer with the same bits, and which one takes less
time for a step. A change that should change nothing is compared with the tree before it.

    python tests/bench/two_trees.py [OTHER_CHECKOUT] [--no-times] [--models Llama gpt-oss]

Without another checkout it prints this one's hashes. Answers are compared by a hash of tokens and
log-probabilities: of a dozen families' tiny random models, whose layers are streamed, greedy and sampled,
without and with drafts; converted folders by a hash of their files. Steps are those of the demo model, of
four layers of TinyLlama's shape and of two layers of a mixture with random weights: both trees take turns,
and the ratio is this checkout's time over the other's. Its status is 1 if hashes differ, or if an answer that
should have drafts took none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

HERE = Path(__file__).resolve().parents[2]
MODELS = (
    "Llama", "Qwen3", "Phi-3, rope longrope", "Qwen3-MoE", "DeepSeek V3", "gpt-oss", "Gemma 3",
    "Gemma 4, experts", "MiniCPM3", "GPT-2", "BLOOM", "Falcon, groups", "Qwen3-Next", "Granite 4",
)  # fmt: skip
#: The families whose sequences can't take drafts back: they have recurrent states.
UNDRAFTED = ("Qwen3-Next", "Granite 4")
WAYS = ("greedy", "sampled", "greedy, drafted", "sampled, drafted")
TIMED = ("demo", "tinyllama", "mixture")
ROUNDS, STEPS, CONTEXT = 9, 20, 64


class Tree:
    """A process that runs one checkout's code and answers one question after the other."""

    def __init__(self, root: Path) -> None:
        paths = [root / "engine", root / "server", root / "clients/python", root / "tests/bench"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, *question: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        raise SystemExit(f"a checkout's process ended while it was asked {question}")

    def close(self) -> None:
        self._process.communicate()


# ------------------------------------------------------------ in a checkout's process


def answer_questions() -> None:
    """Reads a question from each line: the name of a function, and its arguments."""
    functions = {each.__name__: each for each in (answers, converted, step_ms)}
    questions = sys.stdin
    for line in questions:
        name, *arguments = json.loads(line)
        print(f"@@{json.dumps(functions[name](*arguments))}", flush=True)


def answers(folder: str, way: str) -> list[Any]:
    """A hash of answers, and how many drafts they took."""
    from penstock import Engine, EngineConfig, GenerationRequest, SamplingParams
    from penstock.text.tokenizer import NoText

    dice, is_drafted = random.Random(5), way.endswith("drafted")
    prompts = [[dice.randrange(3, 150) for _ in range(size)] for size in (1, 9, 40)]
    prompts.append((prompts[1] * 4)[:33])  # which repeats itself
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    drawn = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=24, ignore_eos=True, logprobs=3)
        for seed in range(len(prompts))
    ]
    config = EngineConfig(
        device="cpu", num_resident_layers=1, num_kv_tokens=1024, max_num_batched_tokens=64, num_threads=1,
        speculation="auto" if is_drafted else "off",
    )  # fmt: skip
    (profile,) = (
        each for each in get_args(get_type_hints(Engine.load)["hardware"]) if each is not type(None)
    )
    hardware = profile(1, 1 << 36, 1 << 36, 20.0, 500.0)
    digest = hashlib.sha256()
    with Engine.load(folder, config, tokenizer=NoText(), hardware=hardware) as engine:
        params = [greedy] * len(prompts) if way.startswith("greedy") else drawn
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            engine.add(GenerationRequest(prompt, each, str(number)))
        found: dict[str, list[Any]] = {str(number): [] for number in range(len(prompts))}
        while any(len(tokens) < 24 for tokens in found.values()):
            for output in engine.step():
                for token, told in zip(output.token_ids, output.logprobs, strict=True):
                    found[output.request_id].append([token, told.logprob, [list(top) for top in told.top]])
        digest.update(json.dumps(found).encode())
        return [digest.hexdigest()[:16], engine.metrics.draft_tokens]


def converted(folder: str, target: str) -> str:
    """A hash of the files that `penstock convert` makes of a folder."""
    from penstock_server.start import main

    sys.argv[1:] = ["convert", folder, target]
    with open(os.devnull) as nothing, contextlib.redirect_stdout(sys.stderr):
        sys.stdin = nothing
        main()
    digest = hashlib.sha256()
    for file in sorted(path for path in Path(target).rglob("*") if path.is_file()):
        digest.update(file.relative_to(target).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def engine_of(name: str) -> Any:
    from penstock import Engine, EngineConfig

    if name == "demo":
        return Engine.load("demo", EngineConfig(device="cpu", speculation="off", enable_prefix_caching=False))
    from synthetic import synthetic_engine

    from penstock.model.known_shapes import find_shape

    if name == "tinyllama":
        shape = find_shape("tinyllama-1.1b") | {"num_hidden_layers": 4}
    else:
        shape = find_shape("olmoe-1b-7b") | {"num_hidden_layers": 2, "num_experts": 16}
    return synthetic_engine(
        shape, EngineConfig(max_num_batched_tokens=512, speculation="off"), num_kv_tokens=2048
    )


def step_ms(name: str) -> float:
    """The median of some steps of one sequence."""
    from penstock import GenerationRequest, SamplingParams

    engine, dice = engine_of(name), random.Random(1)
    prompt = [dice.randrange(3, 250) for _ in range(CONTEXT)]
    engine.add(GenerationRequest(prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), "0"))
    while not engine.step():
        pass
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - began))
    engine.abort("0")
    return statistics.median(times)


# ------------------------------------------------------------ in the first process


def compare_answers(trees: list[Tree], models: list[str], folder: Path) -> bool:
    """Prints a line for each answer; whether all trees have the same."""
    sys.path[:0] = [str(HERE / "tests" / "engine")]
    from tiny_models import build

    is_same = True

    def tell(what: str, told: Sequence[str], trouble: str = "") -> None:
        nonlocal is_same
        trouble = trouble or ("DIFFERENT" if len(set(told)) > 1 else "")
        is_same &= not trouble
        print(f"{what}: {' '.join(told)} {trouble}", flush=True)

    for number, name in enumerate(models):
        plain = folder / str(number)
        build(name, plain)
        targets = [f"{plain}-{place}" for place in range(len(trees))]
        pairs = list(zip(trees, targets, strict=True))
        tell(f"{name}, converted", [tree.ask("converted", str(plain), target) for tree, target in pairs])
        for way in WAYS[:2] if name in UNDRAFTED else WAYS:
            hashes, drafts = zip(*(tree.ask("answers", target, way) for tree, target in pairs), strict=True)
            tell(f"{name}, {way}", hashes, "NO DRAFTS" if way.endswith("drafted") and 0 in drafts else "")
    return is_same


def compare_times(trees: list[Tree]) -> None:
    for name in TIMED:
        times = [[tree.ask("step_ms", name) for tree in trees] for _ in range(ROUNDS + 1)][1:]
        medians = [statistics.median(each) for each in zip(*times, strict=True)]
        text = " and ".join(f"{each:.3f}" for each in medians)
        if len(trees) == 2:
            ratios = [new / old for old, new in times]
            text += f", ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"step of {name}, ms: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout, the old one")
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), help="names of tests/engine/tiny_models.py"
    )
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-answers", action="store_true")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer_questions()
        return
    roots = [HERE] if options.other is None else [options.other.resolve(), HERE]
    trees, is_same = [Tree(root) for root in roots], True
    with tempfile.TemporaryDirectory() as scratch:
        if not options.no_answers:
            is_same = compare_answers(trees, options.models, Path(scratch))
        if not options.no_times:
            compare_times(trees)
    for tree in trees:
        tree.close()
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
