"""llama.cpp with a draft model of its own where its weights have no room: rounds of one sequence, to stand
beside forced_drafts.py. In a round the draft model guesses a chain of tokens, one after the other, and the
target computes all of them in one call. Both models are in one process, whose memory is limited (a cgroup, so
root is needed), and the target's file is mapped into memory. Weights are random: a round takes its real time,
and its guesses are right at a stated rate, until the first that is wrong. Q8_0, and the draft model Q4_0.
Needs `pip install llama-cpp-python gguf` and as much disk as the shapes have parameters.

    python tests/bench/peer_llama_drafts.py [--memory 6.5] [--rate 0.74] [--chains 0 8] [--read-ahead 128]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
from memory_limit import LimitedProcess, forget_pages, read_ahead
from peer_llama_cpp import TOKEN_IDS, Llama
from random_gguf import SHAPES, model_file

CONTEXT, PROMPT, NUM_THREADS = 1024, 32, 2


class Chained(Llama):
    """One sequence."""

    def extend(self, token_ids: list[int], position: int) -> float:
        """Seconds of a call with these tokens from a position on, of all of which logits are wanted. What was
        there or behind is forgotten."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, position, -1)
        return self._decode([(token, position + index, 0, True) for index, token in enumerate(token_ids)])


def answer(target: Chained, draft: Chained) -> None:
    """Reads lines [position, tokens that stand since the last round, guesses], and writes a line of the
    seconds of each round, and of its draft model."""
    dice = random.Random(0)
    for line in sys.stdin:
        position, num_new, num_guesses = json.loads(line)
        began = time.perf_counter()
        if num_guesses:  # the draft model lacks what stands since its last guess
            draft.extend([dice.randrange(3, TOKEN_IDS) for _ in range(num_new)], position - num_new + 1)
            for index in range(1, num_guesses):
                draft.extend([dice.randrange(3, TOKEN_IDS)], position + index)
        drafting_s = time.perf_counter() - began
        target.extend([dice.randrange(3, TOKEN_IDS) for _ in range(1 + num_guesses)], position)
        print(json.dumps([time.perf_counter() - began, drafting_s]), flush=True)


def rounds(process: LimitedProcess, num_guesses: int, rate: float, number: int, position: int) -> int:
    """Prints what so many rounds took. Returns the position behind them."""
    dice, found, num_tokens, num_new = random.Random(1), list[list[float]](), 0, 1
    for index in range(number + 1):
        seconds = json.loads(process.ask(json.dumps([position, num_new, num_guesses])))
        num_new = 1
        while num_new <= num_guesses and dice.random() < rate:
            num_new += 1
        position += num_new
        if index:  # the first one settles the caches
            found.append(seconds)
            num_tokens += num_new
    step_s, drafting_s = (statistics.median(each) for each in zip(*found, strict=True))
    hoped = sum(rate**level for level in range(num_guesses + 1))
    print(
        f"{num_guesses:2} guesses: {step_s:.2f} s a round, {drafting_s:.2f} s of them drafting; "
        f"{hoped:.2f} tokens in a round by the rate: {hoped / step_s:.3f} tokens/s, "
        f"{hoped / (step_s - drafting_s):.3f} if the text's n-grams guessed them, which costs nothing; "
        f"all {number} rounds: {num_tokens / sum(each for each, _ in found):.3f} tokens/s",
        flush=True,
    )
    return position


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="solar-10.7b")
    parser.add_argument("--draft-shape", default="tinyllama-1.1b")
    parser.add_argument("--folder", type=Path, default=SHAPES)
    parser.add_argument("--memory", type=float, default=6.5, help="GiB")
    parser.add_argument("--rate", type=float, default=0.74, help="share of right guesses behind right ones")
    parser.add_argument("--chains", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-ahead", type=int, default=None, help="KiB; default: the machine's")
    parser.add_argument("--answer", action="store_true", help="take rounds from standard input")
    options = parser.parse_args()
    target = model_file(options.shape, "Q8_0", options.folder)
    draft = model_file(options.draft_shape, "Q4_0", options.folder)
    if options.answer:
        models = (Chained(path, 1, NUM_THREADS, CONTEXT, path == target) for path in (target, draft))
        answer(*models)
        return
    words = [sys.executable, __file__, "--answer", "--shape", options.shape]
    words += ["--draft-shape", options.draft_shape, "--folder", str(options.folder)]
    for path in (target, draft):
        forget_pages(path)
    with read_ahead(target, options.read_ahead):
        process = LimitedProcess("peer-drafts", int(options.memory * 2**30), words)
        try:
            process.ask(json.dumps([0, 1, PROMPT]))
            position = 1
            for number in options.chains:
                position = rounds(process, number, options.rate, options.rounds, position)
        finally:
            process.close()


if __name__ == "__main__":
    main()
