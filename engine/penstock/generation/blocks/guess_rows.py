"""GuessRows: which rows keep what drafts bring to recurrent states. Numbers only.

A state stands for all tokens that the sequence has computed, and has no way back. So a step's guesses leave
the state as it is after the tokens that are certain; what each guess brings to the state is kept in a row.
The rows of right guesses stay until the sequence's next step replays them: it goes on from the state with
them, and then with its own tokens, so that the state gets the same bits as without guesses.
"""

from __future__ import annotations

from penstock.generation.sequence import Sequence
from penstock.state_layout import GuessRoom


class GuessRows:
    """Hands out the rows and paths of a GuessRoom."""

    def __init__(self, room: GuessRoom | None) -> None:
        """None: the model has no states, and all guesses have room."""
        self._is_needed = room is not None
        num_rows, self._num_paths = room or (0, 0)
        self._free = list(range(num_rows))
        #: Of the step that is being decided or computed.
        self._rows_in_step: set[int] = set()
        self._paths_in_step = 0

    def within(self, num_guesses: int) -> int:
        """How many of so many guesses have room in the step."""
        return min(num_guesses, len(self._free)) if self._is_needed else num_guesses

    def begin_path(self) -> bool:
        """One more run of guesses goes on from a copy of its sequence's state. False: there is no room."""
        self._paths_in_step += 1
        return not self._is_needed or self._paths_in_step <= self._num_paths

    def take(self, num_guesses: int) -> tuple[int, ...]:
        """A row for each guess of a sequence; () if the model has no states."""
        if not self._is_needed:
            return ()
        rows = tuple(self._free.pop() for _ in range(num_guesses))
        self._rows_in_step.update(rows)
        return rows

    def accept(self, sequence: Sequence, rows: tuple[int, ...]) -> None:
        """These rows of the step are of right guesses, in their order."""
        self._rows_in_step.difference_update(rows)
        sequence.guess_rows = rows

    def replay(self, sequence: Sequence) -> tuple[int, ...]:
        """The rows that the step which is being decided replays. It has read them before it writes any."""
        rows = sequence.guess_rows
        if rows:
            self.forget(sequence)
        return rows

    def forget(self, sequence: Sequence) -> None:
        """The sequence does not go on from its state."""
        self._free += sequence.guess_rows
        sequence.guess_rows = ()

    def end_step(self) -> None:
        """The rows of guesses that were not right are free again."""
        self._free += sorted(self._rows_in_step)
        self._rows_in_step.clear()
        self._paths_in_step = 0
