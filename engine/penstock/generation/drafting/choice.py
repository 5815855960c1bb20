"""Choice: which guesses a step computes: those that give the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.generation.drafting.guesses import Guesses

#: Guesses have to bring this many times the tokens per second of a step without: predictions err.
LEAST_GAIN = 1.03
#: Guesses that are right so rarely are not worth a row of logits, even where a step waits for layers.
LEAST_CHANCE = 0.02


class PlainStep(NamedTuple):
    """What a step is without guesses, and what time it takes with them."""

    #: Tokens of a step -> seconds; 0 if nothing is known. More tokens never take less.
    predict_s: Callable[[int], float]
    num_sampled: int
    num_tokens: int
    #: Guesses that have room.
    room: int
    #: Most guesses of one sequence.
    max_guesses: int = EngineConfig.max_guesses
    #: How many times their predicted seconds steps with guesses take (Trial).
    price: float = 1.0
    #: Seconds that the guesses of each sequence take beside their rows (StatePaths).
    path_s: float = 0.0

    def seconds(self, num_guesses: int, drafting_s: float = 0.0) -> float:
        """What the step takes with so many guesses, which took `drafting_s` to make."""
        plain_s = self.predict_s(self.num_tokens)
        if not num_guesses and not drafting_s:
            return plain_s
        paths_s = self.path_s * min(num_guesses, self.num_sampled)
        step_s = self.predict_s(self.num_tokens + num_guesses) + paths_s
        return max(plain_s, self.price * (step_s + drafting_s))

    def rate(self, num_right: float, num_guesses: int, drafting_s: float = 0.0) -> float:
        """Tokens per second, with so many guesses and so many expected right ones."""
        return (self.num_sampled + num_right) / self.seconds(num_guesses, drafting_s)

    @property
    def least_chance(self) -> float:
        """Guesses that are right less often can't pay: half of what a guess costs, in tokens of a step
        without guesses. A guess may cost less than many guesses do on average."""
        count = max(1, min(self.room, self.max_guesses))
        without_s = self.seconds(0)
        guess_s = (self.seconds(count) - without_s) / count
        return max(LEAST_CHANCE, 0.5 * guess_s * self.num_sampled / without_s)

    def may_gain(self, num_wanted: int) -> bool:
        """Whether guesses for so many sequences would pay if all of them were right. Looking for guesses
        takes time, too."""
        if self.predict_s(self.num_tokens) <= 0:
            return False
        least = LEAST_GAIN * self.rate(0, 0)
        counts = {min(self.room, num_wanted * length) for length in (1, 4, self.max_guesses)}
        return any(self.rate(count, count) > least for count in counts)


class Choice(NamedTuple):
    """Guesses that a step computes."""

    #: For each sequence nodes of its guesses, likeliest first, so that each comes after the one it follows.
    nodes: list[list[int]]
    #: Expected tokens per second (LEAST_GAIN times those without guesses where none pays), right guesses, and
    #: the number of guesses.
    rate: float
    num_right: float
    num_guesses: int


def choose(guesses: List[Guesses], step: PlainStep, drafting_s: float = 0.0) -> Choice:
    """The likeliest guesses of all sequences together, as many as pay. Finding them took `drafting_s`."""
    order = sorted(
        (-chance, number, node)
        for number, each in enumerate(guesses)
        for node, chance in enumerate(each.chances)
    )
    taken, counts, gained = list[tuple[int, int]](), [0] * len(guesses), 0.0
    most, num_best, num_right = LEAST_GAIN * step.rate(0, 0, drafting_s), 0, 0.0
    for chance, number, node in order:
        if len(taken) == step.room or len(taken) > num_best + step.max_guesses:
            break
        if counts[number] == step.max_guesses:
            continue
        counts[number] += 1
        taken.append((number, node))
        gained -= chance
        rate = step.rate(gained, len(taken), drafting_s)
        if rate > most:
            most, num_best, num_right = rate, len(taken), gained
    nodes: list[list[int]] = [[] for _ in guesses]
    for number, node in taken[:num_best]:
        nodes[number].append(node)
    return Choice(nodes, most, num_right, num_best)
