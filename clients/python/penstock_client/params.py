"""The keywords of `complete`, `chat` and `fill`. A new keyword is added here only.

A keyword that is None or absent is not sent: the server's default holds. The defaults for sampling are
usually those that the model's authors recommend. Names are OpenAI's, or vLLM's if OpenAI's API has no such
keyword.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from penstock_client.schemas import Schema


class StructuredOutputs(TypedDict, total=False):
    """What an answer must be: exactly one of the first five keys."""

    #: The answer follows this JSON Schema, which may also be a text.
    json: Schema | str
    #: The answer matches this expression, in Rust's syntax.
    regex: str
    #: The answer is one of these texts.
    choice: Sequence[str]
    #: The answer follows this grammar, in llguidance's Lark or in GBNF.
    grammar: str
    json_object: bool
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str


class CommonParams(TypedDict, total=False):
    """The keywords of all methods that generate."""

    #: Name of a model of the server. Default: the server's only model.
    model: str | None
    #: The most tokens to generate. The server's default is 16 for completions; for chats it is the
    #: room in the context.
    max_tokens: int | None
    #: 0 always takes the most probable token; higher values give more varied answers.
    temperature: float | None
    #: Sample among the most probable tokens that sum up to this probability, in (0, 1].
    top_p: float | None
    #: Sample among this many most probable tokens; 0 or -1: among all.
    top_k: int | None
    #: Leave out tokens less probable than this share of the most probable token's probability, in [0, 1].
    min_p: float | None
    #: A value above 1 discourages tokens that occurred in prompt or answer.
    repetition_penalty: float | None
    #: No sequence of this many tokens occurs twice in prompt and answer together; 0 turns this off.
    no_repeat_ngram_size: int | None
    #: Subtracted from the logit of each token that occurred in the answer, -2 to 2.
    presence_penalty: float | None
    #: Subtracted from a token's logit for each time that it occurred in the answer, -2 to 2.
    frequency_penalty: float | None
    #: Token id -> number that is added to the token's logit, -100 to 100.
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    #: The same seed with the same parameters gives the same text.
    seed: int | None
    #: The answer ends before the first of these strings.
    stop: str | Sequence[str] | None
    #: The answer ends with the first of these tokens.
    stop_token_ids: Sequence[int] | None
    #: The answer keeps the stop string that ended it.
    include_stop_str_in_output: bool | None
    #: The answer does not end before this many tokens.
    min_tokens: int | None
    #: Sample among these tokens only.
    allowed_token_ids: Sequence[int] | None
    #: Texts that the answer must not hold.
    bad_words: Sequence[str] | None
    #: Search for the best answers with beams; they come at the end, best first, also in a stream. `fill` has
    #: one answer, the best.
    use_beam_search: bool | None
    #: The number of beams; by default as many as answers.
    best_of: int | None
    #: Of a beam search: above 0, long answers are favoured; 1 by default.
    length_penalty: float | None
    #: Of a beam search: True ends the search with as many whole answers as beams; "never" goes on while a
    #: better answer is possible.
    early_stopping: bool | Literal["never"] | None
    #: False: no guesses of the answer's tokens are computed ahead. The answer is the same.
    speculation: bool | None
    #: Requests with a lower priority run earlier; 0 if absent.
    priority: int | None
    #: Only requests with the same salt share keys and values of their common beginnings.
    cache_salt: str | None
    #: A part of the answer's id.
    request_id: str | None
    #: A name of the user; without effect at Penstock.
    user: str | None
    #: Longest silence of the server for this request, in seconds, in place of the client's limit;
    #: math.inf waits for ever. Not sent.
    timeout: float | None
    #: Further fields of the request, sent as they are. A field that is also a keyword is a ValueError.
    extra: Mapping[str, Any] | None


class SamplingParams(CommonParams, total=False):
    """The keywords that completions and chats have in common."""

    #: The answer does not end at the model's own end of text.
    ignore_eos: bool | None
    #: False shows special tokens in the text.
    skip_special_tokens: bool | None
    #: The number of answers; each answer is a choice of the result.
    n: int | None
    #: A schema (a dict or a pydantic model) that the answer must follow, or one of OpenAI's
    #: formats, such as {"type": "json_object"}. See `parse` of the result.
    response_format: Schema | None
    #: A schema, a regex, a choice of texts or a grammar for the answer. Not together with
    #: response_format.
    structured_outputs: StructuredOutputs | None
    #: Log probabilities of the prompt, with this many likeliest tokens at each position. Not in
    #: streams.
    prompt_logprobs: int | None
    #: Keep only this many tokens at the prompt's end; -1: as many as there is room for.
    truncate_prompt_tokens: int | None
    #: Return the ids of the prompt's and the answer's tokens.
    return_token_ids: bool | None
    #: Log probabilities name tokens by their ids, as "token_id:7".
    return_tokens_as_token_ids: bool | None


class FillParams(CommonParams, total=False):
    """Keywords of `fill` and `stream_fill`. The server's default of max_tokens is 128 here, for all blanks
    together."""

    #: What a blank looks like in the text, in place of <span> and ____.
    blank: str | None
    #: The most tokens of each blank.
    max_tokens_per_blank: int | None


class CompletionParams(SamplingParams, total=False):
    """Keywords of `complete` and `stream_complete`."""

    #: Return the log probability of each token, and those of this many most probable rivals.
    logprobs: int | None
    #: Return the prompt in front of the answer.
    echo: bool | None
    #: False: no special tokens, such as a BOS token, are added to the prompt.
    add_special_tokens: bool | None
    #: Base64 of a file of safetensors or of torch.save with vectors [tokens, hidden size], which are a prompt
    #: of their own.
    prompt_embeds: str | Sequence[str] | None
    #: True: the vectors stand in front of the prompt (a soft prompt).
    prompt_follows_embeds: bool | None
    #: The name of a soft prompt that the server was started with. It stands in front of the prompt, or where
    #: token ids of the prompt are below 0.
    soft_prompt: str | None
    #: The text behind the answer, for models that can fill in a blank; see `fill`.
    suffix: str | None


class ChatParams(SamplingParams, total=False):
    """Keywords of `chat` and `stream_chat`."""

    #: Return each token's log probability.
    logprobs: bool | None
    #: Return also the log probabilities of this many most probable rivals, 0 to 20. Needs `logprobs`.
    top_logprobs: int | None
    #: A text that the answer may resemble, {"type": "content", "content": TEXT}: the answer comes faster
    #: where it follows the text, and is the same.
    prediction: Mapping[str, Any] | None
    #: The same as max_tokens, which it replaces.
    max_completion_tokens: int | None
    #: The functions that the model may call; see function_tool.
    tools: Sequence[Mapping[str, Any]] | None
    #: "auto" lets the model decide, "required" makes it call, "none" forbids calls, and
    #: {"type": "function", "function": {"name": ...}} names the function that it must call.
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    #: False: the answer has at most one call.
    parallel_tool_calls: bool | None
    #: False: the prompt ends with the last message, without a header for the answer.
    add_generation_prompt: bool | None
    #: The answer goes on where the last message ends.
    continue_final_message: bool | None
    #: Variables for the model's chat template.
    chat_template_kwargs: Mapping[str, str | bool | int | float] | None
    #: The variable reasoning_effort of the chat template, such as "low"; "none" ends the reasoning at once.
    reasoning_effort: str | None
    #: The most tokens of the reasoning, which the server ends then.
    thinking_token_budget: int | None
    #: False: the answer lacks the reasoning.
    include_reasoning: bool | None


class ResponseParams(TypedDict, total=False):
    """Keywords of `respond` and `stream_respond`. Those that ChatParams also has mean the same."""

    model: str | None
    #: A system message in front of the input.
    instructions: str | None
    #: The most tokens of the answer; by default the room in the context.
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Schema | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    #: "auto" leaves out the oldest turns if the context has no room for all.
    truncation: Literal["auto", "disabled"] | None
    chat_template_kwargs: Mapping[str, str | bool | int | float] | None
    metadata: Mapping[str, str] | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None
    user: str | None
    timeout: float | None
    extra: Mapping[str, Any] | None


class PooledParams(TypedDict, total=False):
    """The keywords that `embed`, `score` and `rerank` have in common."""

    model: str | None
    #: Keep only this many tokens of each text (of a pair: of both together); -1: as many as the model takes.
    #: Without it, a text that is too long is a ContextOverflow.
    truncate_prompt_tokens: int | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None
    user: str | None
    timeout: float | None
    extra: Mapping[str, Any] | None


class EmbedParams(PooledParams, total=False):
    """Keywords of `embed`."""

    #: Numbers of each vector, if the model can make fewer than all.
    dimensions: int | None
    #: The name of a text of the model's own that stands in front of each text, such as "query".
    prompt_name: str | None
    #: Whether vectors have length 1; by default as the model's files say.
    normalize: bool | None
    add_special_tokens: bool | None


class ScoreParams(PooledParams, total=False):
    """Keywords of `score`."""

    #: What fits means, for models that are told so (Qwen3-Reranker).
    instruction: str | None


class RerankParams(ScoreParams, total=False):
    """Keywords of `rerank`."""

    #: Return only the best so many documents.
    top_n: int | None
    #: False: the answer has no texts.
    return_documents: bool | None
    #: Leave out the end of a document behind so many tokens.
    max_tokens_per_doc: int | None


class TokenizeParams(TypedDict, total=False):
    """Keywords of `tokenize`."""

    model: str | None
    #: For a text: add special tokens, such as a BOS token; true by default. Not for messages.
    add_special_tokens: bool | None
    #: Return also the vocabulary's spelling of each token.
    return_token_strs: bool | None
    #: For messages: see ChatParams.
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, str | bool | int | float] | None
    timeout: float | None
    extra: Mapping[str, Any] | None


def check_keywords(method: str, params: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise a TypeError like Python's for a keyword that is not among `known`.

    >>> check_keywords("chat", {"temprature": 1}, frozenset({"temperature"}))
    Traceback (most recent call last):
    TypeError: chat() got an unexpected keyword argument 'temprature'. Did you mean 'temperature'?
    """
    for name in params.keys() - known:
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f". Did you mean {similar[0]!r}?" if similar else "; unmodelled fields go in extra="
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
