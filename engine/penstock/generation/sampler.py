"""Sampler: logits -> token ids, each row by its own sequence's parameters.

Batch invariance: rows that need more than an argmax are processed one by one. The same row meets the same
operations on the same shapes, whatever else is in the batch. The noise of a draw depends on the
sequence's seed and the token's index alone, so a preempted sequence draws the same tokens again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ComputationError, NoTokenLeft, RequestFailed
from penstock.generation.chosen import NOTHING, Chosen, ProposedToken, SampledToken
from penstock.generation.distribution import contenders, draw, likeliest, rival_logprobs, token_logprobs
from penstock.generation.likely_followers import likely_followers
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence

if TYPE_CHECKING:
    from penstock.generation.beam_search import BeamParams
    from penstock.generation.grammars.matching import Matching


class Row(NamedTuple):
    """A row of logits."""

    logits: Tensor  # [vocab_size]
    largest: float
    #: The token of the largest logit.
    greedy: int
    #: The likeliest tokens, likeliest first; () unless a drafter asks for them.
    followers: tuple[int, ...] = ()


class Sampler:
    """Chooses tokens for one model."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], never_first: tuple[int, ...] = ()
    ) -> None:
        """never_first: tokens with which no answer begins, unless a grammar says how it begins."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._never_first = list(never_first)

    @torch.inference_mode()
    def choose(self, logits: Iterable[Tensor], batch: Batch) -> list[Chosen]:
        """Tokens and scores for each sequence of the batch. logits: float32 [some, vocab_size], part after
        part. All parts together have the rows that the batch wants, in the batch's order. One part is in
        memory at a time.

        A row that holds NaN, or infinity as its largest logit, gives a ComputationError. A row whose
        parameters leave no token to choose gives NoTokenLeft. A row whose grammar met a limit gives a
        RequestFailed.
        """
        rows = _rows(logits, batch.num_followers)
        return [self._choose(item, rows) for item in batch.scheduled]

    @torch.inference_mode()
    def candidates(self, logits: Iterable[Tensor], batch: Batch, count: int) -> list[list[tuple[int, float]]]:
        """For each sequence of the batch at most `count` tokens that choose() might choose, likeliest first,
        with their shares: the softmax of the logits, with the noise of the draw where the sequence draws.
        None where choose() would fail. logits: one row for each sequence, in parts."""
        found = []
        for item, row in zip(batch.scheduled, _rows(logits), strict=True):
            sequence, adjusted = item.sequence, self._adjusted(row, item.sequence, item.sequence.matcher)
            is_possible = math.isfinite(row.largest) and math.isfinite(float(adjusted.max()))
            index = sequence.num_output_tokens
            found.append(
                contenders(adjusted, sequence.params, sequence.seed, index, count) if is_possible else []
            )
        return found

    def _choose(self, item: ScheduledSequence, rows: Iterator[Row]) -> Chosen:
        sequence = item.sequence
        scores = tuple(_score(next(rows), sequence, index) for index in item.scored) if item.scored else ()
        if item.drafts:
            return self._verify(item, islice(rows, 1 + item.drafts.num_nodes), scores)
        if not item.is_sampled:
            return Chosen((), scores) if scores else NOTHING
        if sequence.params.beams is not None:
            return self._propose(next(rows), sequence, sequence.params.beams, scores)
        row = next(rows)
        token = self._sample_row(row, sequence, sequence.matcher)
        if not isinstance(token, SampledToken):
            return Chosen((), scores, token)
        followers = _followers(row, sequence)
        return Chosen((token,), scores, followers=followers) if followers else Chosen((token,), scores)

    def _verify(
        self, item: ScheduledSequence, rows: Iterator[Row], scores: tuple[TokenLogprobs, ...]
    ) -> Chosen:
        """Follow the path of drafts that are chosen at their places: the row after each is then the same as
        without drafts. Stop where no draft has the chosen token, and where the answer may end.

        A failure counts in the first row only. A later row's failure comes after accepted tokens, which the
        caller is told first. The next step meets the same failure in its first row.
        """
        sequence, drafts, tokens = item.sequence, item.drafts, list[SampledToken]()
        matcher, error = sequence.matcher, None
        place, num_right, is_open, followers = -1, 0, True, list[tuple[int, ...]]()
        # A node comes after the node that it follows. So the rows are seen once, in order.
        for node, row in enumerate(rows, start=-1):
            followers += _followers(row, sequence)
            if node >= 0:
                is_next = is_open and drafts.parents[node] == place
                if not is_next or drafts.token_ids[node] != tokens[-1].token_id:
                    continue
                place, num_right = node, num_right + 1
                if matcher is not None:
                    matcher = matcher.after(tokens[-1].token_id)
                is_end = self._is_end(tokens[-1].token_id, sequence.params)
                if is_end or (matcher is not None and matcher.is_complete):
                    is_open = False
                    continue
            token = self._sample_row(row, sequence, matcher, tuple(told.token_id for told in tokens))
            if isinstance(token, SampledToken):
                tokens.append(token)
            else:
                error, is_open = None if tokens else token, False
        return Chosen(tuple(tokens), scores, error, (), drafts.num_nodes, num_right, tuple(followers))

    def _propose(
        self, row: Row, sequence: Sequence, beams: BeamParams, scores: tuple[TokenLogprobs, ...]
    ) -> Chosen:
        """The likeliest tokens after a beam. With one token more than beams for each end token, no end token
        keeps a beam from the next round; as many again are for stop strings and grammars, which end answers,
        too."""
        logits, largest = row.logits, row.largest
        if not math.isfinite(largest):
            return Chosen((), scores, _no_number(largest))
        params, matcher, num_output = sequence.params, sequence.matcher, sequence.num_output_tokens
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
        if needs_adjusting(params, num_output, matcher) or (self._never_first and num_output == 0):
            logprobs = self._adjust(logprobs, params, sequence.text_ids, num_output, matcher)
        num_ends = len(self._eos_token_ids | set(params.stop_token_ids))
        found = likeliest(logprobs, 2 * beams.num_beams + num_ends)
        if not found or (matcher and matcher.error):
            return Chosen((), scores, _no_choice(params, num_output, matcher))
        told: list[TokenLogprobs] | list[None] = [None] * len(found)
        if params.logprobs is not None:
            told = rival_logprobs(logits, [token_id for token_id, _ in found], params.logprobs)
        proposals = zip(found, told, strict=True)
        return Chosen(
            (),
            scores,
            None,
            tuple(ProposedToken(SampledToken(id_, own), value) for (id_, value), own in proposals),
        )

    def _sample_row(
        self, row: Row, sequence: Sequence, matcher: Matching | None, accepted: tuple[int, ...] = ()
    ) -> SampledToken | RequestFailed:
        """Choose the token after the sequence's own tokens and the `accepted` ones. `matcher` stands
        there."""
        logits, largest, token_id, _ = row
        if not math.isfinite(largest):
            return _no_number(largest)
        params, num_output = sequence.params, sequence.num_output_tokens + len(accepted)
        adjusted = self._adjusted(row, sequence, matcher, accepted)
        if adjusted is not logits:
            token_id = int(adjusted.argmax())
            if not math.isfinite(adjusted[token_id]) or (matcher and matcher.error):
                return _no_choice(params, num_output, matcher)
        if params.temperature > 0:
            token_id = draw(adjusted, params, sequence.seed, num_output)
        if params.logprobs is None:
            return SampledToken(token_id, None)
        return SampledToken(token_id, token_logprobs(logits, token_id, params.logprobs))

    def _adjusted(
        self, row: Row, sequence: Sequence, matcher: Matching | None, accepted: tuple[int, ...] = ()
    ) -> Tensor:
        """The row's logits as the sequence's parameters change them: a copy, unless nothing changes."""
        params, num_output = sequence.params, sequence.num_output_tokens + len(accepted)
        if not needs_adjusting(params, num_output, matcher) and (not self._never_first or num_output):
            return row.logits
        token_ids = [*sequence.text_ids, *accepted] if accepted else sequence.text_ids
        return self._adjust(row.logits, params, token_ids, num_output, matcher)

    def _adjust(
        self,
        logits: Tensor,
        params: SamplingParams,
        token_ids: list[int],
        num_output: int,
        matcher: Matching | None,
    ) -> Tensor:
        """Apply bias, penalties, grammar, forbidden and allowed tokens, in this order, to a copy. token_ids:
        prompt and answer; the last `num_output` are the answer."""
        output = token_ids[len(token_ids) - num_output :]
        logits = logits.clone()
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += logits.new_tensor(list(params.logit_bias.values()))
        if params.repetition_penalty != 1:
            ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=logits.device)
            seen = logits[ids]
            penalty = params.repetition_penalty
            penalized = torch.where(seen > 0, seen / penalty, seen * penalty)
            logits[ids] = penalized.clamp(max=torch.finfo(logits.dtype).max)  # a penalty may be tiny
        if output and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(output)
            ids = torch.tensor(list(counts), device=logits.device)
            times = logits.new_tensor(list(counts.values()))
            logits[ids] -= params.presence_penalty + params.frequency_penalty * times
        if matcher is not None and (allowed_bits := matcher.allowed) != -1:
            logits.masked_fill_(~_mask(allowed_bits, len(logits)), -torch.inf)
        if len(output) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
            logits[[token for token in ends if 0 <= token < self._vocab_size]] = -torch.inf
        if self._never_first and not output and matcher is None:
            logits[self._never_first] = -torch.inf
        if forbidden := forbidden_by_words(params.bad_words, output):
            logits[forbidden] = -torch.inf
        if repeated := tokens_that_repeat(params.no_repeat_ngram_size, token_ids):
            logits[repeated] = -torch.inf
        if params.allowed_token_ids is None:
            return logits
        allowed = _id_tensor(params.allowed_token_ids)
        return torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed])

    def _is_end(self, token_id: int | None, params: SamplingParams) -> bool:
        """Whether the answer ends with this token."""
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        return is_eos or token_id in params.stop_token_ids


def _rows(parts: Iterable[Tensor], num_followers: int = 0) -> Iterator[Row]:
    for part in parts:
        largest, greedy = (column.tolist() for column in part.max(dim=-1))
        followers = likely_followers(part, num_followers) if num_followers else [()] * len(part)
        yield from map(Row, part, largest, greedy, followers)
        del part  # before the next part is made


def _followers(row: Row, sequence: Sequence) -> tuple[tuple[int, ...], ...]:
    """The row's followers, of which drafts are made in later steps: one tuple; none if nobody asks."""
    return (row.followers,) if row.followers and sequence.params.speculation else ()


