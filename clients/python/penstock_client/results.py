"""What the server answers, as frozen values. Knows nothing of JSON or HTTP.

Each value keeps in `raw` the JSON object that it was made from, for fields that have no
attribute here. `raw` takes no part in comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_client.exchange import JSONObject


def _raw() -> JSONObject:
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
    raw: JSONObject = _raw()


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log probability, and its most probable rivals.

    `logprob` is None for the first token of an echoed prompt, which nothing precedes.
    """

    token: str
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class CompletionChoice:
    """One continuation of a prompt; `finish_reason` is "stop" or "length"."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    raw: JSONObject = _raw()


@dataclass(frozen=True)
class Completion:
    """The answer of `complete`. With several prompts, choice `i * n + j` is prompt i's j-th."""

    id: str
    model: str
    created: int
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
    request_id: str | None = None
    raw: JSONObject = _raw()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True)
class Message:
    """A message of a chat; can be given back to `chat` as part of its history."""

    role: str
    content: str | None
    raw: JSONObject = _raw()


@dataclass(frozen=True)
class ChatChoice:
    """One answer to a chat; `finish_reason` is "stop", "length" or "tool_calls"."""

    index: int
    message: Message
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    raw: JSONObject = _raw()

    @property
    def text(self) -> str:
        """The message's content; empty if it has none."""
        return self.message.content or ""


@dataclass(frozen=True)
class ChatCompletion:
    """The answer of `chat`."""

    id: str
    model: str
    created: int
    choices: tuple[ChatChoice, ...]
    usage: Usage | None = None
    request_id: str | None = None
    raw: JSONObject = _raw()

    @property
    def message(self) -> Message:
        """The message of the first choice."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True)
class CompletionChunk:
    """A piece of a streamed completion; each choice's `text` is what is new."""

    id: str
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
    raw: JSONObject = _raw()

    @property
    def text(self) -> str:
        """What is new in choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True)
class Delta:
    """What is new in a message; `role` comes with a choice's first chunk."""

    role: str | None = None
    content: str | None = None
    raw: JSONObject = _raw()


@dataclass(frozen=True)
class ChatChunkChoice:
    """What is new in one choice of a streamed chat."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    raw: JSONObject = _raw()

    @property
    def text(self) -> str:
        """The delta's content; empty if it has none."""
        return self.delta.content or ""


@dataclass(frozen=True)
class ChatCompletionChunk:
    """A piece of a streamed chat."""

    id: str
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None
    raw: JSONObject = _raw()

    @property
    def text(self) -> str:
        """What is new in choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True)
class Model:
    """A name under which the server offers a model. Names with the same root are one model.

    max_model_len: its longest prompt plus answer, in tokens; None while it loads.
    """

    id: str
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None
    raw: JSONObject = _raw()


@dataclass(frozen=True)
class Health:
    """Whether the server can answer now, and if it still loads, how far it is.

    status: "ok", or the server's word for its state, such as "loading"; "unavailable" if it
    has none. progress: the share of the model that is loaded, 0.0 to 1.0; None if unknown.
    """

    status: str
    is_ready: bool
    progress: float | None = None
    message: str | None = None
    raw: JSONObject = _raw()
