"""Which machine computes which layers. Pure: numbers in, numbers out.

Each machine gets a contiguous range of at least one layer. A machine takes max(bytes that a step reads / rate
of its memory, bytes that don't fit / rate of what streams them) seconds for its range. With the pipe full,
the slowest machine decides; a sequence that is alone waits for the sum. So cut() makes the slowest machine as
fast as it can be, and of all such cuts takes the one with the least sum. Both are found by dynamic
programming over (machines, layers), so the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes."""

    #: Bytes of its weights with all its experts, and of its keys and values.
    num_bytes: int
    kv_bytes: int
    #: Bytes of weights that a step reads.
    step_bytes: int


@dataclass(frozen=True)
class MachineRates:
    """What a machine has for its layers. Rates are 1e9 bytes a second; 0 is unknown."""

    #: For weights, keys and values.
    num_bytes: int
    memory_gbps: float = 0.0
    #: Of the disk, or of the link to a card.
    streaming_gbps: float = 0.0
    #: Seconds of a step beside the layers: embedding, head and sampling.
    other_s: float = 0.0


#: What a rate is taken for where none was measured. Only the ratio of the two decides.
UNKNOWN_MEMORY_GBPS, UNKNOWN_STREAMING_GBPS = 10.0, 1.0


def range_seconds(layers: Sequence[LayerCost], machine: MachineRates) -> float:
    """Seconds in which a machine computes these layers for one token."""
    missing = max(0, sum(each.num_bytes + each.kv_bytes for each in layers) - machine.num_bytes)
    all_bytes, step_bytes = sum(each.num_bytes for each in layers), sum(each.step_bytes for each in layers)
    share = min(1.0, missing / all_bytes) if all_bytes else 0.0
    reading_s = step_bytes / (machine.memory_gbps or UNKNOWN_MEMORY_GBPS) / 1e9
    streaming_s = share * step_bytes / (machine.streaming_gbps or UNKNOWN_STREAMING_GBPS) / 1e9
    return max(reading_s, streaming_s) + machine.other_s


def cut(layers: Sequence[LayerCost], machines: Sequence[MachineRates]) -> tuple[range, ...]:
    """The layers of each machine, in the order of machines. Raises ValueError if there are more machines than
    layers."""
    if len(machines) > len(layers):
        raise ValueError(
            f"{len(machines)} machines can't share {len(layers)} layers: each computes at least one"
        )
    seconds = _table(layers, machines)
    slowest, _ = _best(len(layers), len(machines), lambda *place: seconds[place], max, math.inf)
    _, ranges = _best(len(layers), len(machines), lambda *place: seconds[place], _add, slowest)
    return ranges


def _add(first: float, second: float) -> float:
    return first + second


def _table(
    layers: Sequence[LayerCost], machines: Sequence[MachineRates]
) -> dict[tuple[int, int, int], float]:
    """(machine, first layer, layer after the last one) -> seconds."""
    kinds = ("num_bytes", "kv_bytes", "step_bytes")
    sums = [[0, *accumulate(getattr(each, kind) for each in layers)] for kind in kinds]
    return {
        (number, first, stop): range_seconds([LayerCost(*(s[stop] - s[first] for s in sums))], machine)
        for number, machine in enumerate(machines)
        for first in range(len(layers))
        for stop in range(first + 1, len(layers) + 1)
    }


def _best(
    num_layers: int,
    num_machines: int,
    seconds: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    limit: float,
) -> tuple[float, tuple[range, ...]]:
    """The cut whose machines' seconds, joined, are least, with no machine above `limit`; and these
    seconds."""
    #: Layers -> the best cut of the first so many layers among the machines so far.
    found: dict[int, tuple[float, tuple[range, ...]]] = {0: (0.0, ())}
    for number in range(num_machines):
        following: dict[int, tuple[float, tuple[range, ...]]] = {}
        for first, (before, ranges) in found.items():
            for stop in range(first + 1, num_layers + 1):
                own = seconds(number, first, stop)
                total = join(before, own)
                if own <= limit and (stop not in following or total < following[stop][0]):
                    following[stop] = total, (*ranges, range(first, stop))
        found = following
    return found[num_layers]
