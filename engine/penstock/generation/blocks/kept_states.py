"""KeptStates: copies of recurrent states on disk, beside the blocks at whose ends they stand. Numbers only.

A store keeps a state as pieces, each as it keeps a block: PieceNumbers. A state can be used if all of its
pieces are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.generation.blocks.state_pool import StatePool

if TYPE_CHECKING:
    from penstock.cache.disk.piece_numbers import PieceNumbers


class PieceStore(Container[bytes], Protocol):
    """What BlockStore (disk_blocks.py) does with pieces."""

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None: ...

    def expected_read_s(self, keys: Collection[bytes]) -> float: ...


class ArrivingState(NamedTuple):
    """A state on its way from disk into a slot."""

    key: bytes
    slot: int
    #: (key, number) of each piece.
    wanted: list[tuple[bytes, int]]


class KeptStates:
    """Offers copies of states to a store, and brings them back."""

    def __init__(
        self,
        states: StatePool,
        store: PieceStore,
        pieces: PieceNumbers,
        compute_s: Callable[[int], float],
    ) -> None:
        """compute_s: tokens of a prompt -> seconds that computing them takes; 0: unknown."""
        #: Of each state.
        self.num_pieces = pieces.num_pieces
        self._states = states
        self._store = store
        self._pieces = pieces
        self._compute_s = compute_s

    def has(self, key: bytes) -> bool:
        """Whether the state at the end of the block with this key is on disk."""
        # The last piece gives way first. Most states that are asked for are not there: one hash says so.
        return all(self._pieces.key(key, index) in self._store for index in reversed(range(self.num_pieces)))

    def pieces_of(self, key: bytes) -> list[bytes]:
        """The keys of the pieces of the state at the end of the block with this key."""
        return self._pieces.keys(key)

    def offer(self, key: bytes, num_tokens: int) -> None:
        """The copy of a state after so many tokens may be kept, if it is still there, and if reading it
        should take less time than computing the tokens."""
        copy, compute_s, pieces = self._states.watch(key), self._compute_s(num_tokens), self.pieces_of(key)
        if copy is None or 0 < compute_s <= self._store.expected_read_s(pieces):
            return
        (slot, is_unchanged), parent = copy, key
        for piece, number in zip(pieces, self._pieces.of_slot(slot), strict=True):
            self._store.offer(number, piece, parent, is_unchanged)
            parent = piece

    def begin(self, key: bytes) -> ArrivingState | None:
        """A slot for a state that is on disk; None if no slot can be had now."""
        slot = self._states.begin_read()
        if slot is None:
            return None
        numbers = self._pieces.of_slot(slot)
        return ArrivingState(key, slot, list(zip(self._pieces.keys(key), numbers, strict=True)))

    def end(self, state: ArrivingState, arrived: Set[bytes]) -> None:
        """The reading has ended, and these pieces have arrived. If they are all, the state can be found."""
        is_whole = all(piece in arrived for piece, _ in state.wanted)
        self._states.end_read(state.slot, state.key if is_whole else None)
