"""What can be wrong with a torch file, before the file's name is known."""

from __future__ import annotations


class Malformed(Exception):
    """The bytes are not what torch.save writes."""


class Hostile(Exception):
    """The pickle asks for something that no checkpoint needs."""
