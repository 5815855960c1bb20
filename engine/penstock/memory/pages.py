"""Pages: the unit in which memory is handed out and disks are read. Pure."""

from __future__ import annotations

#: Bytes. O_DIRECT wants addresses, offsets and lengths that are multiples of the disk's block; a page is one.
PAGE = 4096


def round_up(num_bytes: int) -> int:
    """The bytes of the whole pages that `num_bytes` take."""
    return -(-num_bytes // PAGE) * PAGE
