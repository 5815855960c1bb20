"""Which machine computes which layers, against all cuts that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.nodes.cut import LayerCost, MachineRates, cut, range_seconds


def every_cut(num_layers: int, num_machines: int) -> list[tuple[range, ...]]:
    inner = itertools.combinations(range(1, num_layers), num_machines - 1)
    return [tuple(map(range, (0, *borders), (*borders, num_layers))) for borders in inner]


def costs(
    ranges: tuple[range, ...], layers: list[LayerCost], machines: list[MachineRates]
) -> tuple[float, float]:
    """Seconds of the slowest machine, and of all together."""
    seconds = [
        range_seconds([layers[index] for index in each], machine)
        for each, machine in zip(ranges, machines, strict=True)
    ]
    return max(seconds), sum(seconds)


def test_the_cut_is_the_best_of_all() -> None:
    """The slowest machine is as fast as it can be, and then the sum is the least."""
    dice = random.Random(3)
    for _ in range(60):
        layers = [
            LayerCost(
                size := dice.randrange(1, 9) * 10**8, dice.randrange(3) * 10**7, size // dice.choice((1, 4))
            )
            for _ in range(dice.randrange(4, 9))
        ]
        machines = [
            MachineRates(
                dice.randrange(30) * 10**8, dice.choice((0, 5, 20)), dice.choice((0, 1, 3)), dice.random()
            )
            for _ in range(dice.randrange(1, 5))
        ]

        best = min(costs(each, layers, machines) for each in every_cut(len(layers), len(machines)))
        assert costs(cut(layers, machines), layers, machines) == pytest.approx(best)


def test_a_machine_with_more_memory_computes_more() -> None:
    """Two machines that together hold the model stream nothing; a faster one takes more of what fits both."""
    layers = [LayerCost(10**9, 0, 10**9)] * 12
    small, large = MachineRates(4 * 10**9, 10, 1), MachineRates(9 * 10**9, 10, 1)
    assert cut(layers, [small, large]) == (range(0, 4), range(4, 12))
    assert cut(layers, [large, small]) == (range(0, 8), range(8, 12))
    roomy = MachineRates(20 * 10**9, 10, 1)
    assert cut(layers, [roomy, MachineRates(20 * 10**9, 20, 1)]) == (range(0, 4), range(4, 12))
    assert cut(layers, [roomy]) == (range(0, 12),)


def test_more_machines_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 machines can't share 2 layers"):
        cut([LayerCost(1, 1, 1)] * 2, [MachineRates(1)] * 3)
