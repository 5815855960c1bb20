"""Requests and replies as plain values. This file knows no HTTP library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock_client.errors import ProtocolError

JSONObject = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One request to the server. `body` is a JSON object, or None for a GET.

    timeout_s: longest silence of the server, in seconds; None: the client's limit, infinity: no limit.
    """

    method: str
    path: str
    body: JSONObject | None = None
    timeout_s: float | None = None

    @property
    def needs_model(self) -> bool:
        return self.body is not None and "model" not in self.body

    def with_model(self, model: str) -> Request:
        return replace(self, body={**(self.body or {}), "model": model})

    def with_timeout(self, timeout_s: float) -> Request:
        return replace(self, timeout_s=timeout_s)

    def content(self) -> bytes:
        """The body as bytes. Raises ValueError for NaN and infinity, which JSON does not have."""
        if self.body is None:
            return b""
        # ASCII with escapes can also carry the lone surrogates of a badly decoded prompt.
        return json.dumps(self.body, allow_nan=False, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True)
class Reply:
    """A complete answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def request_id(self) -> str | None:
        return self.headers.get("x-request-id")

    def json_object(self) -> JSONObject:
        """The body as a JSON object. Raises ProtocolError if it is anything else."""
        return parse_json_object(self.body)


def parse_json_object(text: str | bytes) -> JSONObject:
    """`text` as a JSON object. Raises ProtocolError, which quotes the beginning of `text`."""
    try:
        value = json.loads(text)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; RecursionError comes from deep nesting.
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent no valid JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"the server sent JSON that is not an object: {text[:200]!r}")
    return value
