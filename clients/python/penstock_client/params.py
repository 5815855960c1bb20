"""The keywords of `complete` and `chat`, each once. Whoever adds one adds it here only.

A keyword that is None or absent is not sent: the server's default holds, which for sampling is
usually what the model's authors recommend. Names are OpenAI's, and vLLM's for what OpenAI's API
does not have.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from penstock_client.schemas import Schema


class StructuredOutputs(TypedDict, total=False):
    """What an answer must be: exactly one of the first five."""

    #: Follow this schema; also as text.
    json: Schema | str
    #: Match this expression, in Rust's syntax.
    regex: str
    #: Be one of these.
    choice: Sequence[str]
    #: Derive from this grammar, in llguidance's Lark or in GBNF.
    grammar: str
    json_object: bool
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str


class SamplingParams(TypedDict, total=False):
    """What completions and chats have in common."""

    #: Name of a model of the server. Default: the server's only one.
    model: str | None
    #: Most tokens to generate. The server's default is 16 for completions and, for chats, what
    #: the context has room for.
    max_tokens: int | None
    #: 0 always takes the most probable token; more is more varied.
    temperature: float | None
    #: Sample among the most probable tokens that make up this probability, in (0, 1].
    top_p: float | None
    #: Sample among this many most probable tokens; 0 or -1 for all.
    top_k: int | None
    #: Leave out tokens less probable than this share of the most probable one's, in [0, 1].
    min_p: float | None
    #: More than 1 discourages tokens that occurred in prompt or answer.
    repetition_penalty: float | None
    #: Subtracted from the logit of each token that occurred in the answer, -2 to 2.
    presence_penalty: float | None
    #: Subtracted from a token's logit for each time that it occurred in the answer, -2 to 2.
    frequency_penalty: float | None
    #: Token id -> what is added to its logit, -100 to 100.
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    #: The same seed with the same parameters gives the same text.
    seed: int | None
    #: The answer ends before the first of these strings.
    stop: str | Sequence[str] | None
    #: The answer ends with the first of these tokens.
    stop_token_ids: Sequence[int] | None
    #: Do not cut the stop string off.
    include_stop_str_in_output: bool | None
    #: Not to end before so many tokens.
    min_tokens: int | None
    #: Not to end at the model's own end of text.
    ignore_eos: bool | None
    #: Sample among these tokens only.
    allowed_token_ids: Sequence[int] | None
    #: Texts that the answer must not hold.
    bad_words: Sequence[str] | None
    #: False shows special tokens in the text.
    skip_special_tokens: bool | None
    #: How many answers to give; each is a choice of the result.
    n: int | None
    #: A schema (a dict or a pydantic model) that the answer must follow, or one of OpenAI's
    #: formats, such as {"type": "json_object"}. See `parse` of the result.
    response_format: Schema | None
    #: The same and more: a regex, a choice of texts, a grammar. Not beside response_format.
    structured_outputs: StructuredOutputs | None
    #: Lower runs earlier; 0 if absent.
    priority: int | None
    #: Only requests with the same one share what was computed for their common beginnings.
    cache_salt: str | None
    #: Log probabilities of the prompt, with so many of the likeliest tokens at each position.
    #: Not in streams.
    prompt_logprobs: int | None
    #: Keep only so many tokens at the prompt's end; -1: as many as there is room for.
    truncate_prompt_tokens: int | None
    #: Tell the ids of the prompt's and the answer's tokens.
    return_token_ids: bool | None
    #: Names in log probabilities are like "token_id:7".
    return_tokens_as_token_ids: bool | None
    #: Part of the answer's id.
    request_id: str | None
    #: Who asks; without effect at Penstock.
    user: str | None
    #: Not sent: longest silence of the server for this request, in seconds, in place of the
    #: client's; math.inf waits for ever.
    timeout: float | None
    #: Any further fields of the request, sent as they are. Repeating a field is a ValueError.
    extra: Mapping[str, Any] | None


class CompletionParams(SamplingParams, total=False):
    """Keywords of `complete` and `stream_complete`."""

    #: Return each token's log probability, and those of this many most probable rivals.
    logprobs: int | None
    #: Return the prompt in front of the answer.
    echo: bool | None
    #: False: the prompt is all there is, without such as a BOS token.
    add_special_tokens: bool | None


class ChatParams(SamplingParams, total=False):
    """Keywords of `chat` and `stream_chat`."""

    #: Return each token's log probability.
    logprobs: bool | None
    #: With `logprobs`: also those of this many most probable rivals, 0 to 20.
    top_logprobs: int | None
    #: Wins over max_tokens.
    max_completion_tokens: int | None
    #: What the model may call; see function_tool.
    tools: Sequence[Mapping[str, Any]] | None
    #: "auto" lets the model decide, "required" makes it call, "none" forbids it, and
    #: {"type": "function", "function": {"name": ...}} names what it must call.
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    #: False: one call at most.
    parallel_tool_calls: bool | None
    #: False: the prompt ends with the last message, without a header for the answer.
    add_generation_prompt: bool | None
    #: The answer goes on where the last message ends.
    continue_final_message: bool | None
    #: Variables for the model's chat template.
    chat_template_kwargs: Mapping[str, str | bool | int | float] | None
    #: The same for templates that know it, such as "low".
    reasoning_effort: str | None


class TokenizeParams(TypedDict, total=False):
    """Keywords of `tokenize`."""

    model: str | None
    #: For a text: with such as a BOS token, as by default; not for messages.
    add_special_tokens: bool | None
    #: Also tell how the vocabulary spells each token.
    return_token_strs: bool | None
    #: For messages: as in ChatParams.
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, str | bool | int | float] | None
    timeout: float | None
    extra: Mapping[str, Any] | None


def check_keywords(method: str, params: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise, for a keyword that is not `known`, the TypeError that Python would raise.

    >>> check_keywords("chat", {"temprature": 1}, frozenset({"temperature"}))
    Traceback (most recent call last):
    TypeError: chat() got an unexpected keyword argument 'temprature'. Did you mean 'temperature'?
    """
    for name in params.keys() - known:
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f". Did you mean {similar[0]!r}?" if similar else "; unmodelled fields go in extra="
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
