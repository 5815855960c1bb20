"""Whole answers of the server, as frozen values. This file knows nothing of HTTP.

Each value keeps in `raw` the JSON object from which it was made, for fields that have no attribute here. A
value that was put together from a stream has an empty `raw`. Comparisons ignore `raw`. chunks.py has the
pieces of a stream, server_info.py the facts about the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Protocol, TypeVar, overload

from penstock_client.errors import AnswerCutOff, ProtocolError
from penstock_client.exchange import JSONObject, parse_json_object

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Parseable(Protocol[T_co]):
    """A pydantic model, as far as this package needs it."""

    def model_validate_json(self, json_data: str) -> T_co: ...


def raw_field() -> JSONObject:
    """A dataclass field that repr and == leave out."""
    value: JSONObject = field(default_factory=dict, repr=False, compare=False)
    return value


@dataclass(frozen=True)
class Usage:
    """Tokens counted by the server. `cached_tokens` of the prompt were not computed again. Of the guesses of
    the answer's tokens, `accepted_prediction_tokens` were right and `rejected_prediction_tokens` were wrong.
    `reasoning_tokens` of the answer's tokens are what the model thought before it answered.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log probability, and its most probable rivals.

    `logprob` is None for the first token of an echoed prompt.
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


#: For each position of a prompt: log probabilities by token id; None at the first position.
PromptLogprobs = tuple[Mapping[int, PromptLogprob] | None, ...]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model asks for. `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str
    raw: JSONObject = raw_field()

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments by name.

        Raises ProtocolError if the arguments are no JSON object. That may happen if neither
        tool_choice nor `strict` binds the model to the schema.

        >>> ToolCall("call_1", "weather", '{"city": "Oslo"}').parsed_arguments()
        {'city': 'Oslo'}
        """
        return parse_json_object(self.arguments)


@dataclass(frozen=True)
class Choice:
    """The fields of all choices, of completions and chats, whole and in pieces.

    stop_reason: the stop string or token id that ended the choice.
    token_ids: None without return_token_ids.
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

    prompt_token_ids: None without return_token_ids. prompt_logprobs: None without this keyword.
    """

    text: str
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class Message:
    """A message of a chat. `chat` takes it as a part of the conversation so far."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    #: What the model thought before it answered.
    reasoning: str | None = None
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
    """The fields that the answers of `complete` and `chat` have in common."""

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
        """The text as JSON, or as an object of `kind`, a pydantic model. Raises as parse_text() does."""
        return parse_text(self.text, self.finish_reason == "length", kind, self.request_id)


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
        """The calls of the first choice."""
        return self.message.tool_calls


def parse_text(
    text: str, is_cut_off: bool, kind: Parseable[T] | None, request_id: str | None = None
) -> T | Any:
    """`text` as JSON, or as what the model_validate_json of `kind` makes of it.

    is_cut_off: a limit ended the answer. Raises AnswerCutOff if `text` is no JSON for this reason, and
    ProtocolError for other text that is no JSON, which an answer with a response_format never is. Raises also
    what `kind` raises for JSON that does not fit.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_cut_off:
            message = f"a limit cut the answer's JSON off; give a larger max_tokens: {text!r:.200}"
            raise AnswerCutOff(message, text=text, request_id=request_id) from error
        message = f"the answer is no JSON: {text!r:.200}"
        raise ProtocolError(message, request_id=request_id) from error
    return value if kind is None else kind.model_validate_json(text)
