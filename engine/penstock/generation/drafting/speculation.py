"""Speculation: how many guesses of which sequences a step computes, by what they should bring and cost.

A step with n tokens and k guesses takes t(n + k) seconds, and each sampled sequence gains one token and its
right guesses. The step takes the k likeliest guesses that give the most expected tokens per second. Where
layers are streamed, t hardly grows with k: guesses are nearly free. Where a step computes many sequences, no
guess pays.

Guesses of a sequence make up a tree. They come from the text, where something like it stood before, from
what the model found likely behind the same tokens before, and from a draft model, which takes time of its
own.
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
    voice_of,
)
from penstock.generation.drafting.allowance import Allowance
from penstock.generation.drafting.asking import Asking, Guesser
from penstock.generation.drafting.choice import Choice, PlainStep, choose
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.drafting.guesses import Guesses
from penstock.generation.drafting.texts.earlier_texts import EarlierTexts
from penstock.generation.drafting.texts.repeated_text import PAIR, RepeatedText
from penstock.generation.drafting.ways import Rival, Ways
from penstock.generation.sequence import Sequence

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
        self.guesses = Guesses(sequence, self.acceptance, 1.0)

    def look(self, sequence: Sequence, least_chance: float) -> Guesses:
        """What may follow the sequence's tokens."""
        self.guesses = Guesses(sequence, self.acceptance, least_chance)
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

    def learn(self, drafts: DraftTree, right: List[int]) -> None:
        """A step computed these drafts, and these nodes of them were right."""
        nodes, on_path = self.guesses.find(drafts), {-1, *right}
        of_model: dict[tuple[int, int], bool] = {}
        for draft, (node, parent) in enumerate(zip(nodes, drafts.parents, strict=True)):
            if parent in on_path:
                kind, is_right = self.guesses.kinds[node], draft in on_path
                self.acceptance.learn(kind, is_right)
                if (voice := voice_of(kind)) is not None:
                    of_model[voice, parent] = of_model.get((voice, parent), False) or is_right
        for (voice, _), is_right in of_model.items():
            self.acceptance.learn(ANY_OF_MODEL[voice], is_right)


class Speculation(Drafter):
    """Guesses from the text, from what the model found likely before, and from a draft model if there is
    one."""

    def __init__(
        self,
        predict_s: Callable[[int], float],
        model: Guesser | None = None,
        config: EngineConfig | None = None,
        usual_s: Callable[[int], float] | None = None,
        rivals: List[Rival] = (),
    ) -> None:
        """predict_s: tokens of a step -> seconds; 0 if nothing is known. More tokens never take less. config:
        says how many guesses a sequence may have, and where a text is looked up. usual_s: what steps of so
        many tokens took lately; 0 if there were none. rivals: one of them guesses in each step, by what each
        brings, in the model's place."""
        self._predict_s, self._usual_s = predict_s, usual_s
        #: Tokens of the last step, without its guesses and with them.
        self._sizes = (0, 0)
        self._model = model
        self._config = config or EngineConfig()
        self._ways = Ways(rivals, predict_s, self._config) if rivals else None
        self._acceptance, self._earlier, self._forks = Acceptance(), EarlierTexts(), ForkLimit()
        self._allowance = Allowance()
        self._tracks: WeakKeyDictionary[Sequence, _Track] = WeakKeyDictionary()

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        sampled = list(sequences)
        wanted = [each for each in sampled if each.params.speculation]
        self._settle()
        allowance_s = self._allowance.begin(self._predict_s(num_tokens), max(1, len(sampled)))
        step = PlainStep(
            self._predict_s, len(sampled), num_tokens, room, self._config.max_guesses, allowance_s
        )
        may_gain = bool(wanted) and step.may_gain(len(wanted))
        self.num_followers = NUM_RANKS if may_gain else 0
        if not may_gain:
            return {}
        least_chance = step.least_chance
        guesses = [self._track(each).look(each, least_chance) for each in wanted]
        model = self._model if self._ways is None else self._ways.pick(len(sampled))
        choice, drafting_s = (
            (choose(guesses, step), 0.0) if model is None else self._ask(model, guesses, step)
        )
        if self._ways is not None:
            self._ways.guessed(len(sampled), num_tokens, choice.num_guesses)
        self._allowance.pay(choice.num_guesses, step.cost_s(choice.num_guesses) + drafting_s)
        self._sizes = num_tokens, num_tokens + choice.num_guesses
        self._forget(guesses, choice)
        taken = zip(guesses, choice.nodes, strict=True)
        return {each.sequence: each.tree(nodes, self._forks) for each, nodes in taken if nodes}

    def _settle(self) -> None:
        """Pay for the last step's guesses what its time was."""
        plain_s, drafted_s = map(self._usual_s, self._sizes) if self._usual_s is not None else (0.0, 0.0)
        if plain_s > 0 and drafted_s > 0:
            self._allowance.settle(drafted_s / plain_s)

    def _ask(self, model: Guesser, guesses: list[Guesses], step: PlainStep) -> tuple[Choice, float]:
        """The choice with what the model guesses, and how long the model should have taken."""
        asking = Asking(model, guesses, step)
        choice = asking.run()
        if not asking.is_begun:
            for each in guesses:
                each.kinds_met.add(asking.any_kind)
        return choice, asking.seconds

    def _forget(self, guesses: list[Guesses], choice: Choice) -> None:
        """Note the kinds of guesses that were there and are not tried."""
        met, tried = set[int](), set[int]()
        for each, nodes in zip(guesses, choice.nodes, strict=True):
            own = {each.kinds[node] for node in nodes}
            self._track(each.sequence).acceptance.forget(each.kinds_met - own)
            met |= each.kinds_met
            tried |= own
        self._acceptance.forget(met - tried)

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        track = self._track(sequence)
        self._allowance.earn(len(right))
        if self._ways is not None:
            self._ways.learn(len(right))
        if drafts:
            track.learn(drafts, right)
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
