"""From the arguments of a method to its request. Pure; knows no HTTP library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock_client.exchange import JSONObject, Request
from penstock_client.params import (
    ChatParams,
    CompletionParams,
    EmbedParams,
    FillParams,
    RerankParams,
    ResponseParams,
    ScoreParams,
    TokenizeParams,
    check_keywords,
)
from penstock_client.results import Message, ToolCall
from penstock_client.schemas import as_response_format, as_structured_outputs, flat_format, flat_tool

#: Text, several texts, token ids, or several lists of token ids.
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
#: The user's words, or the whole conversation so far.
Messages = str | Sequence[Message | Mapping[str, object]]
#: A conversation that grows: answers and results of calls are appended.
Conversation = list[Message | Mapping[str, object]]

MODELS = Request("GET", "/v1/models")
HEALTH = Request("GET", "/health")


def completion_request(
    prompt: Prompt, params: Mapping[str, object], *, stream: bool = False, method: str | None = None
) -> Request:
    """The request of `complete` and `stream_complete`. method: the caller's method, for errors.

    Raises TypeError for an unknown keyword, ValueError for a field given twice.
    """
    method = method or ("stream_complete" if stream else "complete")
    check_keywords(method, params, CompletionParams.__optional_keys__)
    return _generation("/v1/completions", {"prompt": prompt}, params, stream)


def chat_request(
    messages: Messages,
    params: Mapping[str, object],
    *,
    stream: bool = False,
    method: str | None = None,
) -> Request:
    """The request of `chat` and `stream_chat`. method: the caller's method, for errors.

    Raises TypeError for an unknown keyword or a wrong message, ValueError for a field given twice.
    """
    method = method or ("stream_chat" if stream else "chat")
    check_keywords(method, params, ChatParams.__optional_keys__)
    return _generation("/v1/chat/completions", {"messages": _messages(messages)}, params, stream)


def fill_request(prompt: str, params: Mapping[str, object], *, stream: bool = False) -> Request:
    """The request of `fill` and `stream_fill`. Raises TypeError for an unknown keyword, ValueError for a
    field given twice."""
    check_keywords("stream_fill" if stream else "fill", params, FillParams.__optional_keys__)
    return _post("/v1/fill", {"prompt": prompt, "stream": stream}, params)


def response_request(input: Messages, params: Mapping[str, object], *, stream: bool = False) -> Request:
    """The request of `respond` and `stream_respond`. Raises TypeError for an unknown keyword or a wrong
    message, ValueError for a field given twice."""
    check_keywords("stream_respond" if stream else "respond", params, ResponseParams.__optional_keys__)
    told = dict(params)
    if (form := told.pop("response_format", None)) is not None:
        told["text"] = {"format": flat_format(form)}
    if (effort := told.pop("reasoning_effort", None)) is not None:
        told["reasoning"] = {"effort": effort}
    tools, choice = told.get("tools"), told.get("tool_choice")
    if isinstance(tools, Sequence):
        told["tools"] = [flat_tool(tool) for tool in tools]
    if isinstance(choice, Mapping):
        told["tool_choice"] = flat_tool(choice)
    items = input if isinstance(input, str) else [_input_item(item) for item in _messages(input)]
    return _post("/v1/responses", {"input": items, "stream": stream}, told)


def _input_item(message: JSONObject) -> JSONObject:
    """An item as it came, and the result of a call in the words of this route."""
    if message.get("role") != "tool":
        return message
    call_id, output = message.get("tool_call_id"), message.get("content")
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def embed_request(input: Prompt, params: Mapping[str, object]) -> Request:
    """The request of `embed`. Vectors come as base64, which takes a third of the bytes of numbers in text."""
    check_keywords("embed", params, EmbedParams.__optional_keys__)
    return _post("/v1/embeddings", {"input": input, "encoding_format": "base64"}, params)


def score_request(
    text_1: str | Sequence[str], text_2: str | Sequence[str], params: Mapping[str, object]
) -> Request:
    check_keywords("score", params, ScoreParams.__optional_keys__)
    first, second = (text if isinstance(text, str) else list(text) for text in (text_1, text_2))
    return _post("/v1/score", {"text_1": first, "text_2": second}, params)


def rerank_request(query: str, documents: Sequence[str], params: Mapping[str, object]) -> Request:
    check_keywords("rerank", params, RerankParams.__optional_keys__)
    return _post("/v1/rerank", {"query": query, "documents": list(documents)}, params)


def tokenize_request(text: Messages, params: Mapping[str, object]) -> Request:
    """The request of `tokenize`. A str is a plain text here, and no message of a user."""
    check_keywords("tokenize", params, TokenizeParams.__optional_keys__)
    subject: JSONObject = {"prompt": text} if isinstance(text, str) else {"messages": _messages(text)}
    return _post("/tokenize", subject, params)


def detokenize_request(token_ids: Sequence[int], model: str | None) -> Request:
    return _post("/detokenize", {"tokens": list(token_ids)}, {"model": model})


def _generation(path: str, subject: JSONObject, params: Mapping[str, object], stream: bool) -> Request:
    request = _post(path, {**subject, "stream": stream}, params)
    # Without this option a stream has no usage. `extra` may say otherwise.
    defaults = {"stream_options": {"include_usage": True}} if stream else {}
    return Request("POST", path, {**defaults, **(request.body or {})}, request.timeout_s)


def _post(path: str, subject: JSONObject, params: Mapping[str, object]) -> Request:
    given = {name: value for name, value in params.items() if value is not None}
    extra, timeout_s = given.pop("extra", {}), _timeout(given.pop("timeout", None))
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a mapping of further fields, not {extra!r:.100}")
    explicit = {**subject, **_converted(given)}
    if repeated := sorted(explicit.keys() & extra.keys()):
        raise ValueError(f"extra repeats what the method itself sends: {', '.join(repeated)}")
    return Request("POST", path, {**explicit, **extra}, timeout_s)


def _timeout(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"timeout is {value!r}; give seconds > 0, or math.inf for no limit")
    return float(value)


def _converted(given: dict[str, object]) -> dict[str, object]:
    """The keywords with values as JSON has them."""
    logit_bias = given.get("logit_bias")
    if isinstance(logit_bias, Mapping):
        given["logit_bias"] = {str(token_id): bias for token_id, bias in logit_bias.items()}
    if "response_format" in given:
        given["response_format"] = as_response_format(given["response_format"])
    if "structured_outputs" in given:
        given["structured_outputs"] = as_structured_outputs(given["structured_outputs"])
    return given


def _messages(messages: Messages) -> list[JSONObject]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_message(message) for message in messages]


def _message(message: Message | Mapping[str, object]) -> JSONObject:
    if isinstance(message, Message):
        calls = [_tool_call(call) for call in message.tool_calls]
        body = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            body["reasoning_content"] = message.reasoning
        return {**message.raw, **body, **({"tool_calls": calls} if calls else {})}
    if isinstance(message, Mapping):
        return dict(message)
    raise TypeError(f"messages must be a str or a list of messages; one of them is {message!r:.100}")


def _tool_call(call: ToolCall) -> JSONObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
