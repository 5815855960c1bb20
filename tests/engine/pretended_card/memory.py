"""CardMemory: how much of the pretended card is taken, by the rules of torch's allocator."""

from __future__ import annotations

import weakref

import torch


class CardMemory:
    """What tensors free stays reserved for the next ones, and is not free for others, until empty_cache()."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        #: Other processes' share.
        self.taken_bytes = 0
        #: What torch may take; set_per_process_memory_fraction() lowers it.
        self.limit_bytes = total_bytes
        self.peak_bytes = 0
        self._reserved_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def used_bytes(self) -> int:
        """Of tensors that live. Storages are asked anew: resize_() changes them."""
        return sum(
            storage.nbytes() for ref in self._storages.copy().values() if (storage := ref()) is not None
        )

    @property
    def reserved_bytes(self) -> int:
        return max(self._reserved_bytes, self.used_bytes)

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.taken_bytes - self.reserved_bytes)

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is new. Raises torch.OutOfMemoryError."""
        key = storage._cdata
        if key in self._storages:
            return False
        room = min(self.limit_bytes, self.total_bytes - self.taken_bytes)
        if self.used_bytes + storage.nbytes() > room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes")
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
        self._reserved_bytes = self.reserved_bytes
        self.peak_bytes = max(self.peak_bytes, self._reserved_bytes)
        return True

    def holds(self, address: int) -> bool:
        """Whether it is the address of a byte of the card."""
        storages = [ref() for ref in self._storages.copy().values()]
        return any(s is not None and s.data_ptr() <= address < s.data_ptr() + s.nbytes() for s in storages)

    def empty_cache(self) -> None:
        self._reserved_bytes = self.used_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.reserved_bytes
