"""What a row of logits says: log-probabilities, the likeliest tokens, and a draw."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.generation.generation_request import SamplingParams
from penstock.generation.logprobs import TokenLogprobs

#: Candidates that are sorted first. The whole vocabulary is sorted only if top_p needs more candidates.
FIRST_CANDIDATES = 1024


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural log-probabilities of the chosen and the likeliest tokens; logits [vocab_size]."""
    return rival_logprobs(logits, [token_id], num_top)[0]


def rival_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """The same for several tokens, of which each might be the chosen one."""
    # The sum is in float64: a float32 sum over a large vocabulary is off by more than 1e-5.
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    # Logits have the same order as log-probabilities, and float32 is sorted several times as fast.
    _, ids = _sorted(logits, min(num_top, len(logits)))
    top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return [
        TokenLogprobs(token_id, float(logprobs[token_id]), top, 1 + int((logits > logits[token_id]).sum()))
        for token_id in token_ids
    ]


def likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens that are possible at all, with their log-probabilities, likeliest first.
    Of equally likely tokens the lower id comes first. logprobs: [vocab_size]"""
    values, ids = _sorted(logprobs, count)
    return [
        (id_, value) for id_, value in zip(ids.tolist(), values.tolist(), strict=True) if value > -math.inf
    ]


def draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """A token from the filtered distribution: the first whose cumulative probability exceeds u.

    logits [vocab_size]; filters in vLLM's and transformers' order: temperature, top_k, top_p, min_p.
    """
    below = logits.double() - logits.max()  # before the division, so that no temperature is too small
    weights = torch.exp(below / params.temperature)
    is_filtered = 0 < params.top_k < len(logits) or params.top_p < 1
    ids: Tensor | None = None
    if is_filtered:
        weights, ids = _likeliest(weights, params)
    if params.min_p > 0:
        weights = torch.where(weights >= params.min_p * weights.max(), weights, 0.0)
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    # u * total may round up to total. The last token with any probability is meant then.
    index = min(index, int(weights.nonzero()[-1]))
    return index if ids is None else int(ids[index])


def _likeliest(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The weights that top_k and then top_p keep, largest first, and their ids."""
    limit = params.top_k if params.top_k > 0 else len(weights)
    count = min(limit, len(weights))
    if params.top_p < 1 and count > FIRST_CANDIDATES:
        total = float(weights.sum())
        kept, ids = _sorted(weights, FIRST_CANDIDATES)
        if limit >= len(weights) and float(kept.sum()) >= params.top_p * total:
            return _nucleus(kept, ids, params.top_p * total)
    kept, ids = _sorted(weights, count)
    return _nucleus(kept, ids, params.top_p * float(kept.sum())) if params.top_p < 1 else (kept, ids)


def _sorted(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest weights, largest first, and their ids. Equal weights are in order of id."""
    if count >= len(weights):
        values, ids = weights.sort(descending=True, stable=True)
        return values, ids
    if count == 0:
        return weights[:0], torch.empty(0, dtype=torch.long)
    threshold = weights.topk(count).values[-1]
    # topk breaks ties in any order, so all weights as large as the last one are taken, in order of id.
    candidates = (weights >= threshold).nonzero().flatten()
    values, order = weights[candidates].sort(descending=True, stable=True)
    return values[:count], candidates[order[:count]]


def _nucleus(weights: Tensor, ids: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The fewest of the sorted weights that reach `mass`, at least one."""
    before = weights.cumsum(0) - weights
    keep = max(1, int((before < mass).sum()))
    return weights[:keep], ids[:keep]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone: SplitMix64 (Steele, Lea, Flood, "Fast
    splittable pseudorandom number generators", 2014), the index-th number of the seed's stream."""
    mask = (1 << 64) - 1
    mixed = _mix(seed & mask)  # seed and seed + 1 must not share a stream: n choices get seed + i
    return (_mix((mixed + (index + 1) * 0x9E3779B97F4A7C15) & mask) >> 11) * math.ldexp(1.0, -53)


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
