"""PathForm: one form of each path: without a host in front, without the path of a proxy in front of all
routes (--root-path), and without a slash at its end."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class PathForm:
    """Takes `prefix` off the paths that begin with it. Other paths have none: such a request comes from this
    machine, or through a proxy that has taken the prefix off.

    /v1/models/ is /v1/models. The router would send the client there, by the name in the request's Host: a
    request that a proxy forwards would lose its way, and its key would go with it."""

    def __init__(self, app: ASGIApp, prefix: str = "") -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(("http://", "https://")):
            scope = _with_own_path(scope)
        path: str = scope["path"]
        if self._prefix and path == self._prefix:
            # The page's addresses are relative to a path that ends with a slash.
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        if self._prefix and path.startswith(self._prefix + "/"):
            path = path.removeprefix(self._prefix)
        if path != "/" and path.endswith("/") and not path.endswith("//"):
            path = path[:-1]
        # The scope has no root_path: the router would take it off once more, and then another path would be
        # answered than the path for which the API key was checked.
        await self._app({**scope, "path": path}, receive, send)


def _with_own_path(scope: Scope) -> Scope:
    """A request that has a whole URL in place of its path, as clients send it to a proxy. The URL's host
    counts, whatever the header Host says (RFC 9112, section 3.2.2)."""
    host, slash, path = scope["path"].partition("://")[2].partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers.append((b"host", host.encode("latin-1", "replace")))
    return {**scope, "path": slash + path or "/", "headers": headers}
