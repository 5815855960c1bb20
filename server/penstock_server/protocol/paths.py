"""Paths that more than their route knows of: those that need no key, and those that users don't ask for."""

from __future__ import annotations

#: The files of the web page lie below it.
UI_PATH = "/ui"
#: Paths (and what is below them) that need no API key.
OPEN_PATHS = ("/health", "/ping", "/version")
METRICS_PATH = "/metrics"
LOAD_PATH = "/load"
#: What the engine does at this moment: asked for several times a second by whoever watches.
STATS_PATH = "/v1/engine/stats"


def is_open(path: str) -> bool:
    """Whether everyone may ask for it, without a key: also the page, for which a browser can't send one."""
    return path == "/" or any(path == each or path.startswith(each + "/") for each in (*OPEN_PATHS, UI_PATH))


def is_operational(path: str) -> bool:
    """Whether probes and scrapers ask for it, and not users."""
    return is_open(path) or path in (METRICS_PATH, STATS_PATH, LOAD_PATH)
