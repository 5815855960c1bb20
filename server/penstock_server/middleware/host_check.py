"""HostCheck: answers only requests that name this server as their host.

A web page of anybody's can have a name that leads to 127.0.0.1 (DNS rebinding): to the browser, the server
is then a part of that page's own site, and no rule of the browser's keeps the page from using it. The name in
the request's Host is the page's, which this server does not know."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError
from penstock_server.protocol.errors import ApiError
from penstock_server.settings.settings import Settings

ANY = "*"
_LOCAL = "localhost"
#: Names of other letters than these come in their ASCII form (punycode).
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+(?:%[0-9a-z._~-]+)?)\]|(?P<name>[0-9a-z._-]*))(?::[0-9]*)?")


def allowed_hosts(settings: Settings) -> frozenset[str]:
    """The names by which the server may be asked for; `*` stands for all, and .example.org for all below
    example.org."""
    origins = (urlsplit(origin).hostname or "" for origin in settings.allowed_origin if origin != ANY)
    names = (settings.host.lower().rstrip("."), *origins, *map(_allowed_name, settings.allowed_host))
    return frozenset(name for name in names if name)


def _allowed_name(value: str) -> str:
    """The name in a value of --allowed-host, which may have a scheme and a port. Raises ConfigError if there
    is none."""
    if value == ANY:
        return ANY
    name = name_of(value.rpartition("://")[2].removesuffix("/"))
    if not name:
        raise ConfigError(
            f"--allowed-host {value!r} is no name of a host: give one such as llm.example.org, or "
            ".example.org for all names below it, without a path; names "
            "with other letters than a to z in their ASCII form (xn--...)"
        )
    return name


class HostCheck:
    """Answers 403 to a request with another host than localhost, an address, or one of `allowed`. A request
    without a host is no browser's."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        wrong = next((host for host in hosts if not self._is_allowed(host)), None)
        if wrong is None:
            await self._app(scope, receive, send)
        else:
            await _refusal(wrong).response()(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = name_of(host)
        if ANY in self._allowed:
            return True
        if name is None:
            return False
        if not name or name == _LOCAL or name.endswith("." + _LOCAL) or _is_address(name):
            return True
        if name in self._allowed:
            return True
        return any(each.startswith(".") and name.endswith(each) for each in self._allowed)


def name_of(host: str) -> str | None:
    """The name or address in a Host header, without the port; None for what has no such form."""
    host = host.strip().lower()
    if _is_address(host):
        return host
    match = _HOST.fullmatch(host)
    return (match["address"] or match["name"] or "").rstrip(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> ApiError:
    name = name_of(host) or host
    message = (
        f"This server does not answer to the name {name[:100]!r}. If the name is its own, start it with "
        "--allowed-host NAME (or PENSTOCK_ALLOWED_HOST); a proxy may send the server's address instead."
    )
    return ApiError(403, message, code="host_not_allowed")
