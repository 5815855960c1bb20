"""What the server answers, whole, as frozen values. Knows nothing of HTTP.

Each value keeps in `raw` the JSON object that it was made from, for fields that have no
attribute here; what was put together from a stream has an empty one. `raw` takes no part in
comparisons. Pieces of a stream are in chunks.py, what is known of the server in server_info.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar, overload

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, parse_json_object

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Parseable(Protocol[T_co]):
    """What pydantic's models have, as far as it is needed."""

    def model_validate_json(self, json_data: str) -> T_co: ...


def raw_field() -> JSONObject:
    """A field that does not show in repr and does not count in ==."""
    value: JSONObject = field(default_factory=dict, repr=False, compare=False)
    return value


@dataclass(frozen=True)
class Usage:
    """Tokens counted by the server. `cached_tokens` of the prompt needed no computing."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log probability, and its most probable rivals.

    `logprob` is None for the first token of an echoed prompt, which nothing precedes.
    """

    token: str
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptLogprob:
    """A token at a position of the prompt: `rank` 1 is the likeliest there."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: By token id, for each position of a prompt; None at the first, which nothing precedes.
PromptLogprobs = tuple[Mapping[int, PromptLogprob] | None, ...]


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str
    raw: JSONObject = raw_field()

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments by name.

        Raises ProtocolError if they are no JSON object, as may happen where neither tool_choice
        nor `strict` bound the model to the schema.

        >>> ToolCall("call_1", "weather", '{"city": "Oslo"}').parsed_arguments()
        {'city': 'Oslo'}
        """
        return parse_json_object(self.arguments)


@dataclass(frozen=True)
class Choice:
    """What all choices have, of completions and chats, whole and in pieces.

    stop_reason: the stop string or token id that ended it. token_ids: with return_token_ids.
    """

    index: int
    _: KW_ONLY
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class CompletionChoice(Choice):
    """One continuation of a prompt; `finish_reason` is "stop" or "length".

    prompt_token_ids: with return_token_ids. prompt_logprobs: with the field of that name.
    """

    text: str
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class Message:
    """A message of a chat; can be given back to `chat` as part of its history."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class ChatChoice(Choice):
    """One answer to a chat; `finish_reason` is "stop", "length" or "tool_calls"."""

    message: Message

    @property
    def text(self) -> str:
        """The message's content; empty if it has none."""
        return self.message.content or ""


ChoiceT = TypeVar("ChoiceT", CompletionChoice, ChatChoice)


@dataclass(frozen=True)
class Answer(Generic[ChoiceT]):
    """What the answers of `complete` and `chat` have in common."""

    id: str
    model: str
    created: int
    choices: tuple[ChoiceT, ...]
    usage: Usage | None = None
    request_id: str | None = None
    _: KW_ONLY
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @overload
    def parse(self) -> Any: ...
    @overload
    def parse(self, kind: Parseable[T]) -> T: ...
    def parse(self, kind: Parseable[T] | None = None) -> T | Any:
        """The text as JSON, or as `kind`, a pydantic model. For errors see parse_text."""
        return parse_text(self.text, self.finish_reason, kind)


@dataclass(frozen=True)
class Completion(Answer[CompletionChoice]):
    """The answer of `complete`. With several prompts, choice `i * n + j` is prompt i's j-th."""


@dataclass(frozen=True)
class ChatCompletion(Answer[ChatChoice]):
    """The answer of `chat`."""

    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def message(self) -> Message:
        """The message of the first choice."""
        return self.choices[0].message

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What the first choice wants called."""
        return self.message.tool_calls


def parse_text(text: str, finish_reason: str | None, kind: Parseable[T] | None) -> T | Any:
    """`text` as JSON or, by its model_validate_json, as `kind`.

    Raises ProtocolError if it is no JSON, which with a response_format only happens where
    max_tokens cut it off; and what `kind` raises for JSON that is not its own.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        cut_off = "; it was cut off, so give a larger max_tokens" if finish_reason == "length" else ""
        raise ProtocolError(f"the answer is no JSON{cut_off}: {text!r:.200}") from error
    return value if kind is None else kind.model_validate_json(text)
