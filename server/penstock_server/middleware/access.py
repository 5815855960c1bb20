"""Access by API keys: the middleware that checks them, and the file that they are read from."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.paths import METRICS_PATH, is_open
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.request_info import current_request

#: Hex digits of a key's digest that name a client in limits and shares. The key can't be computed from them.
_CLIENT_DIGITS = 16


def read_keys(settings: Settings) -> tuple[str, ...]:
    """The keys of the settings and of the key file. Raises ConfigError for a key that no client could send,
    and for a file without keys: the owner of the server wanted one that asks for keys."""
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        found = list(_lines_of(settings.api_key_file))
        if not found:
            raise ConfigError(f"{settings.api_key_file} holds no API key; write one per line")
        keys += found
    if not all(re.fullmatch("[!-~]+", key) for key in keys):
        raise ConfigError("an API key must be of printable ASCII characters without spaces")
    return tuple(keys)


def _lines_of(path: Path) -> Iterator[str]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from None
    for line in text.splitlines():
        if (key := line.strip()) and not key.startswith("#"):
            yield key


class ApiKeys:
    """Refuses requests without one of the keys, except for open paths and CORS preflights. If there are no
    keys at all, every request passes."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], has_open_metrics: bool) -> None:
        self._app = app
        # All digests have one length, so that the time of a comparison tells nothing about a key.
        self._digests = [_digest(key) for key in keys]
        self._has_open_metrics = has_open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_allowed(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if scope["method"] == "OPTIONS" or is_open(path) or (self._has_open_metrics and path == METRICS_PATH):
            return True
        sent = _digest(_sent_key(Headers(scope=scope)))
        matches = [secrets.compare_digest(sent, digest) for digest in self._digests]
        if (request := current_request.get()) and any(matches):
            request.client = sent.hex()[:_CLIENT_DIGITS]
        return any(matches)


def _sent_key(headers: Headers) -> str:
    """The key that a client sent: OpenAI's clients use Authorization, Anthropic's and llama-server's
    X-Api-Key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
