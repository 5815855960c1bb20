"""Settings: the server's address, the API key, and time limits. Only this file reads the environment."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
#: Seconds. A server whose model is larger than its memory may think for minutes.
DEFAULT_TIMEOUT_S = 600.0
#: Seconds. A server that runs accepts connections at once, however slow its model is.
DEFAULT_CONNECT_TIMEOUT_S = 5.0
#: Seconds. A server tells its health at once, whatever it computes.
PROBE_TIMEOUT_S = 10.0

#: Functions that wait, in seconds.
Sleep = Callable[[float], None]
AsyncSleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Settings:
    """Resolved settings of a client.

    base_url: the server's address, without a slash or /v1 at its end.
    timeout_s: longest silence of the server, in seconds; None waits for ever.
    connect_timeout_s: longest wait for a connection, in seconds; None waits for ever.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout_s: float | None
    connect_timeout_s: float | None
    #: Headers of every request. They may hold secrets.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: A file of certificates (PEM) that may sign the server's; None: those that the system trusts.
    ca_bundle: str | None = None

    @property
    def probe_timeout_s(self) -> float:
        """Longest silence of the server when its health is asked for, in seconds."""
        return min(PROBE_TIMEOUT_S, self.timeout_s or PROBE_TIMEOUT_S)

    @property
    def shown_url(self) -> str:
        """The address without a password in it."""
        parts = urlsplit(self.base_url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    @classmethod
    def resolve(
        cls,
        base_url: str | None,
        api_key: str | None,
        timeout_s: float | None,
        connect_timeout_s: float | None,
        environ: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        ca_bundle: str | os.PathLike[str] | None = None,
    ) -> Settings:
        """The settings: arguments first, then PENSTOCK_BASE_URL and PENSTOCK_API_KEY, then defaults.

        Raises ValueError for an unusable setting.
        """
        for name, seconds in (("timeout", timeout_s), ("connect_timeout", connect_timeout_s)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} is {seconds!r}; give seconds > 0, or None for no limit")
        url = base_url or environ.get("PENSTOCK_BASE_URL") or DEFAULT_BASE_URL
        key = api_key or environ.get("PENSTOCK_API_KEY")
        bundle = None if ca_bundle is None else os.fspath(ca_bundle)
        if bundle is not None and not os.path.isfile(bundle):
            raise ValueError(f"ca_bundle is {bundle!r}, which is no file; name a PEM file of certificates")
        return cls(
            _checked_url(url),
            _checked_key(key),
            timeout_s,
            connect_timeout_s,
            _checked_headers(headers or {}),
            bundle,
        )


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        # Reading `port` raises ValueError if it is no port.
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise ValueError(f"base_url is {url!r}; give something like {DEFAULT_BASE_URL!r}")
    # Users often configure clients of this API with /v1 in the address. The paths here have /v1 themselves.
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not (isinstance(value, str) and f"{name}{value}".isascii() and f"{name}{value}".isprintable()):
            raise ValueError(f"default_headers: {name!r} has a name or value that no HTTP header can have")
    return dict(headers)


def _checked_key(key: str | None) -> str | None:
    # A key that was read from a file ends with a newline, which no header may contain.
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the API key has characters that an HTTP header cannot carry")
    return key or None
