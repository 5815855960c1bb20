"""Speculation: how many guesses of which sequences a step computes, by what they should bring and cost.

A step with n tokens and k guesses takes t(n + k) seconds, and each sampled sequence gains one token and its
right guesses. The step takes the k likeliest guesses that give the most expected tokens per second. Where
layers are streamed, t hardly grows with k: guesses are nearly free. Where a step computes many sequences, no
guess pays. What steps really took decides whether there are guesses at all (trial.py).

Guesses of a sequence make up a tree. They come from the text, where something like it stood before, from
what the model found likely after the same tokens before, and from a draft model if there is one, which takes
time of its own. How often they come true is learned from all of them, also from those that no step computed:
the text goes on, and says which were right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from weakref import WeakKeyDictionary

from penstock.config import EngineConfig
from penstock.generation.drafting.acceptance import (
    ANY_OF_MODEL,
    NUM_RANKS,
    OTHER_PLACE,
    Acceptance,
    is_of_model,
)
from penstock.generation.drafting.asking import Asking, Guesser
from penstock.generation.drafting.choice import Choice, PlainStep, choose
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.drafting.earlier_texts import EarlierTexts
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.drafting.guesses import Guesses
from penstock.generation.drafting.repeated_text import PAIR, RepeatedText
from penstock.generation.drafting.trial import Trial, TriedStep
from penstock.generation.sequence import Sequence
from penstock.metrics import StepStats

#: The beginning of a predicted answer is trusted as a match of so many tokens.
_PREDICTED = 6


class _Track:
    """What is known of one sequence."""

    def __init__(
        self, sequence: Sequence, of_all: Acceptance, earlier: EarlierTexts, config: EngineConfig
    ) -> None:
        self.text = RepeatedText(sequence.params.prediction, config)
        self.shared = earlier.begin(sequence.request.cache_salt, self.text)
        self._max_guesses, self._most = config.max_guesses, config.prompt_lookup_max
        self.acceptance = Acceptance(of_all)
        #: Of the last step that had any, and how many tokens the sequence had then.
        self.guesses, self._num_before = Guesses(sequence, self.acceptance, 1.0), sequence.num_tokens

    def look(self, sequence: Sequence, least_chance: float) -> Guesses:
        """What may follow the sequence's tokens."""
        self._learn(sequence.token_ids[self._num_before :])
        self.guesses = Guesses(sequence, self.acceptance, least_chance)
        self._num_before = sequence.num_tokens
        self.text.follow(sequence.token_ids)
        prediction, num_done = sequence.params.prediction, sequence.num_output_tokens
        if num_done < PAIR and prediction[:num_done] == tuple(
            sequence.token_ids[len(sequence.token_ids) - num_done :]
        ):
            # The answer may begin as it was predicted; later, what matches says where it stands there.
            self.guesses.add_chain(prediction[num_done : num_done + self._max_guesses], _PREDICTED)
        continuations = self.text.guesses(self._max_guesses)
        for text in self.shared.texts:
            if text is not self.text:
                continuations += text.behind(sequence.token_ids[-self._most :], self._max_guesses)
        continuations.sort(key=lambda found: -found.num_same)
        for number, found in enumerate(continuations):
            self.guesses.add_chain(found.token_ids, found.num_same, OTHER_PLACE if number else None)
        self.guesses.spread(self.shared.recycled)
        return self.guesses

    def _learn(self, token_ids: List[int]) -> None:
        """These tokens followed the text. They say of each guess after right ones whether it was right."""
        guesses = self.guesses
        path = [-1, *guesses.right(token_ids)]
        on_path, known = set(path), set(path[: len(token_ids)])
        of_model = dict[int, bool]()
        for node, parent in enumerate(guesses.parents):
            if parent in known:
                kind, is_right = guesses.kinds[node], node in on_path
                self.acceptance.learn(kind, is_right)
                if is_of_model(kind):
                    of_model[parent] = of_model.get(parent, False) or is_right
        for is_right in of_model.values():
            self.acceptance.learn(ANY_OF_MODEL, is_right)


