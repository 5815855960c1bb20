"""ErrorForms: errors of APIs that are not OpenAI's, in the forms of these APIs.

Every layer and route answers errors as OpenAI does. This layer lies outside of them, and writes the errors
anew for the paths of other APIs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: (status, the members of OpenAI's error object, id of the request) -> the other API's body.
ErrorForm = Callable[[int, Mapping[str, Any], str], dict[str, Any]]


class ErrorForms:
    def __init__(self, app: ASGIApp, forms: Mapping[str, ErrorForm]) -> None:
        """forms: by the beginning of the paths whose errors have the form."""
        self._app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = self._form_of(scope["path"]) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(form, send))

    def _form_of(self, path: str) -> ErrorForm | None:
        return next((form for start, form in self._forms.items() if _is_below(path, start)), None)


def _is_below(path: str, start: str) -> bool:
    return path == start or path.startswith(start + "/")


class _Rewriter:
    """Sends an answer on. The body of an error is collected and written anew."""

    def __init__(self, form: ErrorForm, send: Send) -> None:
        self._form = form
        self._send = send
        self._error_start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._error_start = message
            return
        if self._error_start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_error(self._error_start)

    async def _send_error(self, start: Message) -> None:
        headers = MutableHeaders(scope=start)
        body = self._body and self._written_anew(start["status"], headers.get("x-request-id", ""))
        if body != self._body:  # HEAD has the length of a body, and no body
            headers["Content-Length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _written_anew(self, status: int, request_id: str) -> bytes:
        try:
            error = json.loads(self._body)["error"]
        except (ValueError, TypeError, KeyError):
            return self._body
        return json.dumps(self._form(status, error, request_id)).encode()
