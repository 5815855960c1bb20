"""The likeliest tokens of each row of logits, of which guesses are made in later steps.

Each step of each sequence asks for them, whether or not a guess will pay. So they are found a part of the
logits at a time, and in two passes: torch's topk looks at the largest logit of each block of the vocabulary,
and then at the tokens of the best blocks alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens of a block.
BLOCK = 64


def likely_followers(logits: Tensor, count: int) -> list[tuple[int, ...]]:
    """For each row of logits [num_rows, vocab_size] the `count` likeliest tokens, or all if there are fewer,
    likeliest first; of equally likely tokens any."""
    size = logits.shape[1]
    num_blocks = size // BLOCK
    if num_blocks <= count:
        return _tuples(logits.topk(min(count, size)).indices)
    blocks = logits[:, : num_blocks * BLOCK].view(-1, num_blocks, BLOCK)
    # The largest logits are in the blocks whose largest ones are the largest, or after the last block.
    best = blocks.amax(dim=-1).topk(count).indices
    ids = (BLOCK * best[:, :, None] + torch.arange(BLOCK)).flatten(1)
    rest = torch.arange(num_blocks * BLOCK, size).expand(len(logits), -1)
    ids = torch.cat((ids, rest), dim=1)
    return _tuples(ids.gather(1, logits.gather(1, ids).topk(count).indices))


def _tuples(ids: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in ids.tolist()]
