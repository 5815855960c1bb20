"""HostCheck: answers only requests that name this server as their host.

A web page of anybody's can have a name that leads to 127.0.0.1 (DNS rebinding): to the browser, the server
is then a part of that page's own site, and no rule of the browser's keeps the page from using it. The name in
the request's Host is the page's, which this server does not know."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock_server.protocol.errors import ApiError
from penstock_server.settings.settings import Settings

ANY = "*"
_LOCAL = "localhost"


def allowed_hosts(settings: Settings) -> frozenset[str]:
    """The names by which the server may be asked for; `*` stands for all, and .example.org for all below
    example.org."""
    origins = (urlsplit(origin).hostname or "" for origin in settings.allowed_origin if origin != ANY)
    names = (settings.host, *origins, *settings.allowed_host)
    return frozenset(name.lower().rstrip(".") for name in names if name)


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
        if not name or name == _LOCAL or name.endswith("." + _LOCAL) or _is_address(name):
            return True
        if ANY in self._allowed or name in self._allowed:
            return True
        return any(each.startswith(".") and name.endswith(each) for each in self._allowed)


def name_of(host: str) -> str:
    """The name or address in a Host header, without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> ApiError:
    name = name_of(host)
    message = (
        f"This server does not answer to the name {name[:100]!r}. If the name is its own, start it with "
        "--allowed-host NAME (or PENSTOCK_ALLOWED_HOST); a proxy may send the server's address instead."
    )
    return ApiError(403, message, code="host_not_allowed")