class Speculation(Drafter):
    """Guesses from the text, from what the model found likely before, and from a draft model if there is
    one."""

    def __init__(
        self,
        predict_s: Callable[[int], float],
        model: Guesser | None = None,
        config: EngineConfig | None = None,
        last_step: Callable[[], StepStats | None] | None = None,
        path_s: float = 0.0,
    ) -> None:
        """predict_s: tokens of a step -> seconds; 0 if nothing is known. More tokens never take less. config:
        says how many guesses a sequence may have, and where a text is looked up. last_step: what the last
        step brought and took; without it, guesses have no trial. path_s: StatePaths.seconds."""
        self._predict_s, self._last_step, self._path_s = predict_s, last_step, path_s
        self._model = model
        self._config = config or EngineConfig()
        self._acceptance, self._earlier, self._forks = Acceptance(), EarlierTexts(), ForkLimit()
        #: By the number of binary digits of the number of sequences.
        self._trials: dict[int, Trial] = {}
        self._seen: StepStats | None = None
        #: Guesses of the last step, and the seconds that its draft model should have taken.
        self._num_guesses, self._drafting_s = 0, 0.0
        self._tracks: WeakKeyDictionary[Sequence, _Track] = WeakKeyDictionary()

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        sampled = list(sequences)
        wanted = [each for each in sampled if each.params.speculation]
        self._observe()
        self._num_guesses, self._drafting_s = 0, 0.0
        trial = self._trial(len(sampled))
        step = PlainStep(
            self._predict_s, len(sampled), num_tokens, room, self._config.max_guesses, trial.price
        )._replace(path_s=self._path_s)
        may_gain = bool(wanted) and step.may_gain(len(wanted))
        self.num_followers = NUM_RANKS if may_gain else 0
        if not may_gain:
            return {}
        least_chance = step.least_chance
        guesses = [self._track(each).look(each, least_chance) for each in wanted]
        may_draft = self._last_step is None or trial.may_draft
        choice = self._choose(guesses, step) if may_draft else None
        self._forget(guesses)
        if choice is None:
            return {}
        self._num_guesses = choice.num_guesses
        taken = zip(guesses, choice.nodes, strict=True)
        return {each.sequence: each.tree(nodes, self._forks) for each, nodes in taken if nodes}

    def _choose(self, guesses: list[Guesses], step: PlainStep) -> Choice:
        """The choice among all guesses, with those of the model."""
        if self._model is None:
            return choose(guesses, step)
        asking = Asking(self._model, guesses, step)
        choice = asking.run()
        self._drafting_s = asking.seconds
        return choice

    def _trial(self, num_sampled: int) -> Trial:
        return self._trials.setdefault(num_sampled.bit_length(), Trial())

    def _observe(self) -> None:
        """Learn what the last step brought and took, if it had no prompts."""
        stats = self._last_step() if self._last_step is not None else None
        if stats is None or stats is self._seen:
            return
        self._seen = stats
        num_plain = stats.num_tokens - stats.num_drafts
        plain_s = self._predict_s(num_plain)
        if num_plain != stats.num_seqs or plain_s <= 0:
            return
        drafting_s = self._drafting_s if stats.num_drafts == self._num_guesses else 0.0
        paths_s = self._path_s * min(stats.num_drafts, num_plain)
        predicted_s = self._predict_s(stats.num_tokens) + paths_s + drafting_s
        gained = 1 + stats.num_right_drafts / num_plain
        step = TriedStep(gained, stats.duration_s / plain_s, predicted_s / plain_s)
        self._trial(num_plain).record(step, stats.num_drafts > 0 or drafting_s > 0)

    def _forget(self, guesses: list[Guesses]) -> None:
        """Note the kinds of guesses that were there, of which nobody will learn whether they were right."""
        met, tried = set[int](), set[int]()
        for each in guesses:
            own = set(each.kinds)
            if self._model is not None and not any(map(is_of_model, own)):
                each.kinds_met.add(ANY_OF_MODEL)
            self._track(each.sequence).acceptance.forget(each.kinds_met - own)
            met |= each.kinds_met
            tried |= own
        self._acceptance.forget(met - tried)

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        """Only what the model found likely: which guesses were right shows in the next step's text."""
        track = self._track(sequence)
        text = (*sequence.token_ids[-2:], *drafts.token_ids)
        num_last = min(2, sequence.num_tokens)  # tokens of the sequence itself
        for row, found in enumerate(followers):
            node = row - 1
            parent = drafts.parents[node] if node >= 0 else -2
            before = text[num_last + parent] if num_last + parent >= 0 else -1
            if text[num_last + node] >= 0:  # and no vector of a prompt
                track.shared.recycled.learn(before, text[num_last + node], found)

    def _track(self, sequence: Sequence) -> _Track:
        track = self._tracks.get(sequence)
        if track is None:
            track = _Track(sequence, self._acceptance, self._earlier, self._config)
            self._tracks[sequence] = track
        return track
