"""From the arguments of a method to the request that is sent. Pure; knows no HTTP library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock_client.exchange import JSONObject, Request
from penstock_client.params import ChatParams, CompletionParams, check_keywords
from penstock_client.results import Message

#: Text, several texts, token ids, or several lists of token ids.
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
#: What the user says, or the whole conversation so far.
Messages = str | Sequence[Message | Mapping[str, object]]

MODELS = Request("GET", "/v1/models")
HEALTH = Request("GET", "/health")


def completion_request(
    prompt: Prompt, params: Mapping[str, object], *, stream: bool = False
) -> Request:
    """Raises TypeError for an unknown keyword, ValueError for a field given twice."""
    method = "stream_complete" if stream else "complete"
    check_keywords(method, params, CompletionParams.__optional_keys__)
    return Request("POST", "/v1/completions", _body({"prompt": prompt}, params, stream))


def chat_request(
    messages: Messages, params: Mapping[str, object], *, stream: bool = False
) -> Request:
    """Raises TypeError for an unknown keyword or a wrong message, ValueError as above."""
    method = "stream_chat" if stream else "chat"
    check_keywords(method, params, ChatParams.__optional_keys__)
    body = _body({"messages": _messages(messages)}, params, stream)
    return Request("POST", "/v1/chat/completions", body)


def _body(subject: JSONObject, params: Mapping[str, object], stream: bool) -> JSONObject:
    given = {name: value for name, value in params.items() if value is not None}
    extra = given.pop("extra", {})
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a mapping of further fields, not {extra!r:.100}")
    logit_bias = given.get("logit_bias")
    if isinstance(logit_bias, Mapping):
        given["logit_bias"] = {str(token_id): bias for token_id, bias in logit_bias.items()}
    explicit = {**subject, **given, "stream": stream}
    if repeated := sorted(explicit.keys() & extra.keys()):
        raise ValueError(f"extra repeats what the method itself sends: {', '.join(repeated)}")
    # Without this the server would not count the tokens of a stream; `extra` may say otherwise.
    defaults = {"stream_options": {"include_usage": True}} if stream else {}
    return {**defaults, **explicit, **extra}


def _messages(messages: Messages) -> list[JSONObject]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_message(message) for message in messages]


def _message(message: Message | Mapping[str, object]) -> JSONObject:
    if isinstance(message, Message):
        # `raw` carries what an answer may have had besides, such as tool calls.
        return {**message.raw, "role": message.role, "content": message.content}
    if isinstance(message, Mapping):
        return dict(message)
    raise TypeError(
        f"messages must be a str or a list of messages; one of them is {message!r:.100}"
    )
