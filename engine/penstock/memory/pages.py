"""Pages: what memory and disks are handed out and read in. Pure."""

from __future__ import annotations

#: Bytes. O_DIRECT wants addresses, offsets and lengths in multiples of the disk's block; a page is enough.
PAGE = 4096


def round_up(num_bytes: int) -> int:
    """To whole pages."""
    return -(-num_bytes // PAGE) * PAGE
