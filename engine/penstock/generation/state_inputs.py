"""Where the recurrent states of a step's sequences lie, as tensors: StateSlots, or GuessedStates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.kernels import BatchLayout, GuessedPaths, GuessedStates, StateSlots


class StateInputs(NamedTuple):
    """Two fields of BatchLayout, of which one is None; in models without states both are."""

    states: StateSlots | None = None
    guessed: GuessedStates | None = None

    @classmethod
    def of(cls, batch: Batch, firsts: List[int]) -> StateInputs:
        """The first of each sequence's rows in the step are `firsts`."""
        for item in batch.scheduled:  # all have a state, or none has one
            if item.sequence.state_slot is None:
                return cls()
        if any(item.guess_rows or item.replayed for item in batch.scheduled):
            return cls(guessed=_guessed(batch.scheduled, firsts))
        return cls(_slots(batch.scheduled, firsts))


class _Path(NamedTuple):
    """A path of guesses, from the first one of its sequence to the last one of a run."""

    slot: int
    #: Rows of the step, of which the last `num_own` are of the run itself.
    rows: list[int]
    num_own: int
    #: The sequence's tokens before the path.
    num_before: int

    @property
    def num_tokens(self) -> int:
        """Of the sequence, with the path."""
        return self.num_before + len(self.rows)


def _guessed(scheduled: List[ScheduledSequence], firsts: List[int]) -> GuessedStates:
    replayed = [row for item in scheduled for row in item.replayed]
    rows, starts, places, num_replayed = list[int](), list[int](), dict[int, int](), 0
    for item, first in zip(scheduled, firsts, strict=True):
        rows += range(num_replayed, num_replayed + len(item.replayed))
        num_replayed += len(item.replayed)
        starts.append(len(rows))
        for row in range(first, first + item.num_new_tokens):
            places[row] = len(rows)
            rows.append(len(replayed) + row)
    paths = [path for item, first in zip(scheduled, firsts, strict=True) for path in _paths(item, first)]
    path_rows = [row for path in paths for row in path.rows]
    for path, end in zip(paths, accumulate(len(path.rows) for path in paths), strict=True):
        for place in range(end - path.num_own, end):
            places[path_rows[place]] = len(rows) + place
    counts = [len(item.replayed) + item.num_new_tokens for item in scheduled]
    lengths = [item.sequence.num_computed_tokens + item.num_new_tokens for item in scheduled]
    return GuessedStates(
        _int64(replayed),
        _int64(rows),
        _layout(counts, lengths, _slots(scheduled, starts)),
        _int64(places[row] for row in range(len(places))),
        _guessed_paths(scheduled, firsts, paths) if paths else None,
    )


def _guessed_paths(scheduled: List[ScheduledSequence], firsts: List[int], paths: List[_Path]) -> GuessedPaths:
    counts = [len(path.rows) for path in paths]
    none = torch.zeros(0, dtype=torch.int32)
    places = torch.arange(len(paths), dtype=torch.int32)
    slots = StateSlots(places, torch.zeros(len(paths) + 1, dtype=torch.int32), none, none)
    return GuessedPaths(
        _int64(path.slot for path in paths),
        _int64(row for path in paths for row in path.rows),
        _layout(counts, [path.num_tokens for path in paths], slots),
        _int64(
            first + item.num_new_tokens + node
            for item, first in zip(scheduled, firsts, strict=True)
            for node in range(item.drafts.num_nodes)
        ),
        _int64(row for item in scheduled for row in item.guess_rows),
    )


def _paths(item: ScheduledSequence, first: int) -> Iterator[_Path]:
    """The paths of a sequence's guesses. The sequence's first row is `first`."""
    slot = item.sequence.state_slot
    assert slot is not None
    num_before = item.sequence.num_computed_tokens + item.num_new_tokens
    for run in item.drafts.runs:
        path = item.drafts.path(run[-1])
        yield _Path(slot, [first + item.num_new_tokens + node for node in path], len(run), num_before)


def _slots(scheduled: List[ScheduledSequence], starts: List[int]) -> StateSlots:
    """starts: the row of each sequence's first token that the step computes, after those it replays."""
    slots = [item.sequence.state_slot for item in scheduled]
    counts, rows, kept = [0], list[int](), list[int]()
    for item, start in zip(scheduled, starts, strict=True):
        before = start - item.sequence.num_computed_tokens - 1
        rows += [before + num_tokens for num_tokens, _ in item.saves]
        kept += [slot for _, slot in item.saves]
        counts.append(len(rows))
    return StateSlots(*(torch.tensor(each, dtype=torch.int32) for each in (slots, counts, rows, kept)))


def _layout(counts: List[int], lengths: List[int], states: StateSlots) -> BatchLayout:
    """Rows of sequences that have so many rows each, for layers with states alone. lengths: context_lens."""
    nothing = torch.empty(0, dtype=torch.int64)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return BatchLayout(
        nothing, nothing, nothing, starts, torch.tensor(lengths, dtype=torch.int32), states=states
    )


def _int64(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
