"""MemoryPool: named allocations within a budget. A pool refuses instead of growing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory.direct_io import aligned_buffer

#: Allocations begin at multiples of a cache line.
ALIGNMENT = 64


def whole_lines(num_bytes: int) -> int:
    """So many bytes, rounded up to what a pool hands out."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class MemoryPool:
    """One arena of exactly the budget's size, handed out piece by piece. No piece is given back before the
    whole arena is."""

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        make_arena: Callable[[int], Tensor] = aligned_buffer,
        prepare: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`make_arena` gives memory (uint8) of a device, zeroed memory of the host by default. `prepare` is
        called with each piece before the piece is handed out, for example to pin it. Raises what the two
        raise."""
        self.name = name
        self.budget_bytes = budget_bytes
        self.allocations: dict[str, int] = {}
        self.used_bytes = 0
        self.arena = make_arena(budget_bytes)
        self._prepare = prepare

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed if the arena is, and on a page boundary if all pieces are whole pages.
        Raises CapacityError."""
        if name in self.allocations:
            raise ValueError(f"{name} is allocated already")
        if num_bytes % ALIGNMENT:
            raise ValueError(f"{num_bytes} bytes for {name} are not a multiple of {ALIGNMENT}")
        if self.used_bytes + num_bytes > self.budget_bytes:
            raise CapacityError(
                f"{name} needs {num_bytes} bytes, but the {self.name} budget of {self.budget_bytes} has "
                f"{self.budget_bytes - self.used_bytes} left"
            )
        piece = self.arena[self.used_bytes : self.used_bytes + num_bytes]
        self.allocations[name] = num_bytes
        self.used_bytes += num_bytes
        if self._prepare is not None and num_bytes:
            self._prepare(piece)
        return piece
