"""A typed client, synchronous and asynchronous, of a Penstock server.

    from penstock_client import Client

    with Client() as client:
        print(client.chat("Why is the sky blue?").text)

Client has the methods and settings, CompletionParams and ChatParams the keywords of its methods,
penstock_client.errors the errors.
"""

from penstock_client._async.client import AsyncClient
from penstock_client._async.streams import AsyncStream
from penstock_client._sync.client import Client
from penstock_client._sync.streams import Stream
from penstock_client.async_batch import AsyncBatch, BatchResult
from penstock_client.batch import Batch
from penstock_client.chunks import (
    ChatChunkChoice,
    ChatCompletionChunk,
    CompletionChunk,
    Delta,
    ToolCallDelta,
)
from penstock_client.errors import (
    AnswerCutOff,
    APIError,
    AuthenticationFailed,
    BadRequest,
    ConnectionFailed,
    ContextOverflow,
    DeadlineExceeded,
    NotFound,
    PenstockError,
    PermissionDenied,
    ProtocolError,
    RateLimited,
    RequestTooLarge,
    ServerBusy,
    ServerError,
    StreamError,
    StreamInterrupted,
    Timeout,
)
from penstock_client.filled import FillChunk, Filled, FilledSpan
from penstock_client.params import (
    ChatParams,
    CompletionParams,
    EmbedParams,
    FillParams,
    RerankParams,
    ResponseParams,
    SamplingParams,
    ScoreParams,
    StructuredOutputs,
    TokenizeParams,
)
from penstock_client.pooled import Embeddings, RankedDocument, Ranking, Scores
from penstock_client.progress import BatchProgress
from penstock_client.requests import Conversation
from penstock_client.responses import Response, ResponseChunk
from penstock_client.results import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Message,
    PromptLogprob,
    TokenLogprob,
    ToolCall,
    Usage,
)
from penstock_client.schemas import function_tool, json_schema, tool_result
from penstock_client.server_info import Health, Model, Tokens
from penstock_client.version import __version__

__all__ = [
    "APIError",
    "AnswerCutOff",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationFailed",
    "BadRequest",
    "AsyncBatch",
    "BatchProgress",
    "BatchResult",
    "Batch",
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
    "ContextOverflow",
    "Conversation",
    "DeadlineExceeded",
    "Delta",
    "EmbedParams",
    "Embeddings",
    "FillChunk",
    "FillParams",
    "Filled",
    "FilledSpan",
    "Health",
    "Message",
    "Model",
    "NotFound",
    "PenstockError",
    "PermissionDenied",
    "PromptLogprob",
    "ProtocolError",
    "RankedDocument",
    "Ranking",
    "RateLimited",
    "RequestTooLarge",
    "RerankParams",
    "Response",
    "ResponseChunk",
    "ResponseParams",
    "SamplingParams",
    "ScoreParams",
    "Scores",
    "ServerBusy",
    "ServerError",
    "Stream",
    "StreamError",
    "StreamInterrupted",
    "StructuredOutputs",
    "Timeout",
    "TokenLogprob",
    "TokenizeParams",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "__version__",
    "function_tool",
    "json_schema",
    "tool_result",
]
