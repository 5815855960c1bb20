"""Paths that middleware knows: paths that need no API key, and paths that only operators ask for."""

from __future__ import annotations

#: The files of the web page lie below this path.
UI_PATH = "/ui"
#: Paths (and what is below them) that need no API key.
OPEN_PATHS = ("/health", "/ping", "/version")
METRICS_PATH = "/metrics"
LOAD_PATH = "/load"
#: The engine's counters. The web page asks for them several times a second.
STATS_PATH = "/v1/engine/stats"

_OPEN = frozenset(("/", *OPEN_PATHS, UI_PATH))
_BELOW_OPEN = tuple(f"{path}/" for path in (*OPEN_PATHS, UI_PATH))


def is_open(path: str) -> bool:
    """Whether a path needs no API key. The web page needs none, since a browser can't send a key for it."""
    return path in _OPEN or path.startswith(_BELOW_OPEN)


def is_operational(path: str) -> bool:
    """Whether probes and scrapers ask for a path, and not users."""
    return is_open(path) or path in (METRICS_PATH, STATS_PATH, LOAD_PATH)
