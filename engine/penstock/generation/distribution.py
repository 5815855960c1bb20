"""What a row of logits says: log-probabilities, the likeliest tokens, and a draw."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.generation_request import SamplingParams

#: Candidates that are sorted first. The whole vocabulary is sorted only if top_p needs more candidates.
FIRST_CANDIDATES = 1024
#: Tokens whose logits, divided by the temperature, are at most so far below the largest are likely.
_LIKELY = 8.0
#: Among so many of the likeliest tokens contenders() looks for draws.
_CONTENDERS = 64
#: SplitMix64's step: 2**64 divided by the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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


def draw(logits: Tensor, params: SamplingParams, seed: int, index: int) -> int:
    """A token from the filtered distribution: the token with the largest logit / temperature + Gumbel noise
    (the Gumbel-max trick). A draw from a similar distribution with the same noise gives the same token as
    often as can be (Daliri, Musco, Suresh 2024, arXiv 2408.07978), so that drafts come true.

    logits [vocab_size]; filters in vLLM's and transformers' order: temperature, top_k, top_p, min_p.
    """
    below = (logits.double() - logits.max()) / params.temperature  # no temperature is too small
    ids: Tensor | None = None
    if 0 < params.top_k < len(logits) or params.top_p < 1:
        weights, ids = _likeliest(torch.exp(below), params)
        below = below[ids]
    if params.min_p > 0:
        below = torch.where(torch.exp(below) >= params.min_p, below, -torch.inf)
    place = _noisiest(below.numpy(), None if ids is None else ids.numpy(), seed, index)
    return place if ids is None else int(ids[place])


def contenders(
    logits: Tensor, params: SamplingParams, seed: int, index: int, count: int
) -> list[tuple[int, float]]:
    """At most `count` tokens that may be chosen, likeliest first, with the softmax of their scores: logits,
    or logits / temperature + noise as draw() has them. A guess: draws are looked for among few tokens."""
    ids = logits.topk(min(len(logits), max(count, _CONTENDERS if params.temperature > 0 else 0))).indices
    if params.temperature <= 0:
        shares = torch.softmax(logits.float(), dim=-1)[ids]
        return list(zip(ids.tolist(), shares.tolist(), strict=True))
    below = (logits[ids].double() - logits.max()) / params.temperature
    if 0 < params.top_k < len(ids) or params.top_p < 1:
        kept, places = _likeliest(torch.exp(below), params)
        ids, below = ids[places], torch.log(kept)
    possible = torch.isfinite(below) & (torch.exp(below) >= params.min_p)
    ids, below = ids[possible], below[possible]
    steps = (ids.numpy().astype(np.uint64) + np.uint64(1)) * _GOLDEN
    scores = below.numpy() + _gumbel(_random_bits(seed, index, steps))
    order = np.argsort(-scores, kind="stable")[:count]
    shares = torch.softmax(torch.from_numpy(scores), dim=-1)
    return [(int(ids[place]), float(shares[place])) for place in order]


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


def _noisiest(scores: np.ndarray, ids: np.ndarray | None, seed: int, index: int) -> int:
    """The place of the largest of float64 `scores` (at most 0) plus noise. `ids`: tokens of the scores; None:
    all tokens in order.

    Logarithms are taken of few: noise beyond the best of the likely tokens needs a large random number, and
    the numbers themselves are quick.
    """
    all_ids = np.arange(len(scores), dtype=np.uint64) if ids is None else ids.astype(np.uint64)
    steps = (all_ids + np.uint64(1)) * _GOLDEN
    numbers = _random_bits(seed, index, steps)
    likely = np.flatnonzero(scores > -_LIKELY)
    noisy = scores[likely] + _gumbel(numbers[likely])
    best = int(noisy.argmax())
    # A token with a score of -_LIKELY at most needs more noise than this.
    least = math.exp(-math.exp(-(float(noisy[best]) + _LIKELY)))
    others = np.flatnonzero(numbers >= np.uint64(max(0, int(least * 2.0**52) - 1)))
    others = others[scores[others] <= -_LIKELY]
    if len(others):
        rivals = scores[others] + _gumbel(numbers[others])
        if rivals.max() > noisy[best]:
            return int(others[rivals.argmax()])
    return int(likely[best])


def _random_bits(seed: int, index: int, steps: np.ndarray) -> np.ndarray:
    """uint64 numbers of 52 bits: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014), whose stream begins at the index-th number of the seed's stream."""
    mask = (1 << 64) - 1
    mixed = _mix(seed & mask)  # seed and seed + 1 must not share a stream: n choices get seed + i
    key = _mix((mixed + (index + 1) * int(_GOLDEN)) & mask)
    x: np.ndarray = steps + np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(12)
    return x


def _gumbel(numbers: np.ndarray) -> np.ndarray:
    """-log(-log(u)) of numbers of 52 bits, as u in (0, 1), neither end included."""
    exponential: np.ndarray = -np.log((numbers.astype(np.float64) + 0.5) * 2.0**-52)
    noise: np.ndarray = -np.log(exponential)
    return noise


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
