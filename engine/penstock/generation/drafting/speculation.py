"""Speculation: how many guesses of which sequences a step computes, by what they should bring and cost.

A step with n tokens and k guesses takes t(n + k) seconds, and each sampled sequence gains one token and its
right guesses. The step takes the k with the most expected tokens per second. Where layers are streamed, t
hardly grows with k: guesses are nearly free. Where a step computes many sequences, no guess pays.

Guesses come from the text, where something like it stood before, or from a draft model, which takes time of
its own for each guess of a chain.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from itertools import islice
from typing import Protocol
from weakref import WeakKeyDictionary

from penstock.generation.drafting.acceptance import Acceptance
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.drafting.repeated_text import Continuation, RepeatedText
from penstock.generation.sequence import Sequence

#: Most guesses of one sequence in a step.
MAX_GUESSES = 32
#: Guesses have to bring this many times the tokens per second of a step without: predictions err.
LEAST_GAIN = 1.03
#: Guesses that are right so rarely are not worth a row of logits, even where a step waits for layers.
LEAST_CHANCE = 0.02
#: At first, a draft model is trusted as a text of which so many tokens match.
MODEL_MATCH = 9
#: Lengths of a draft model's chains that are weighed.
CHAINS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


class Guesser(Protocol):
    """A draft model."""

    def seconds(self, num_seqs: int) -> float:
        """What one guess for each of so many sequences takes; 0 if nothing is known."""
        ...

    def draft(self, sequences: List[Sequence], length: int) -> Mapping[Sequence, tuple[int, ...]]:
        """At most `length` tokens that may follow each sequence."""
        ...


class _Track:
    """What is known of one sequence."""

    def __init__(self, sequence: Sequence, of_all: Acceptance, of_model: Acceptance) -> None:
        self.text = RepeatedText(sequence.params.prediction)
        self.acceptance = Acceptance(of_all)
        self.model_acceptance = Acceptance(of_model)
        #: The guess of the step is a draft model's.
        self.is_modelled = False
        #: The guess of the step, and its chance to be right at each place after a right one.
        self.guess = Continuation()
        self.rate = 0.0

    @property
    def model_rate(self) -> float:
        """The chance of a draft model's guess."""
        return self.model_acceptance.rate(MODEL_MATCH)

    def look(self, sequence: Sequence) -> None:
        self.is_modelled = False
        self.text.follow(sequence.token_ids)
        self.guess = self.text.guess(MAX_GUESSES)
        self.rate = self.acceptance.rate(self.guess.num_same)


