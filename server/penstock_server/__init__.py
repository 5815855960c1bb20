"""Penstock's server: OpenAI's HTTP API and the command line over the engine in `penstock`."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, which is looked up only when it is asked for: a command can be interrupted before."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("penstock-llm")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0.0.0+source"
