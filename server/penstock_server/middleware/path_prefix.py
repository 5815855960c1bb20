"""PathPrefix: a path in front of all routes (--root-path), for proxies that forward requests with it."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathPrefix:
    """Takes `prefix` off the paths that begin with it. Other paths pass as they are: such a request comes
    from this machine, or through a proxy that has taken the prefix off."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._prefix and scope["type"] == "http":
            # The page's addresses are relative to a path that ends with a slash.
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        # The scope has no root_path: the router would take it off once more, and then another path would be
        # answered than the path for which the API key was checked.
        inner = path.removeprefix(self._prefix) if path.startswith(self._prefix + "/") else path

        async def send_prefixed(message: Message) -> None:
            """Adds the prefix to redirects. The router redirects a path with a slash too many, and knows no
            prefix."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "location" in headers:
                    address = urlsplit(headers["location"])
                    headers["location"] = address._replace(path=self._prefix + address.path).geturl()
            await send(message)

        await self._app({**scope, "path": inner}, receive, send_prefixed)
