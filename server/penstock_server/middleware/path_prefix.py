"""A path in front of all routes: for proxies that give a server a part of their paths, and leave that in."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathPrefix:
    """Takes `prefix` off the paths that have it; the others come from this machine, or through a proxy that
    did it, and pass as they are."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._prefix and scope["type"] == "http":
            # The page's addresses are relative to a path that ends with a slash.
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        ours = {"root_path": self._prefix}  # for what tells addresses, such as redirects
        if path.startswith(self._prefix + "/"):
            ours["path"] = path.removeprefix(self._prefix)

        async def send_prefixed(message: Message) -> None:
            """Whoever asks for a path with a slash too many is sent to the right one: by the router, which
            knows no prefix."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "location" in headers:
                    address = urlsplit(headers["location"])
                    headers["location"] = address._replace(path=self._prefix + address.path).geturl()
            await send(message)

        await self._app({**scope, **ours}, receive, send_prefixed)
