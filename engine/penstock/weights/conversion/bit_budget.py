"""Which format each part of a model gets, so that all together fit into a number of bytes and lose least.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """A part in one of its formats."""

    num_bytes: int
    #: What is lost, in units that add up over the parts.
    loss: float


def least_loss(parts: Sequence[Sequence[Choice]], num_bytes: int) -> list[int] | None:
    """The number of each part's choice; None: even the smallest ones need more than `num_bytes`.

    Lagrange: for a price of a byte, each part takes the choice with the least loss and price together, on
    its own. The lowest price that fits is found by bisection. What is left of the bytes then goes, step by
    step, to the part that gains most for each byte.
    """
    smallest = [min(range(len(part)), key=lambda i: (part[i].num_bytes, part[i].loss)) for part in parts]
    if _bytes_of(parts, smallest) > num_bytes:
        return None
    low, high, chosen = 0.0, 1.0, smallest
    while _bytes_of(parts, _at_price(parts, high)) > num_bytes and high < 1e30:
        high *= 4.0
    for _ in range(100):
        price = (low + high) / 2
        found = _at_price(parts, price)
        if _bytes_of(parts, found) <= num_bytes:
            high, chosen = price, found
        else:
            low = price
    return _filled(parts, chosen, num_bytes)


def _at_price(parts: Sequence[Sequence[Choice]], price: float) -> list[int]:
    return [
        min(range(len(part)), key=lambda i: (part[i].loss + price * part[i].num_bytes, part[i].num_bytes))
        for part in parts
    ]


def _filled(parts: Sequence[Sequence[Choice]], chosen: list[int], num_bytes: int) -> list[int]:
    left, chosen = num_bytes - _bytes_of(parts, chosen), list(chosen)
    while True:
        best = (0.0, 0, 0)
        for number, (part, own) in enumerate(zip(parts, chosen, strict=True)):
            for i, choice in enumerate(part):
                more, gain = choice.num_bytes - part[own].num_bytes, part[own].loss - choice.loss
                if 0 < more <= left and gain / more > best[0]:
                    best = gain / more, number, i
        if not best[0]:
            return chosen
        _, number, i = best
        left -= parts[number][i].num_bytes - parts[number][chosen[number]].num_bytes
        chosen[number] = i


def _bytes_of(parts: Sequence[Sequence[Choice]], chosen: Sequence[int]) -> int:
    return sum(part[i].num_bytes for part, i in zip(parts, chosen, strict=True))
