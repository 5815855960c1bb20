"""Penstock's server: OpenAI's HTTP API and the command line over the engine in `penstock`."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("penstock-llm")
except metadata.PackageNotFoundError:  # run from a checkout
    __version__ = "0.0.0+source"
