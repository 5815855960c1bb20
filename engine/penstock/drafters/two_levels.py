"""TwoLevels: a small model guesses what the model's upper planes will say, and they guess what the model will
say.

All guesses are the planes'. The small model only makes them cheaper: it guesses a chain behind each place
that is asked about, and one pass over the planes computes place and chain together. As far as the planes say
what the chain has, their answers behind it are there when they are asked for, without another pass.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from penstock.drafters.draft_model import DraftModel
from penstock.drafters.planes_drafter import PlanesDrafter
from penstock.generation.drafting.acceptance import ANY_OF_MODEL, VOICE_OF_PLANES, Acceptance, kind_of_share
from penstock.generation.drafting.asking import Place, Price, repaid_s
from penstock.generation.drafting.expectation import PLANES_RATE, Assumed, assumed_two_levels
from penstock.generation.drafting.rounds import Round, planned
from penstock.generation.sequence import Sequence


class _Text:
    """What may follow one sequence's tokens, in a step. Places have numbers of their own here, since chains
    have nodes that nobody else knows."""

    def __init__(self, sequence: Sequence, has_chains: bool) -> None:
        #: has_chains: the small model can guess for it.
        self.sequence, self.has_chains = sequence, has_chains
        #: The numbers of those who ask -> own numbers.
        self._numbers = {-1: -1}
        self._nodes: dict[tuple[int, int], int] = {}
        self._places: list[Place] = []
        #: By place what the planes say, and the small model's likeliest guess with its share.
        self.said: dict[int, list[tuple[int, float]]] = {}
        self.guessed: dict[int, tuple[int, float] | None] = {}
        self._reached = {-1}

    def find(self, place: Place) -> int | None:
        """The own number of a place that somebody asks about; None if nobody has thought of it yet. The guess
        before it was asked about before."""
        if place.node < 0:
            return -1
        return self._nodes.get((self._numbers[place.parent], place.token_id))

    def own(self, place: Place) -> Place:
        """A place that somebody asks about, with own numbers."""
        if place.node < 0:
            return place
        found = self.behind(self._numbers[place.parent], place.token_id, place.chance)
        self._numbers[place.node] = found.node
        return found

    def behind(self, parent: int, token_id: int, chance: float) -> Place:
        """The place, in own numbers, whose token follows a place."""
        node = self._nodes.setdefault((parent, token_id), len(self._places))
        found = Place(self.sequence, node, parent, token_id, chance)
        if node == len(self._places):
            self._places.append(found)
        return found

    def unreached(self, place: Place) -> list[Place]:
        """Places that lead to this one and that the small model was not told of, from the text's end on.
        Whoever asks tells it of them, and of this one."""
        found, node = list[Place](), place.parent
        while node not in self._reached:
            found.append(self._places[node])
            node = self._places[node].parent
        self._reached.update([place.node, *(each.node for each in found)])
        return found[::-1]


class TwoLevels:
    """Used by the engine thread, between two steps."""

    voice = VOICE_OF_PLANES

    def __init__(self, small: DraftModel, planes: PlanesDrafter) -> None:
        self.small, self.planes = small, planes
        #: How often the planes say what the small model guesses, by the share that it gives its guess.
        self._agreement = Acceptance()
        self._texts: dict[Sequence, _Text] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the host's memory that are its own."""
        return self.small.num_bytes

    @property
    def num_card_bytes(self) -> int:
        """Bytes of a card's memory that are its own."""
        return self.small.num_card_bytes

    @property
    def spent_s(self) -> float:
        """Seconds that guesses have taken, of both together or of one alone."""
        return self.small.spent_s + self.planes.spent_s

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        return assumed_two_levels(self.small.assumed, self.planes.assumed)

    def price(self, places: List[Place]) -> Price:
        """Guesser.price(): of chains that are as long as should pay, and a pass."""
        texts = self._texts
        if there := tuple(each for each in places if each.sequence in texts and self._is_there(each)):
            return Price(0.0, there=there)
        has_chains = all(each.sequence not in texts or texts[each.sequence].has_chains for each in places)
        chances = [each.chance for each in places]
        round_ = self._round(chances)
        known = planned(round_, chances, self._rate, PLANES_RATE) if has_chains else (1.0,)
        return Price(round_.seconds, known)

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """Nothing: the planes need not catch up. Whether the small model should is weighed when a step
        begins."""
        return 0.0

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. Returns the sequences for which the planes can guess."""
        able = self.planes.start(sequences)
        ready = set(self.small.start(able)) if able and self._chains_pay(able) else set()
        if not ready:  # chains that did not pay are tried again later
            self._agreement.forget(range(ANY_OF_MODEL[0] + 1))
        self._texts = {each: _Text(each, each in ready) for each in able}
        return able

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """Guesser.expand(): what the planes say may follow each place."""
        own = [self._texts[place.sequence].own(place) for place in places]
        if new := [place for place in own if place.node not in self._texts[place.sequence].said]:
            lines = self._lines(new)
            for line, found in zip(lines, self.planes.expand_lines(lines), strict=True):
                self._learn(line, found)
        return [self._texts[place.sequence].said[place.node] for place in own]

    def finish(self) -> None:
        """The blocks of the planes' guesses are free again."""
        self.planes.finish()
        self.small.finish()
        self._texts.clear()

    @property
    def rivals(self) -> tuple[TwoLevels, PlanesDrafter, DraftModel]:
        """Both together, and each alone."""
        return self, self.planes, self.small

    def close(self) -> None:
        self.small.close()
        self.planes.close()

    @property
    def _rate(self) -> float:
        """The chance that the planes say a link of a chain, if what leads to it is right."""
        return self._agreement.rate(ANY_OF_MODEL[0])

    def _round(self, chances: List[float]) -> Round:
        return Round(self.small.seconds, self.planes.seconds, chances, self.planes.max_num_tokens)

    def _is_there(self, place: Place) -> bool:
        text = self._texts[place.sequence]
        return text.find(place) in text.said

    def _chains_pay(self, sequences: List[Sequence]) -> bool:
        """Whether levels cost less with chains, and with what the small model has to catch up with, than
        without."""
        chances = [1.0] * len(sequences)
        alone, round_ = self._round(chances), self._round(chances)
        worth = len(sequences) * sum(planned(round_, chances, self._rate, PLANES_RATE))
        backlog_s = repaid_s(self.small.backlog_s(sequences), sequences)
        return (round_.seconds + backlog_s) * len(sequences) < alone.seconds * worth

    def _lines(self, places: List[Place]) -> list[list[Place]]:
        """These places, each with a chain of guesses behind it, as long as should pay."""
        lines = [[place] for place in places]
        growing = [line for line in lines if self._texts[line[0].sequence].has_chains]
        round_, rate = self._round([place.chance for place in places]), PLANES_RATE * self._rate
        while growing:
            growing.sort(key=lambda line: -line[-1].chance)
            growing = growing[: round_.extend([rate * line[-1].chance for line in growing])]
            growing = self._longer(growing)
        return lines

    def _longer(self, lines: List[list[Place]]) -> list[list[Place]]:
        """Let each line grow by the small model's guess. Returns those for which it has one."""
        new = list[Place]()
        for line in lines:
            text, place = self._texts[line[0].sequence], line[-1]
            if place.node not in text.guessed:
                new.append(place)
                for each in text.unreached(place):
                    self.small.reach(each)
        for place, found in zip(new, self.small.expand(new), strict=True):
            self._texts[place.sequence].guessed[place.node] = found[0] if found else None
        longer = list[list[Place]]()
        for line in lines:
            text, end = self._texts[line[0].sequence], line[-1]
            if (guess := text.guessed[end.node]) is not None:
                rate = PLANES_RATE * self._agreement.rate(kind_of_share(guess[1]))
                line.append(text.behind(end.node, guess[0], rate * end.chance))
                longer.append(line)
        return longer

    def _learn(self, line: List[Place], found: List[list[tuple[int, float]]]) -> None:
        """Note what the planes say behind a place and its chain, and as how good the chain proved to be."""
        text = self._texts[line[0].sequence]
        text.said[line[0].node] = []  # where there was no room
        is_open = True
        for index, (place, said) in enumerate(zip(line, found, strict=False)):
            text.said[place.node] = said
            guess = text.guessed.get(place.node)
            if is_open and guess is not None and index + 1 < len(line):
                is_open = bool(said) and said[0][0] == guess[0]
                for kind in (kind_of_share(guess[1]), ANY_OF_MODEL[0]):
                    self._agreement.learn(kind, is_open)
