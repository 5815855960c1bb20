"""Followers: how long it takes to find the likeliest tokens of a step's rows, in microseconds of one thread:
row by row with torch's topk, and by blocks (penstock.generation.likely_followers). The largest logit of each
row, which each step finds, stands beside them.

    python tests/bench/followers.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.generation.drafting.acceptance import NUM_RANKS
from penstock.generation.likely_followers import likely_followers

ROUNDS = 40


def row_by_row(logits: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row.topk(NUM_RANKS).indices.tolist()) for row in logits]


def by_blocks(logits: Tensor) -> list[tuple[int, ...]]:
    return likely_followers(logits, NUM_RANKS)


def largest(logits: Tensor) -> list[int]:
    return list(logits.max(dim=-1).indices.tolist())


def microseconds(find: Callable[[Tensor], object], logits: Tensor) -> float:
    """The median; the logits are written before each call, as a step's are."""
    seconds = []
    for _ in range(ROUNDS):
        logits.add_(0.0)
        began = time.perf_counter()
        find(logits)
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    print("vocabulary  rows  row by row  by blocks  largest alone")
    for size in (32000, 151936):
        for num_rows in (1, 8, 32):
            logits = torch.randn(num_rows, size)
            assert row_by_row(logits) == by_blocks(logits)
            times = (microseconds(find, logits) for find in (row_by_row, by_blocks, largest))
            print(f"{size:10} {num_rows:5}", *(f"{each:11.0f}" for each in times))


if __name__ == "__main__":
    main()
