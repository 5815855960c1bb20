"""What clients receive: the bodies of successful answers, and the chunks of a stream."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock_server import __version__

FINGERPRINT = f"penstock-{__version__}"

#: Both may also carry vLLM's `stop_reason`: the stop string or stop token that ended the answer.
Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    #: Tokens whose keys and values were kept from earlier requests.
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    #: Answers are not told apart into reasoning and the rest.
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        )


class PromptLogprob(BaseModel):
    """vLLM's: one token at one position of a prompt."""

    logprob: float
    #: Among all tokens; 1 is the likeliest.
    rank: int
    decoded_token: str


#: By token id, one entry per token of the prompt; nothing comes before the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


# -- completions --------------------------------------------------------------------------------


class CompletionLogprobs(BaseModel):
    """One entry per token in each list. Log-probabilities are natural logarithms."""

    tokens: list[str]
    #: null where nothing comes before: at the first token of a prompt.
    token_logprobs: list[float | None]
    #: The likeliest tokens and the chosen one.
    top_logprobs: list[dict[str, float] | None]
    #: Where each token begins, in characters from the beginning of the text.
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    # vLLM's, where asked for
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions; as a chunk, its texts are what came since the last one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[CompletionChoice]
    usage: Usage | None = None


# -- chat ---------------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    #: JSON, as the model wrote it: where nothing bound it to a schema it may not be valid.
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    #: null where the answer is calls alone.
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=lambda calls: calls is None)


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChoice]
    usage: Usage
    # vLLM's, where asked for
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    #: What came since the last chunk.
    arguments: str


class ToolCallDelta(BaseModel):
    """The first of a call has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


# -- models and operations ----------------------------------------------------------------------


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    #: Where the model comes from: what the server was started with.
    root: str
    parent: None = None
    #: Tokens of prompt and answer together; null while the model loads.
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok", "loading", "draining", "dead", "stopped"]
    #: While loading: how far it is.
    loaded_layers: int | None = None
    total_layers: int | None = None


class Version(BaseModel):
    version: str
