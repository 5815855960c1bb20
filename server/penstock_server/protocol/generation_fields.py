"""Fields that several routes have: how to choose tokens and when to stop, and what /v1/completions and
/v1/chat/completions share. requests.py has the rules. Some fields also have the names that other servers
give them; errors name Penstock's field then."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from penstock import MAX_LOGPROBS, BeamParams
from penstock_server.protocol.output_formats import (
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from penstock_server.protocol.wire import (
    MAX_INT,
    Count,
    OnlyOne,
    OnlyTrue,
    OnlyZero,
    Text,
    Wire,
    invalid,
    kind_of_text,
)

#: The most answers to one prompt, as at OpenAI.
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
#: The sampler goes through all entries of logit_bias for each token: 0.1 ms for 1024 entries, 50 ms for a
#: whole vocabulary. For a bias on most of a vocabulary there is allowed_token_ids.
MAX_BIASES = 1024
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
CacheSalt = Annotated[Text, Field(min_length=1, max_length=1024)]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/+=-]{1,128}$")]


class StreamOptions(Wire):
    #: The stream ends with a chunk without choices that has the usage of the whole request.
    include_usage: bool | None = None
    #: Every chunk has the usage of its choice so far (vLLM's field).
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


StopStrings = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS), Tag("list")],
    Discriminator(kind_of_text),
]


#: llama-server's names.
_NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}

#: The names that vLLM replaced by members of structured_outputs in 0.12.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
#: The choice among libraries that compute grammars. Penstock has one.
_BACKEND = "guided_decoding_backend"


def _translated(body: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """`body` with foreign names replaced by the names among `known`, the fields of the request. A field that
    has both names keeps Penstock's."""
    fields = dict(body)
    for foreign, own in _NAMES.items():
        if own in known and foreign in fields:
            value = fields.pop(foreign)
            if fields.get(own) is None:
                fields[own] = value
    if "structured_outputs" in known:
        _translate_guided(fields)
    return fields


def _translate_guided(fields: dict[str, Any]) -> None:
    """Makes `structured_outputs` of the guided fields. guidance sends both, for old and new vLLMs: then they
    must say the same. Raises invalid()."""
    fields.pop(_BACKEND, None)
    for name in [name for name in _GUIDED if fields.get(name, "") is None]:
        del fields[name]
    guided = {_GUIDED[name]: fields[name] for name in _GUIDED if name in fields}
    if (given := fields.get("structured_outputs")) is None and guided:
        fields["structured_outputs"] = guided
    for name in _GUIDED:
        if name in fields and isinstance(given, dict) and given.get(_GUIDED[name]) != fields[name]:
            reason = f"says something else than structured_outputs.{_GUIDED[name]}; send one of the two"
            raise invalid(name, reason)
        fields.pop(name, None)


class SamplingFields(Wire):
    """The fields that say how to choose or search for tokens and when to stop. None: the model's own default
    holds."""

    stop: StopStrings | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = Field(
        None, description="Token id -> -100 to 100."
    )

    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Count | None = Field(
        None, description="transformers' own: no sequence of so many tokens occurs twice; 0 is off."
    )
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[Count], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="Texts that the answer must not hold."
    )
    spaces_between_special_tokens: OnlyTrue = None

    # llama-server's samplers that Penstock does not have, with the values that turn them off
    typical_p: OnlyOne = None
    tfs_z: OnlyOne = None
    mirostat: OnlyZero = None
    dynatemp_range: OnlyZero = None
    xtc_probability: OnlyZero = None
    dry_multiplier: OnlyZero = None

    speculation: bool | None = Field(
        None, description="Penstock's own. false: no guesses of the answer's tokens are computed ahead."
    )

    use_beam_search: bool | None = Field(
        None,
        description="Search for the n best answers with best_of beams; they come at the end. A route without "
        "n gives the best answer.",
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="The number of beams; n if null. Without use_beam_search, only n is accepted."
    )
    length_penalty: float | None = Field(
        None, description="An answer's score is its log-probability / length ** length_penalty; 1 if null."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="When a search ends, as in transformers; false if null."
    )

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, body: Any) -> Any:
        """Fields by the names that other servers give them."""
        return _translated(body, cls.model_fields) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _check_beams(self) -> SamplingFields:
        if self.use_beam_search:
            if self.best_of is not None and self.best_of < self.num_choices:
                raise invalid("best_of", f"must be at least n, which is {self.num_choices}")
            return self
        neutral = {"best_of": self.num_choices, "length_penalty": 1, "early_stopping": False}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                only = str(value).lower()
                raise invalid(
                    name,
                    f"only a beam search uses {name}: send use_beam_search: true as well, or leave {name} "
                    f"out. Without a beam search, {name} may only be {only}, which changes nothing",
                )
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1

    @property
    def beams(self) -> BeamParams | None:
        """How to search for the answers; None: they are not searched for. Raises InvalidParameter."""
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        num_beams = self.best_of or self.num_choices
        return BeamParams(num_beams, self.num_choices, penalty, self.early_stopping or False)


class GenerationFields(SamplingFields):
    """The fields that /v1/completions and /v1/chat/completions have."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(
        None, description="-1: until the context is full, as at llama-server."
    )
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[ResponseFormat, Field(discriminator="type")] | None = Field(
        None, description="What the answer must be; see also structured_outputs."
    )

    # vLLM's extensions
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens, with N likeliest tokens at each position.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(
        None, description="Keep the last N tokens of the prompt; -1: as many as there is room for."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens in log-probabilities by their ids, as token_id:7."
    )
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = Field(
        None, description="Only prompts with the same salt share computed keys and values."
    )

    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side that truncate_prompt_tokens cuts off; right keeps the first N tokens."
    )
    structured_outputs: StructuredOutputs | None = None

    # llama-server's names for two members of structured_outputs
    grammar: Text | None = Field(None, description="The same as structured_outputs.grammar.")
    json_schema: dict[str, Any] | None = Field(None, description="The same as structured_outputs.json.")

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    session_id: str | None = None
    chat_id: str | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if self.wants_continuous_usage and not self.wants_usage_chunk:
            raise invalid("stream_options.continuous_usage_stats", "only allowed with include_usage")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "not available when stream is true")
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "at least one token of the prompt must be kept")
        return self

    @model_validator(mode="after")
    def _check_one_grammar(self) -> GenerationFields:
        form = None if isinstance(self.response_format, TextFormat) else self.response_format
        demands = {
            "response_format": form,
            "structured_outputs": self.structured_outputs,
            "grammar": self.grammar,
            "json_schema": self.json_schema,
        }
        first, *others = [name for name, value in demands.items() if value is not None] or [""]
        if others:
            raise invalid(others[0], f"not allowed together with {first}; send one of the two")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of an answer; None if the request sets no limit, or -1."""
        return None if self.max_tokens == -1 else self.max_tokens
