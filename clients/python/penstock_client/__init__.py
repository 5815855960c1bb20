"""A typed client, synchronous and asynchronous, of a Penstock server.

    from penstock_client import Client

    with Client() as client:
        print(client.chat("Why is the sky blue?").text)

Methods and settings: Client. Keywords of its methods: CompletionParams, ChatParams. What can go
wrong: penstock_client.errors.
"""

from penstock_client.async_client import AsyncClient
from penstock_client.client import Client
from penstock_client.errors import (
    APIError,
    AuthenticationFailed,
    BadRequest,
    ConnectionFailed,
    NotFound,
    PenstockError,
    ProtocolError,
    RateLimited,
    ServerBusy,
    ServerError,
    StreamError,
    StreamInterrupted,
    Timeout,
)
from penstock_client.params import ChatParams, CompletionParams, SamplingParams
from penstock_client.results import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    CompletionChunk,
    Delta,
    Health,
    Message,
    Model,
    TokenLogprob,
    Usage,
)
from penstock_client.streams import AsyncStream, Stream
from penstock_client.version import __version__

__all__ = [
    "APIError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationFailed",
    "BadRequest",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatParams",
    "Client",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionParams",
    "ConnectionFailed",
    "Delta",
    "Health",
    "Message",
    "Model",
    "NotFound",
    "PenstockError",
    "ProtocolError",
    "RateLimited",
    "SamplingParams",
    "ServerBusy",
    "ServerError",
    "Stream",
    "StreamError",
    "StreamInterrupted",
    "Timeout",
    "TokenLogprob",
    "Usage",
    "__version__",
]
