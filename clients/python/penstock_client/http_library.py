"""The HTTP library, which no other file imports: its types, its options, and its exceptions as those of
errors.py."""

from __future__ import annotations

import math
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from penstock_client.errors import (
    ConnectionFailed,
    PenstockError,
    ProtocolError,
    StreamInterrupted,
    Timeout,
)
from penstock_client.exchange import Reply, Request
from penstock_client.failures import error_of_reply
from penstock_client.settings import Settings
from penstock_client.version import USER_AGENT

# These addresses are asked without a proxy: no proxy can reach this machine's loopback interface.
_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")
# Fewer than the 1024 files that a process may usually open. Further requests wait.
_MAX_CONNECTIONS = 1000
# Seconds. Shorter than the 5 s of uvicorn and Node, which close idle connections: a request must not meet
# that.
_KEEPALIVE_EXPIRY_S = 4.0
# "identity", because a proxy that compresses an event stream holds events back.
STREAM_HEADERS = {"accept": "text/event-stream", "accept-encoding": "identity"}


#: The types of `http_client`.
HTTPClient = httpx2.Client
AsyncHTTPClient = httpx2.AsyncClient
Response = httpx2.Response
#: The body of an answer, in pieces as they come.
Blocks = Generator[bytes, None, None]
AsyncBlocks = AsyncGenerator[bytes, None]


def client_options(settings: Settings) -> dict[str, Any]:
    """The arguments for both clients of the HTTP library. Raises ValueError for a file that holds no
    certificates."""
    bundle = settings.ca_bundle
    try:
        verify = True if bundle is None else ssl.create_default_context(cafile=bundle)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"ca_bundle is {bundle!r}, which holds no certificates: {error}") from error
    return {
        "verify": verify,
        "limits": httpx2.Limits(
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=20,
            keepalive_expiry=_KEEPALIVE_EXPIRY_S,
        ),
        "mounts": dict.fromkeys(_LOOPBACK),
    }


class RequestOptions:
    """Makes the options of a request (URL, headers, time limits, content), and its id. They hold for any
    client of the HTTP library."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for a wrong URL."""
        self._settings = settings
        self._headers = {"user-agent": USER_AGENT}
        if settings.api_key is not None:
            self._headers["authorization"] = f"Bearer {settings.api_key}"
        self._headers |= {name.lower(): value for name, value in settings.headers.items()}
        try:
            httpx2.URL(settings.base_url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"base_url is {settings.base_url!r}: {error}") from error

    def __call__(self, request: Request, headers: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
        # The client makes the id, so that it is known even if no answer comes. The server's log has it, too.
        request_id = uuid.uuid4().hex
        headers = {"x-request-id": request_id, **self._headers, **(headers or {})}
        request_id = headers["x-request-id"]
        url = f"{self._settings.base_url}{request.path}"
        options: dict[str, Any] = {"url": url, "headers": headers, "timeout": self._timeout(request)}
        if request.body is not None:
            headers["content-type"] = "application/json"
            options["content"] = request.content()
        return options, request_id

    def _timeout(self, request: Request) -> httpx2.Timeout:
        """The time limits. The limit of silence holds between two reads and not for the whole answer:
        each byte, also of a keep-alive comment, begins it anew."""
        silence_s = request.timeout_s or self._settings.timeout_s
        return httpx2.Timeout(
            None if silence_s == math.inf else silence_s, connect=self._settings.connect_timeout_s
        )


def reply_of(response: httpx2.Response) -> Reply:
    # The library gives names of headers in lower case.
    return Reply(response.status_code, dict(response.headers), response.content)


def is_stream(response: httpx2.Response) -> bool:
    content_type: str = response.headers.get("content-type", "")
    return response.is_success and content_type.lower().startswith("text/event-stream")


def refusal(reply: Reply) -> PenstockError:
    """The error for a complete answer that came in place of a stream."""
    if not reply.is_success:
        return error_of_reply(reply, time.time())
    content_type = reply.headers.get("content-type")
    return ProtocolError(
        f"expected an event stream, but the content type is {content_type!r}",
        request_id=reply.request_id,
    )


@contextmanager
def translated(request: Request, request_id: str | None, *, has_begun: bool = False) -> Iterator[None]:
    try:
        yield
    except httpx2.RequestError as error:
        translated = _translate(error, request, has_begun)
        translated.request_id = request_id
        raise translated from error


def _server(error: httpx2.RequestError) -> str:
    """The server's address, without a password in it."""
    url = error.request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _translate(error: httpx2.RequestError, request: Request, has_begun: bool) -> PenstockError:
    """Our error for the library's `error`. has_begun: the first bytes of a stream had come."""
    subject = f"{request.method} {request.path}"
    # Some of the library's exceptions have no message.
    reason = str(error) or type(error).__name__
    match error:
        case httpx2.ConnectTimeout():
            return Timeout(f"{subject}: no connection to {_server(error)} in time", is_retryable=True)
        case httpx2.PoolTimeout():
            return Timeout(f"{subject}: all connections of this client stayed in use")
        case httpx2.TimeoutException():
            return Timeout(
                f"{subject}: the server was silent for too long; stream the answer, or give the "
                "client a longer timeout="
            )
        case httpx2.ConnectError():
            message = f"{subject}: cannot connect to {_server(error)}: {reason}"
            return ConnectionFailed(message, is_retryable=True)
        case httpx2.NetworkError() | httpx2.RemoteProtocolError() if has_begun:
            return StreamInterrupted(f"{subject}: the stream broke: {reason}", is_retryable=True)
        case httpx2.NetworkError() | httpx2.RemoteProtocolError():
            # The request may have used an idle connection that the server was just closing. If the server
            # had begun to work, it stopped when the connection broke, and nobody saw the answer.
            return ConnectionFailed(f"{subject}: the connection broke: {reason}", is_retryable=True)
        case httpx2.ProxyError():
            return ConnectionFailed(f"{subject}: the proxy refused: {reason}")
        case _:
            return ProtocolError(f"{subject}: {reason}")
