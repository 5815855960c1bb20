"""What a draft model, upper planes, both, and the better of these in each step should give by stated prices:
tokens/s of one sequence. Nothing is computed but the choice of guesses, which is the engine's own, so that
long answers take seconds, and no other work on the machine counts. Guesses are right as often as
forced_drafts.py has them.

    python tests/bench/priced_drafts.py [--pass-s 0.122 0.033] [--rates 0.74 0.85] [--streamed-s 1.28 1.51]

The prices are those of SOLAR-10.7B's shape in 6.5 GiB on two cores of an AMD EPYC (Zen 4; disk 3.1 GB/s):
passes by planes_passes.py, levels of a draft model of TinyLlama's shape in 4 bits, the streaming of 39 lower
planes, and of 46 beside the draft model, and products of a step.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

from forced_drafts import BESIDE, GARBAGE, PLANES_RATES, Said

from penstock.drafters.two_levels import TwoLevels
from penstock.generation.drafting.acceptance import VOICE_OF_PLANES
from penstock.generation.drafting.asking import Guesser, Place, Price
from penstock.generation.drafting.draft_tree import NO_GUESSES
from penstock.generation.drafting.expectation import Assumed, assumed_model, assumed_planes
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.drafting.ways import Rival
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence

#: Seconds of a step that don't overlap, of its products, and of these for each token.
OTHER_S, PRODUCTS_S, TOKEN_S = 0.15, 0.25, 0.046
#: Of the draft model's matrices.
NUM_ELEMENTS = 1_030_000_000

Seconds = Callable[[int], float]
Level = list[tuple[int, float]]


class Planes:
    """Upper planes that compute nothing."""

    max_num_tokens, voice = 128, VOICE_OF_PLANES

    def __init__(self, seconds: Seconds, answer: list[int]) -> None:
        self.seconds, self.said = seconds, Said(PLANES_RATES, answer)
        self.spent_s, self.num_passes, self.num_rows = 0.0, 0, 0

    @property
    def assumed(self) -> Assumed:
        return assumed_planes(self.seconds)

    def price(self, places: List[Place]) -> Price:
        return Price(self.seconds(len(places)))

    def backlog_s(self, sequences: List[Sequence]) -> float:
        return 0.0

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        return list(sequences)

    def expand(self, places: List[Place]) -> list[Level]:
        return [found[0] for found in self.expand_lines([[place] for place in places])]

    def expand_lines(self, lines: List[List[Place]]) -> list[list[Level]]:
        num_rows = sum(map(len, lines))
        self.spent_s += self.seconds(num_rows)
        self.num_passes, self.num_rows = self.num_passes + 1, self.num_rows + num_rows
        return [[self.said.behind(place) for place in line] for line in lines]

    def finish(self) -> None: ...


class Small(Planes):
    """A draft model that computes nothing. It is right about the answer, or about planes."""

    voice = 0

    def __init__(self, seconds: Seconds, rate: float, answer: list[int], planes: Planes | None) -> None:
        super().__init__(seconds, answer)
        self.rate, self.planes = rate, planes
        self.said = Said([rate * each for each in BESIDE], answer)

    @property
    def assumed(self) -> Assumed:
        return assumed_model(NUM_ELEMENTS, self.seconds)

    def reach(self, place: Place) -> None: ...

    def expand(self, places: List[Place]) -> list[Level]:
        if self.planes is None:
            return super().expand(places)
        if places:
            self.spent_s, self.num_passes = self.spent_s + self.seconds(len(places)), self.num_passes + 1
        found = list[Level]()
        for place in places:
            dice = random.Random(f"small {place.sequence.num_tokens} {place.node}")
            right = self.planes.said.behind(place)[0][0]
            found.append([(right if dice.random() < self.rate else GARBAGE + 9, self.rate)])
        return found


def told(
    guesser: Guesser,
    spending: list[Any],
    streamed_s: float,
    answer: list[int],
    num_tokens: int,
    rivals: List[Rival] = (),
) -> str:
    """An answer, with what guesses for it; `spending` notes what that took. rivals: one of them guesses in
    each step."""

    def step_s(count: int) -> float:
        return OTHER_S + max(streamed_s, PRODUCTS_S + TOKEN_S * count)

    drafter, sequence = (
        Speculation(step_s, guesser, rivals=rivals),
        Sequence(
            0,
            GenerationRequest([1, 2, 3], SamplingParams(max_tokens=len(answer), ignore_eos=True)),
            len(answer),
        ),
    )
    seconds, num_steps, num_guesses = 0.0, 0, 0
    while (done := sequence.num_output_tokens) < num_tokens:
        sequence.num_computed_tokens = sequence.num_tokens - 1
        tree = drafter.propose([sequence], 1, 100).get(sequence, NO_GUESSES)
        right = tree.follow(answer[done:])
        drafter.learn(sequence, tree, right, [])
        seconds, num_steps, num_guesses = (
            seconds + step_s(1 + tree.num_nodes),
            num_steps + 1,
            num_guesses + tree.num_nodes,
        )
        for token in answer[done : done + len(right) + 1]:
            sequence.append(token)
    drafting_s, num_tokens = sum(each.spent_s for each in spending), sequence.num_output_tokens
    asked = " + ".join(f"{each.num_passes / num_steps:.1f}" for each in spending)
    return (
        f"{num_tokens / (seconds + drafting_s):.2f} tokens/s; {num_tokens / num_steps:.1f} tokens in a sweep "
        f"of {num_guesses / num_steps:.0f} guesses; {(seconds + drafting_s) / num_steps:.2f} s a step, "
        f"{drafting_s / num_steps:.2f} of them in {asked} levels or passes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pass-s", type=float, nargs=2, default=(0.122, 0.033), metavar=("FIRST", "FURTHER"))
    parser.add_argument(
        "--level-s", type=float, nargs=2, default=(0.021, 0.002), metavar=("FIRST", "FURTHER")
    )
    parser.add_argument(
        "--streamed-s", type=float, nargs=2, default=(1.28, 1.51), metavar=("ALONE", "BESIDE")
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.74, 0.85])
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    dice = random.Random(0)
    answer = [dice.randrange(3, 30000) for _ in range(options.tokens + 64)]

    def pass_s(num_rows: int) -> float:
        return float(options.pass_s[0] + options.pass_s[1] * (num_rows - 1))

    def level_s(num_places: int) -> float:
        return float(options.level_s[0] + options.level_s[1] * (num_places - 1))

    alone_s, beside_s = options.streamed_s
    planes = Planes(pass_s, answer)
    print(f"planes           {told(planes, [planes], alone_s, answer, options.tokens)}")
    for rate in options.rates:
        small = Small(level_s, rate, answer, None)
        print(f"draft model {rate} {told(small, [small], beside_s, answer, options.tokens)}")
        planes = Planes(pass_s, answer)
        small = Small(level_s, rate, answer, planes)
        both: Any = TwoLevels(small, planes)  # type: ignore[arg-type]
        print(
            f"two levels  {rate} {told(both, [planes, small], beside_s, answer, options.tokens)}", flush=True
        )
        planes, alone = Planes(pass_s, answer), Small(level_s, rate, answer, None)
        small = Small(level_s, rate, answer, planes)
        both = TwoLevels(small, planes)  # type: ignore[arg-type]
        spending = [planes, small, alone]
        found = told(both, spending, beside_s, answer, options.tokens, [both, planes, alone])
        print(f"best        {rate} {found}", flush=True)


if __name__ == "__main__":
    main()