class Speculation(Drafter):
    """Guesses by what followed the same words in prompt and answer, and by a draft model if there is one."""

    def __init__(self, predict_s: Callable[[int], float], model: Guesser | None = None) -> None:
        """predict_s: tokens of a step -> seconds; 0 if nothing is known. More tokens never take less."""
        self._predict_s = predict_s
        self._model = model
        self._acceptance, self._model_acceptance = Acceptance(), Acceptance()
        self._tracks: WeakKeyDictionary[Sequence, _Track] = WeakKeyDictionary()

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, List[int]]:
        sampled = list(sequences)
        wanted = [each for each in sampled if each.params.speculation]
        if not wanted or not self._may_pay(len(sampled), len(wanted), num_tokens, room):
            return {}
        tracks = {each: self._look(each) for each in wanted}
        if self._model is not None:
            self._ask(self._model, tracks, len(sampled), num_tokens, room)
        lengths = self._lengths(tracks, len(sampled), num_tokens, room)
        for sequence, track in tracks.items():
            if track.guess.token_ids and sequence not in lengths and not track.is_modelled:
                track.acceptance.forget(track.guess.num_same)
        return {
            each: _allowed(each, tracks[each].guess.token_ids[:length]) for each, length in lengths.items()
        }

    def learn(self, sequence: Sequence, drafts: tuple[int, ...], num_accepted: int) -> None:
        track = self._tracks[sequence]
        acceptance = track.model_acceptance if track.is_modelled else track.acceptance
        acceptance.learn(track.guess.num_same, num_accepted, len(drafts))

    def _may_pay(self, num_sampled: int, num_wanted: int, num_tokens: int, room: int) -> bool:
        """Whether guesses would pay if all of them were right. Looking for guesses takes time, too."""
        without_s = self._predict_s(num_tokens)
        if without_s <= 0:
            return False
        counts = {min(room, num_wanted * length) for length in (1, 4, MAX_GUESSES)}
        return any(
            (num_sampled + count) * without_s > LEAST_GAIN * num_sampled * self._predict_s(num_tokens + count)
            for count in counts
        )

    def _look(self, sequence: Sequence) -> _Track:
        track = self._tracks.get(sequence)
        if track is None:
            track = self._tracks[sequence] = _Track(sequence, self._acceptance, self._model_acceptance)
        track.look(sequence)
        return track

    def _ask(
        self,
        model: Guesser,
        tracks: Mapping[Sequence, _Track],
        num_sampled: int,
        num_tokens: int,
        room: int,
    ) -> None:
        """Have the draft model guess where its guesses are better than the text's, in chains of the length
        that should bring the most tokens per second."""
        asked = [
            each
            for each, track in tracks.items()
            if track.model_rate > track.rate or not track.guess.num_same
        ]
        if not asked:
            return
        guess_s = model.seconds(len(asked))
        most, length = LEAST_GAIN * num_sampled / self._predict_s(num_tokens), 0
        for chain in CHAINS:
            if chain * len(asked) > room:
                break
            gained = sum(_expected(tracks[each].model_rate, chain) for each in asked)
            seconds = self._predict_s(num_tokens + chain * len(asked)) + chain * guess_s
            if (num_sampled + gained) / seconds > most:
                most, length = (num_sampled + gained) / seconds, chain
        for each in asked:
            if not length:
                tracks[each].model_acceptance.forget(MODEL_MATCH)
        for each, guess in (model.draft(asked, length) if length else {}).items():
            if guess:
                track = tracks[each]
                track.is_modelled, track.rate = True, track.model_rate
                track.guess = Continuation(guess, MODEL_MATCH)

    def _lengths(
        self, tracks: Mapping[Sequence, _Track], num_sampled: int, num_tokens: int, room: int
    ) -> dict[Sequence, int]:
        """Guesses for each sequence, those with the best chance first, until the next ones don't pay."""
        order, num_best, gained = list[Sequence](), 0, float(num_sampled)
        most = LEAST_GAIN * gained / self._predict_s(num_tokens)
        for sequence, chance in islice(_by_chance(tracks), room):
            order.append(sequence)
            gained += chance
            rate = gained / self._predict_s(num_tokens + len(order))
            if rate > most:
                most, num_best = rate, len(order)
            elif len(order) > num_best + MAX_GUESSES:
                break
        return Counter(order[:num_best])


def _by_chance(tracks: Mapping[Sequence, _Track]) -> Iterator[tuple[Sequence, float]]:
    """Each further guess and the chance that it and those before it are right, the best chance first."""
    heap = [
        (-track.rate, order, sequence, 1)
        for order, (sequence, track) in enumerate(tracks.items())
        if track.guess.token_ids and track.rate >= LEAST_CHANCE
    ]
    heapq.heapify(heap)
    while heap:
        chance, order, sequence, length = heapq.heappop(heap)
        yield sequence, -chance
        track = tracks[sequence]
        if length < len(track.guess.token_ids) and -chance * track.rate >= LEAST_CHANCE:
            heapq.heappush(heap, (chance * track.rate, order, sequence, length + 1))


def _expected(rate: float, length: int) -> float:
    """Right guesses of a chain."""
    return sum(rate**number for number in range(1, length + 1))


def _allowed(sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """The guess up to the first token that the sequence's grammar forbids."""
    matcher = sequence.matcher
    for number, token_id in enumerate(guess if matcher is not None else ()):
        if matcher is None or matcher.is_complete or not matcher.allowed >> token_id & 1:
            return guess[:number]
        matcher = matcher.after(token_id)
    return guess
