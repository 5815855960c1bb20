"""The bodies of requests to /v1/completions and /v1/chat/completions.

A field is honoured, or refused by an error that names the field. An unknown field is refused, too. A few
fields are accepted without effect: many clients always send them, and they could not change an answer here:

    user, safety_identifier, metadata, store, service_tier      accounting at OpenAI
    prompt_cache_key, prompt_cache_options, prompt_cache_retention, prediction      hints for speed
    prompt_cache_breakpoint (of a content part), cache_prompt, id_slot (llama-server)      the same
    session_id, chat_id      names that Open WebUI and others give to a conversation
    stream_options.include_obfuscation      padding against eavesdroppers; we send none
    messages.*.provider_specific_fields and tool_calls.*.index, function.parsed_arguments      what client
                                            libraries leave in the messages that they send back

Some of vLLM's fields are accepted with one value alone, the value that changes nothing: see Only.

`reasoning_effort`, `verbosity` and `chat_template_kwargs` go to the model's chat template; `reasoning_effort`
also sets `enable_thinking` (false for "none"). A field that is null counts as absent, as at OpenAI. Types are
strict: "1" is no number.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from penstock import MAX_LOGPROBS, BeamParams
from penstock_server.protocol.conversation import Conversation, template_kwargs, wrong_call
from penstock_server.protocol.messages import Message
from penstock_server.protocol.output_formats import (
    Guided,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from penstock_server.protocol.tool_offers import tool_offer
from penstock_server.protocol.tools import (
    MAX_TOOLS,
    Deprecated,
    Tool,
    ToolChoice,
)
from penstock_server.protocol.wire import (
    MAX_INT,
    Count,
    OnlyFalse,
    OnlyTrue,
    PositiveCount,
    Text,
    Unsupported,
    Wire,
    invalid,
    kind_of_text,
)

#: The most answers to one prompt, as at OpenAI.
MAX_N = 128
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
#: The sampler goes through all entries of logit_bias for each token: 0.1 ms for 1024 entries, 50 ms for a
#: whole vocabulary. For a bias on most of a vocabulary there is allowed_token_ids.
MAX_BIASES = 1024
#: Few contexts have room for more messages. Reading 4096 messages takes 10 ms, and 50 ms on /v1/responses; in
#: this time nobody else is served. Without a limit it took up to 20 s.
MAX_MESSAGES = 4096
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Verbosity = Literal["low", "medium", "high"]
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


class SamplingFields(Wire):
    """The fields that say how to choose tokens and when to stop. None: the model's own default holds."""

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
        return None


class GenerationFields(SamplingFields):
    """The fields that both routes have."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    max_tokens: Count | None = None
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

    use_beam_search: bool | None = Field(
        None, description="Search for the n best answers with best_of beams; they come at the end."
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="The number of beams; n if null. Without use_beam_search it must equal n."
    )
    length_penalty: float | None = Field(
        None, description="An answer's score is its log-probability / length ** length_penalty; 1 if null."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="When a search ends, as in transformers; false if null."
    )

    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side that truncate_prompt_tokens cuts off; right keeps the first N tokens."
    )
    structured_outputs: StructuredOutputs | None = None

    # llama-server's names for two members of structured_outputs
    grammar: Text | None = Field(None, description="The same as structured_outputs.grammar.")
    json_schema: dict[str, Any] | None = Field(None, description="The same as structured_outputs.json.")

    # vLLM's former names
    guided_json: Guided = None
    guided_regex: Guided = None
    guided_choice: Guided = None
    guided_grammar: Guided = None
    guided_decoding_backend: Guided = None
    guided_whitespace_pattern: Guided = None

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
    def _check_beams(self) -> GenerationFields:
        if self.use_beam_search:
            if self.best_of is not None and self.best_of < self.num_choices:
                raise invalid("best_of", f"must be at least n, which is {self.num_choices}")
            return self
        neutral = {"best_of": self.num_choices, "length_penalty": 1, "early_stopping": False}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                raise invalid(name, f"without use_beam_search only {str(value).lower()} is allowed")
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
    def beams(self) -> BeamParams | None:
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        num_beams = self.best_of or self.num_choices
        return BeamParams(num_beams, self.num_choices, penalty, self.early_stopping or False)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of an answer; None if the request sets no limit."""
        return self.max_tokens


def _kind_of_prompt(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, list):
        return "string"
    if isinstance(first, list):
        return "token_id_lists"
    return "token_ids" if isinstance(first, int) else "strings"


