"""The errors that the client raises, as a tree, so that a caller can handle a whole branch at once.

PenstockError
├── ConnectionFailed          no connection, or it broke before the answer was complete
├── Timeout                   no connection, or no byte of the answer, within the limit
├── APIError                  the server answered with an error status: status, type, code, param
│   ├── BadRequest            400: the request is malformed or does not fit the model
│   │   └── ContextOverflow   the prompt, or prompt and answer, are longer than the context
│   ├── AuthenticationFailed  401: the API key is missing or wrong
│   ├── PermissionDenied      403: the API key may not do this
│   ├── NotFound              404: no such model or route
│   ├── RequestTooLarge       413: the request has more bytes than the server takes
│   ├── RateLimited           429: too many requests; retry_after
│   ├── ServerBusy            503: the queue is full, or the model still loads; retry_after
│   └── ServerError           any other 5xx: the server's fault
│       └── DeadlineExceeded  504: the server, or a proxy, gave up before the answer was complete
├── AnswerCutOff              the answer is no JSON, because max_tokens or the context ended it
├── StreamError               an error event after the stream had begun: type, code, param
│   └── StreamInterrupted     the stream ended or broke before its [DONE]
└── ProtocolError             the answer is not what the API promises

ReportedError, the common base of APIError and StreamError, has type, code and param. Other statuses
(such as 405 or 415) are a plain APIError. Mistakes that the client finds without the server are
Python's own TypeError and ValueError. Errors can be pickled.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Root of the tree.

    message: what went wrong, in words.
    request_id: the name of the request in the server's log; None if nothing was sent.
    is_retryable: the same request may succeed later, because the server turned it away or the
        connection failed. The client itself sends such a request again, `max_retries` times, unless
        the caller got a part of the answer.
    """

    #: Seconds that the server asked to wait before another attempt; None if it did not say.
    retry_after: float | None = None

    # Each keyword of each class has a default because unpickling calls `cls(*args)`.
    def __init__(
        self, message: str = "", *, request_id: str | None = None, is_retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.is_retryable = is_retryable

    def __str__(self) -> str:
        details = self._details()
        return f"{self.message} ({', '.join(details)})" if details else self.message

    def _details(self) -> list[str]:
        return [] if self.request_id is None else [f"request {self.request_id}"]


class ConnectionFailed(PenstockError):
    """There was no connection, or the connection broke before the answer was complete."""


class Timeout(PenstockError):
    """There was no connection, or no byte of the answer, within the limit."""


class ProtocolError(PenstockError):
    """The answer is not what the API promises: wrong JSON, wrong types, not an event stream."""


class AnswerCutOff(PenstockError):
    """The answer's JSON is not complete, because max_tokens or the model's context ended it. `text` is what
    came."""

    def __init__(
        self,
        message: str = "",
        *,
        text: str = "",
        request_id: str | None = None,
        is_retryable: bool = False,
    ) -> None:
        super().__init__(message, request_id=request_id, is_retryable=is_retryable)
        self.text = text


class ReportedError(PenstockError):
    """The base of APIError and StreamError, with the fields of the server's error object."""

    def __init__(
        self,
        message: str = "",
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        is_retryable: bool = False,
    ) -> None:
        super().__init__(message, request_id=request_id, is_retryable=is_retryable)
        self.type = type
        self.code = code
        self.param = param

    def _details(self) -> list[str]:
        named = (("code", self.code), ("param", self.param))
        fields = [f"{name} {value}" for name, value in named if value is not None]
        return [*fields, *super()._details()]


class APIError(ReportedError):
    """The server answered with an error status.

    status: the HTTP status. type, code: the server's words for the kind of error, such as
    "invalid_request_error" and "context_length_exceeded". param: the field that is wrong.
    """

    def __init__(
        self,
        message: str = "",
        *,
        status: int = 0,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        is_retryable: bool = False,
    ) -> None:
        super().__init__(
            message,
            type=type,
            code=code,
            param=param,
            request_id=request_id,
            is_retryable=is_retryable,
        )
        self.status = status
        self.retry_after = retry_after

    def _details(self) -> list[str]:
        return [f"HTTP {self.status}", *super()._details()]


class BadRequest(APIError):
    """400: the request is malformed, or does not fit the model."""


class ContextOverflow(BadRequest):
    """The prompt, or the prompt and the answer asked for, are longer than the model's context."""


class AuthenticationFailed(APIError):
    """401: the API key is missing or wrong."""


class PermissionDenied(APIError):
    """403: the API key may not do this."""


class NotFound(APIError):
    """404: no such model or route."""


class RequestTooLarge(APIError):
    """413: the request has more bytes than the server takes."""


class RateLimited(APIError):
    """429: too many requests."""


class ServerBusy(APIError):
    """503: the queue is full, or the model still loads."""


class ServerError(APIError):
    """Any 5xx but 503: the server's fault."""


class DeadlineExceeded(ServerError):
    """504: the server, or a proxy before it, gave up before the answer was complete."""


class StreamError(ReportedError):
    """The server reported an error after the stream had begun."""


class StreamInterrupted(StreamError):
    """The stream ended or broke before its [DONE]; what came is in the stream's `.text`."""
