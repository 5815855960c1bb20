"""MemoryPool: named allocations within a budget. It refuses instead of growing."""

from __future__ import annotations

from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory.direct_io import aligned_buffer


class MemoryPool:
    """Hands out zeroed memory until the budget is used up; nothing is given back before the end."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.allocations: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self.allocations.values())

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed. Raises CapacityError."""
        if name in self.allocations:
            raise ValueError(f"{name} was allocated before")
        if self.used_bytes + num_bytes > self.budget_bytes:
            raise CapacityError(
                f"{name} needs {num_bytes} bytes, but the {self.name} budget of {self.budget_bytes} has "
                f"{self.budget_bytes - self.used_bytes} left"
            )
        self.allocations[name] = num_bytes
        return aligned_buffer(num_bytes)[:num_bytes]
