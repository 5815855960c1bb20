"""The bodies of successful answers, and the chunks of streams."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock_server import __version__

FINGERPRINT = f"penstock-{__version__}"

#: Why an answer ended. vLLM's `stop_reason` stands beside it: the stop string or stop token, if there was
#: one.
Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    #: Tokens whose keys and values were kept from earlier requests.
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    #: Tokens of the thinking before the answer, without its markers.
    reasoning_tokens: int
    #: Guesses of the answer's tokens that came true, from a prediction or from the text so far, and those
    #: that did not.
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        num_drafts: int,
        num_right_drafts: int,
        num_reasoning: int = 0,
    ) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning,
                accepted_prediction_tokens=num_right_drafts,
                rejected_prediction_tokens=num_drafts - num_right_drafts,
            ),
        )


class PromptLogprob(BaseModel):
    """One token at one position of a prompt, in vLLM's shape."""

    logprob: float
    #: The token's rank among all tokens; 1 is the likeliest.
    rank: int
    decoded_token: str


#: For each token of the prompt: log-probabilities by token id. null for the first token, which has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


# -- completions --------------------------------------------------------------------------------


class CompletionLogprobs(BaseModel):
    """One entry per token in each list. Log-probabilities are natural logarithms."""

    tokens: list[str]
    #: null for the first token of a prompt.
    token_logprobs: list[float | None]
    #: The likeliest tokens and the chosen one.
    top_logprobs: list[dict[str, float] | None]
    #: The offset of each token from the beginning of the text, in characters.
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    # vLLM's fields, null unless the request asks for them
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions. In a chunk, texts are what came since the last chunk."""

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
    #: JSON as the model wrote it. The JSON may be invalid if nothing bound the model to a schema.
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    #: null if the answer is calls alone.
    content: str | None
    refusal: None = None
    #: What the model thought before it answered, under DeepSeek's name and under vLLM's.
    reasoning_content: str | None = Field(default=None, exclude_if=lambda text: text is None)
    reasoning: str | None = Field(default=None, exclude_if=lambda text: text is None)
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
    # vLLM's fields, null unless the request asks for them
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    #: The text that came since the last chunk.
    arguments: str


class ToolCallDelta(BaseModel):
    """What is new in a call. The first delta of a call has the call's id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
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


class ModelStatus(BaseModel):
    """As in llama-server."""

    value: Literal["loaded", "loading", "unloaded"]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    #: The first name of the model: names with the same root are one model. An adapter is its own root.
    root: str
    #: The model that an adapter changes.
    parent: str | None = None
    #: The most tokens of prompt and answer together; null while the model loads.
    max_model_len: int | None = None
    #: The most blanks of a text that /v1/fill fills in; 0 if the model can't, null while the model loads.
    max_blanks: int | None = None
    #: What the model is for: "generate", "embed" or "score".
    task: str | None = None
    #: Of one of several models; null for a model that stays loaded.
    status: ModelStatus | None = Field(default=None, exclude_if=lambda status: status is None)
    #: Whose code computes the layers, penstock's or transformers'; null while the model loads.
    model_impl: str | None = None
    #: Whether a request gets the same bits in any company; null while the model loads.
    is_batch_invariant: bool | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    #: "waiting": requests wait for a machine that computes some of the layers (--nodes); `message` names it.
    #: "failing": the last step failed, "stuck": a step hangs; `message` says why.
    status: Literal["ok", "loading", "waiting", "failing", "stuck", "draining", "dead", "stopped"]
    message: str | None = None
    #: While the model loads: the layers that are loaded, and all layers.
    loaded_layers: int | None = None
    total_layers: int | None = None


class Version(BaseModel):
    version: str