def _score(row: Row, sequence: Sequence, index: int) -> TokenLogprobs:
    """Log-probabilities of the prompt's token `index`, from the row of the token before."""
    return token_logprobs(row.logits, sequence.token_ids[index], sequence.params.prompt_logprobs or 0)


@lru_cache(maxsize=64)
def _id_tensor(token_ids: tuple[int, ...]) -> Tensor:
    """A tensor of token ids. Tensors are kept, since a list may be as long as the vocabulary and each token
    of the answer needs the tensor."""
    return torch.tensor(token_ids)


def _no_number(largest: float) -> ComputationError:
    return ComputationError(
        f"the model computed {largest}: the weights or the numbers on the way exceed float32; the checkpoint "
        "may be damaged"
    )


def forbidden_by_words(words: List[tuple[int, ...]], output: list[int]) -> list[int]:
    """The tokens that would complete one of `words` at the end of `output`."""
    # Lengths are compared first: clients may send thousands of long words, and each token asks again.
    return [
        word[-1]
        for word in words
        if len(word) == 1 or (len(word) <= len(output) + 1 and output[-len(word) + 1 :] == list(word[:-1]))
    ]


def tokens_that_repeat(size: int, token_ids: list[int]) -> list[int]:
    """The tokens that, at the end of `token_ids`, would make a sequence of `size` tokens occur again."""
    if size == 0 or len(token_ids) < size:
        return []
    if size == 1:
        return sorted(set(token_ids))
    *before, last = token_ids[len(token_ids) - size + 1 :]
    found, place = set[int](), -1
    # list.index() is quick, and the last token alone rules out nearly all places of a long text.
    with suppress(ValueError):
        while True:
            place = token_ids.index(last, place + 1, len(token_ids) - 1)
            if place >= len(before) and token_ids[place - len(before) : place] == before:
                found.add(token_ids[place + 1])
    return sorted(found)


def _no_choice(params: SamplingParams, num_output: int, matcher: Matching | None) -> RequestFailed:
    if matcher is not None and matcher.error:
        return RequestFailed(f"the request's grammar can't be followed any further: {matcher.error}")
    form = "the grammar" if params.blanks is None else "the blanks"
    restrictions = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "no_repeat_ngram_size": bool(params.no_repeat_ngram_size),
        "min_tokens": num_output < params.min_tokens,
        form: matcher is not None,
    }
    return NoTokenLeft([name for name, restricts in restrictions.items() if restricts])


def _mask(allowed: int, vocab_size: int) -> Tensor:
    """bool [vocab_size] from one bit per token."""
    known = allowed & ((1 << vocab_size) - 1)
    bits = np.frombuffer(known.to_bytes(-(-vocab_size // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).bool()


def needs_adjusting(params: SamplingParams, num_output: int, matcher: Matching | None) -> bool:
    """Whether logits change before the choice of the token after `num_output`."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or matcher is not None
        or num_output < params.min_tokens
        or params.bad_words
        or params.no_repeat_ngram_size
        or params.allowed_token_ids is not None
    )