TokenIds = Annotated[list[Count], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("strings")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("token_id_lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(
        description="Text or token ids; a list of either is several prompts. Beside prompt_embeds, it "
        "may be empty, null or left out.",
    )
    prompt_embeds: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = Field(
        None,
        description="Base64 of a file of safetensors or of torch.save that holds one tensor [tokens, hidden "
        "size]; a list is several prompts. They come before those of `prompt`, as in vLLM.",
    )
    prompt_follows_embeds: bool | None = Field(
        None,
        description="true: each prompt of `prompt` has the vectors of prompt_embeds in front (a soft "
        "prompt). Otherwise these are prompts of their own.",
    )
    echo: bool | None = Field(None, description="Put the prompt in front of the answer.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens, such as a BOS token, to a text; true if null."
    )
    suffix: Text | None = Field(
        None, description="The text behind the answer; for models that can fill in a blank (see /v1/fill)."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_prompt_in(cls, body: Any) -> Any:
        """Beside prompt_embeds, there may be no prompt."""
        if isinstance(body, dict) and body.get("prompt_embeds") is not None and body.get("prompt") is None:
            return body | {"prompt": ""}
        return body

    @model_validator(mode="after")
    def _check_embeds(self) -> CompletionRequest:
        has_embeds = self.prompt_embeds is not None
        if self.prompt_follows_embeds and (len(self.embeds) != 1 or not self.prompts):
            raise invalid("prompt_follows_embeds", "true needs a prompt, and prompt_embeds of one tensor")
        for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
            if has_embeds and getattr(self, name) not in (None, False):
                raise invalid(name, "not supported together with prompt_embeds, which are no tokens")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.suffix and (self.echo or self.prompt_logprobs is not None or self.truncate_prompt_tokens):
            message = "not allowed with echo, prompt_logprobs or truncate_prompt_tokens"
            raise invalid("suffix", message)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens", "0 asks for no answer; only allowed with echo or prompt_logprobs")
        return self

    @property
    def embeds(self) -> list[str]:
        """prompt_embeds as a list."""
        if self.prompt_embeds is None:
            return []
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) + (0 if self.prompt_follows_embeds else len(self.embeds))

    @property
    def num_prompt_chars(self) -> int:
        """Characters of the longest prompt that is text, with the suffix."""
        texts = (len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        return max(texts, default=0) + len(self.suffix or "")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; a single prompt is a list of one. An empty text beside prompt_embeds is no
        prompt: clients that demand a prompt send one."""
        if self.prompt_embeds is not None and not self.prompt:
            return []
        match _kind_of_prompt(self.prompt):
            case "string" | "token_ids":
                return [self.prompt]  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]


class ChatCompletionRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: PositiveCount | None = Field(
        None, description="Wins over max_tokens. If both are null: until the context is full."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity | None = Field(None, description="For the model's chat template.")
    reasoning_effort: Text | None = Field(None, description="For the model's chat template.")

    # vLLM's extensions
    add_special_tokens: OnlyFalse = None
    echo: OnlyFalse = None
    include_reasoning: OnlyTrue = None
    documents: Unsupported = None
    chat_template: Unsupported = None
    add_generation_prompt: bool | None = Field(None, description="true if null")
    continue_final_message: bool | None = Field(
        None, description="The answer goes on where the last message ends."
    )
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto if null and there are tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    # not supported
    functions: Deprecated = None
    function_call: Deprecated = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None

    # accepted without effect
    safety_identifier: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "contradicts add_generation_prompt")
        if self.answer_tokens == 0 and self.prompt_logprobs is None:
            raise invalid("max_tokens", "0 asks for no answer; only allowed with prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        self.as_conversation.tools.check()
        return self

    @model_validator(mode="after")
    def _check_tool_messages(self) -> ChatCompletionRequest:
        """Raises invalid() for a tool's message without an earlier call, as OpenAI does."""
        wrong = wrong_call(self.as_conversation.turns)
        if wrong is None:
            return self
        if wrong.is_result:
            message = f"no earlier message has a call {wrong.call_id!r} in its tool_calls"
            raise invalid(f"messages.{wrong.turn}.tool_call_id", message)
        raise invalid(f"messages.{wrong.turn}.tool_calls", "two calls have the same id")

    @cached_property
    def as_conversation(self) -> Conversation:
        goes_on = bool(self.continue_final_message)
        return Conversation(
            tuple(message.turn for message in self.messages),
            tool_offer(self.tools, self.tool_choice, self.parallel_tool_calls),
            template_kwargs(self.reasoning_effort, self.verbosity, self.chat_template_kwargs),
            not goes_on if self.add_generation_prompt is None else self.add_generation_prompt,
            goes_on,
        )

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens at each position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
