"""The bodies of requests to /v1/completions and /v1/chat/completions.

A field is honoured, or refused by an error that names the field. An unknown field is refused, too. A few
fields are accepted without effect: many clients always send them, and they could not change an answer here:

    user, safety_identifier, metadata, store, service_tier      accounting at OpenAI
    prompt_cache_key, prompt_cache_options, prompt_cache_retention      hints for speed
    prompt_cache_breakpoint (of a content part), cache_prompt, id_slot (llama-server)      the same
    session_id, chat_id      names that Open WebUI and others give to a conversation
    stream_options.include_obfuscation      padding against eavesdroppers; we send none
    cache_control (of messages, their parts and tools)      Anthropic's hint, which some libraries leave in
    messages.*.reasoning_details      OpenRouter's form of what stands in `reasoning` as well
    messages.*.thinking_blocks, images (of an assistant's message)      LiteLLM's, for reasoning and images
    messages.*.annotations, parsed, provider_specific_fields and tool_calls.*.index, function.parsed_arguments
                                            what client libraries leave in the messages that they send back

Some of vLLM's fields are accepted with one value alone, the value that changes nothing: see Only.

`reasoning_effort`, `verbosity` and `chat_template_kwargs` go to the model's chat template; `reasoning_effort`
also sets `enable_thinking` (false for "none"). A field that is null counts as absent, as at OpenAI, also one
that is unknown. Types are strict: "1" is no number.
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

from penstock import MAX_LOGPROBS
from penstock_server.protocol.conversation import Conversation, template_kwargs, tool_offer, wrong_call
from penstock_server.protocol.generation_fields import GenerationFields
from penstock_server.protocol.messages import Message, Prediction, ThinkingField
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
    PositiveCount,
    Text,
    Unsupported,
    invalid,
)

MAX_PROMPTS = 1024
#: Few contexts have room for more messages. Reading 4096 messages takes 10 ms, and 50 ms on /v1/responses; in
#: this time nobody else is served. Without a limit it took up to 20 s.
MAX_MESSAGES = 4096
Verbosity = Literal["low", "medium", "high"]


def _kind_of_prompt(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, list):
        return "string"
    if isinstance(first, list):
        return "token_id_lists"
    return "token_ids" if isinstance(first, int) else "strings"


#: An id below 0 stands for a vector of the request's or of a soft prompt.
PromptToken = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
TokenIds = Annotated[list[PromptToken], Field(min_length=1)]
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
    soft_prompt: str | None = Field(
        None,
        description="The name of a soft prompt that the server has (--soft-prompt NAME=FILE): its "
        "vectors stand in front of each prompt. In a prompt of token ids, -1 stands for its first vector, -2 "
        "for the second, and so on; then no vector is put in front.",
    )
    echo: bool | None = Field(None, description="Put the prompt in front of the answer.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens, such as a BOS token, to a text; true if null."
    )
    suffix: Text | None = Field(
        None, description="The text after the answer; for models that can fill in a blank (see /v1/fill)."
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
        given = "soft_prompt" if self.soft_prompt is not None else "prompt_embeds"
        has_embeds = getattr(self, given) is not None
        if self.soft_prompt is not None and (self.prompt_embeds is not None or not self.prompts):
            raise invalid("soft_prompt", "needs a prompt, and can't go with prompt_embeds")
        if self.soft_prompt is not None and self.suffix:
            raise invalid("suffix", "not supported together with soft_prompt")
        if self.prompt_follows_embeds and (len(self.embeds) != 1 or not self.prompts):
            raise invalid("prompt_follows_embeds", "true needs a prompt, and prompt_embeds of one tensor")
        for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
            if has_embeds and getattr(self, name) not in (None, False):
                raise invalid(name, f"not supported together with {given}, whose vectors are no tokens")
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
    include_reasoning: bool | None = Field(None, description="false: the answer lacks the reasoning.")
    thinking_token_budget: Count | None = Field(
        None, description="The most tokens of the reasoning, which is ended then."
    )
    documents: Unsupported = None
    chat_template: Unsupported = None
    max_thinking_tokens: Count | None = Field(None, description="The same as thinking_token_budget.")
    thinking: ThinkingField | None = Field(
        None, description="Whether to think, and how long, as Anthropic's."
    )
    add_generation_prompt: bool | None = Field(None, description="true if null")
    continue_final_message: bool | None = Field(
        None, description="The answer goes on where the last message ends."
    )
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None
    enable_thinking: bool | None = Field(
        None, description="The same as chat_template_kwargs.enable_thinking; some clients send it so."
    )

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto if null and there are tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    prediction: Prediction | None = None

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
            template_kwargs(
                self.reasoning_effort,
                self.verbosity,
                self._own_template_kwargs,
                self.thinking.is_enabled if self.thinking else None,
            ),
            not goes_on if self.add_generation_prompt is None else self.add_generation_prompt,
            goes_on,
            self._thinking_budget,
            self.include_reasoning is not False,
        )

    @property
    def _thinking_budget(self) -> int | None:
        """The most tokens of the thinking; None: no limit."""
        own = self.thinking.budget if self.thinking else None
        given = (self.thinking_token_budget, self.max_thinking_tokens, own)
        found = [each for each in given if each is not None]
        if self.reasoning_effort == "none":
            found.append(0)
        return min(found, default=None)

    @property
    def _own_template_kwargs(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return thinking | (self.chat_template_kwargs or {})

    @property
    def answer_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return super().answer_tokens

    @classmethod
    def of(cls, conversation: Conversation, **fields: Any) -> ChatCompletionRequest:
        """The request of another API with this conversation. `fields` are checked already."""
        return cls.model_construct(messages=[], **fields).with_conversation(conversation)

    def with_conversation(self, conversation: Conversation) -> ChatCompletionRequest:
        """The request with this conversation, whatever its messages are."""
        body = self.model_copy()
        body.__dict__["as_conversation"] = conversation  # in place of what the messages would make
        return body

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens at each position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
