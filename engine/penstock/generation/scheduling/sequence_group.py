"""SequenceGroup: sequences that run together or wait together, as the beams of a search do. Numbers only.

The beams of a search wait for each other: which of them go on is known when all of them are computed. If some
beams of two searches ran and the others waited for their places, both searches would wait forever. So all
beams of a search come in at once, and are preempted at once.
"""

from __future__ import annotations

import copy
from collections.abc import Container

from penstock.generation.sequence import Sequence


class SequenceGroup:
    """The sequences of a group that are not finished. Admission changes them: replace()."""

    def __init__(self, first: Sequence, num_places: int) -> None:
        """num_places: the most members that the group ever has. As many places of a step are theirs while the
        group runs."""
        self.num_places = num_places
        self.members = [first]
        first.group = self

    @property
    def num_spare_places(self) -> int:
        return self.num_places - len(self.members)


class Places:
    """The places of a step, which running sequences take."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        #: Groups that run.
        self._groups: list[SequenceGroup] = []

    def have_room(
        self,
        num_running: int,
        group: SequenceGroup | None,
        beside: Container[SequenceGroup | None] | None = None,
    ) -> bool:
        """Whether there is a place for one more sequence, or places for a group at its widest, where
        `num_running` sequences run and all groups that run now, or only those of `beside`."""
        groups = [each for each in self._groups if beside is None or each in beside]
        num_taken = num_running + sum(each.num_spare_places for each in groups)
        return num_taken + (1 if group is None else group.num_places) <= self._max_num_seqs

    def enter(self, group: SequenceGroup | None) -> None:
        """A group, if this is one, begins to run."""
        self._groups += [] if group is None else [group]

    def leave(self, group: SequenceGroup | None) -> None:
        """A group, if this is one, runs no longer."""
        self._groups = [each for each in self._groups if each is not group]


def together(sequence: Sequence) -> list[Sequence]:
    """The sequences that run or wait together with this one, and the sequence itself, in order."""
    return [sequence] if sequence.group is None else list(sequence.group.members)


def branch(parent: Sequence) -> Sequence:
    """A sequence that begins with all tokens of another one, and has no blocks yet."""
    child = copy.copy(parent)
    child.token_ids, child.block_keys, child.block_table = list(parent.token_ids), list(parent.block_keys), []
    child.state_slot = None
    if parent.encoder is not None:
        child.encoder = copy.copy(parent.encoder)
        child.encoder.block_table = []
    child.matcher = parent.matcher and parent.matcher.fork()
    return child
