"""From a request to the engine's terms: token ids and SamplingParams."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock import FormedPrompt, Grammar, SamplingParams, render_chat, without_draws
from penstock.errors import ContextOverflow, InvalidParameter
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.system_turns import Probe, write_placed
from penstock_server.prompts.vectors import find_soft_prompt, read_embeds
from penstock_server.protocol.conversation import Call, Conversation, Turn
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.generation_fields import GenerationFields, SamplingFields
from penstock_server.protocol.requests import CompletionRequest
from penstock_server.settings.chat_rules import ChatRules
from penstock_server.tools.prompting import ToolPrompt
from penstock_server.tools.templates import render_described

if TYPE_CHECKING:
    from penstock import PromptEmbeds

#: Request fields that have the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "speculation",
)

#: Names that chat_template_kwargs can't set: the request has other fields for them, or they are arguments of
#: the rendering function and no variables of the template.
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "tokenizer",
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "check_length",
        "check_text",
        "allow_special_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
        "kwargs",
    }
)


#: Characters that take about a second to tokenize.
MOST_CHARS = 1 << 20
#: A text that is not longer is tokenized as a whole, before anybody asks whether it fits.
_LEAST_LOOK = 1 << 16
#: The most characters of all bad_words, and of all stop strings. They are short phrases: a thousand of them
#: have 64 characters each.
MAX_PHRASE_CHARS = 1 << 16
#: A text that will be truncated may have so many times the characters that the context has room for.
TRUNCATED_TIMES = 4


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    #: The prompt as the client wrote it, or its truncated rest; for echo.
    text: str = ""
    #: What stands in front of the tokens, or where the ids are below 0.
    embeds: PromptEmbeds | None = None
    #: What the model's own form demands of the answer. None: nothing.
    form: FormedPrompt | None = None

    @property
    def num_tokens(self) -> int:
        in_front = self.embeds.num_in_front(self.token_ids) if self.embeds is not None else 0
        return in_front + len(self.token_ids)


def read_prompts(model: ServedModel, body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion. Token ids stay as they are: the engine refuses ids beyond the
    vocabulary. Raises InvalidParameter for prompt_embeds that can't be read, and for a soft prompt that the
    server does not have."""
    if body.soft_prompt is not None:
        return _read_after(model, body, find_soft_prompt(model, body.soft_prompt))
    embeds = [read_embeds(text) for text in body.embeds]
    if body.prompt_follows_embeds:
        return [replace(prompt, embeds=embeds[0]) for prompt in _read_texts(model, body)]
    return [*(Prompt([], embeds=each) for each in embeds), *_read_texts(model, body)]


def _read_after(model: ServedModel, body: CompletionRequest, soft_prompt: PromptEmbeds) -> list[Prompt]:
    """The prompts after a soft prompt of the server, or around its vectors, which ids below 0 stand for."""
    encode, add_special_tokens = model.tokenizer.encode, body.add_special_tokens is not False
    prompts = []
    for prompt in body.prompts:
        token_ids = encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        form = model.forms.after_soft_prompt(token_ids)
        prompts.append(Prompt(token_ids, embeds=soft_prompt, form=form))
    return prompts


def _read_texts(model: ServedModel, body: CompletionRequest) -> list[Prompt]:
    tokenizer = model.tokenizer
    add_special_tokens = body.add_special_tokens is not False
    if len(body.prompts) > 1:
        refuse_many_chars(model, "prompt", sum(len(each) for each in body.prompts if isinstance(each, str)))
    prompts = []
    for prompt in body.prompts:
        if body.truncate_prompt_tokens is None and isinstance(prompt, str):
            refuse_overlong(model, f"{prompt}\n{body.suffix}" if body.suffix else prompt)
        if (formed := read_form(model, body, prompt)) is not None:
            kept = truncated(model, body, formed.token_ids, formed)
            # The mark of what is missing stands at the end, whichever end is cut off.
            prompts.append(Prompt([*kept[:-1], formed.token_ids[-1]], form=formed))
            continue
        token_ids = tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        kept = truncated(model, body, token_ids)
        if isinstance(prompt, str) and len(kept) == len(token_ids):
            prompts.append(Prompt(kept, prompt))
        else:
            has_text = body.echo and min(kept) >= 0 and max(kept) < model.vocab_size
            text = tokenizer.decode(kept, skip_special_tokens=False) if has_text else ""
            prompts.append(Prompt(kept, text))
    return prompts


def read_form(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> FormedPrompt | None:
    """The prompt in the model's own form, if there is a suffix or if the model continues no text without a
    form. Token ids stay as they are. Raises 400 for a suffix that the model can't take."""
    if body.suffix:
        if not isinstance(prompt, str):
            message = "A suffix goes with a prompt of text; this one has token ids."
            raise ApiError(400, message, code="invalid_value", param="suffix")
        try:
            return model.forms.fill((prompt, body.suffix), "leave suffix out")
        except InvalidParameter as error:
            raise ApiError(400, f"suffix: {error}", code="unsupported_parameter", param="suffix") from error
    is_plain = isinstance(prompt, str) and body.add_special_tokens is not False
    return model.forms.complete(prompt) if isinstance(prompt, str) and is_plain else None


def refuse_long_text(model: ServedModel, num_chars: int) -> None:
    """Raises ContextOverflow for a text that is too long for the context in any case, before it is tokenized:
    that could take minutes, and other clients' texts would have to wait."""
    least = math.ceil(num_chars / model.tokenizer.max_token_chars)
    if least > model.max_model_len:
        raise ContextOverflow(
            f"the prompt has {num_chars} characters, which are at least {least} tokens; here this model's "
            f"maximum context length is {model.max_model_len} tokens. Shorten the prompt",
            least,
            model.max_model_len,
        )


def refuse_overlong(model: ServedModel, text: str) -> None:
    """Raises ContextOverflow for a prompt whose beginning alone has more tokens than the context. Only the
    beginning is tokenized, however long the rest is."""
    num_chars = max(_LEAST_LOOK, 4 * model.max_model_len)
    while num_chars < len(text):
        num_tokens = len(model.tokenizer.encode(text[:num_chars], add_special_tokens=False))
        if num_tokens > model.max_model_len:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters, and the first {num_chars} of them are {num_tokens} "
                f"tokens; this model's context here is {model.max_model_len} tokens. Shorten the prompt",
                num_tokens * len(text) // num_chars,
                model.max_model_len,
            )
        num_chars *= 4


def most_chars(model: ServedModel) -> int:
    """Characters of all texts of a request together: a second's work, or what the longest prompt usually
    has."""
    return max(MOST_CHARS, 8 * model.max_model_len)


def refuse_many_chars(model: ServedModel, param: str, num_chars: int) -> None:
    """Raises 400 for a field whose texts have more characters together than one request may have."""
    most = most_chars(model)
    if num_chars > most:
        message = (
            f"{param} has {num_chars} characters together; a request may have {most}. Send several requests."
        )
        raise ApiError(400, message, code="string_above_max_length", param=param)


def refuse_endless_text(model: ServedModel, num_chars: int) -> None:
    """refuse_long_text() for a prompt that truncate_prompt_tokens will cut. The whole text is tokenized:
    where a token begins may depend on all the text before. So the text may be longer than what can be kept,
    within a limit."""
    kept = model.max_model_len * model.tokenizer.max_token_chars
    if num_chars > TRUNCATED_TIMES * kept:
        raise ContextOverflow(
            f"the prompt has {num_chars} characters, and truncate_prompt_tokens cuts prompts of at most "
            f"{TRUNCATED_TIMES * kept}. Send the part that matters: {kept} characters are always enough for "
            "this model's context",
            math.ceil(num_chars / model.tokenizer.max_token_chars),
            model.max_model_len,
        )


def truncated(
    model: ServedModel, body: GenerationFields, token_ids: list[int], form: FormedPrompt | None = None
) -> list[int]:
    """The part of a prompt that truncate_prompt_tokens keeps: the end of the prompt, or its beginning with
    truncation_side "right". With -1 as many tokens are kept as the context has room for beside the answer
    (one token, if the request does not limit its length). form: the form of the prompt."""
    limit = body.truncate_prompt_tokens
    if limit == -1:
        answer_tokens = 1 if body.answer_tokens is None else body.answer_tokens
        limit = max(1, model.room(form) - answer_tokens)
    if limit is None:
        return token_ids
    return token_ids[:limit] if body.truncation_side == "right" else token_ids[-limit:]


def read_bad_words(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, spelled as at the beginning of a text and as after a space; and the tokens
    that the model never writes.

    Raises 400 for a word without tokens, and for words that are too long.
    """
    _check_phrases("bad_words", words)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word, " " + word.lstrip(" ")):
            found[tuple(model.tokenizer.encode(spelling, add_special_tokens=False))] = None
    if () in found:
        message = "bad_words has a text without tokens; each must have at least one."
        raise ApiError(400, message, code="invalid_value", param="bad_words")
    return (*found, *((token_id,) for token_id in model.forms.forbidden_ids))


def _check_phrases(param: str, phrases: Sequence[str]) -> None:
    num_chars = sum(map(len, phrases))
    if num_chars > MAX_PHRASE_CHARS:
        message = f"{param} has {num_chars} characters together; at most {MAX_PHRASE_CHARS} are taken."
        raise ApiError(400, message, code="string_above_max_length", param=param)


def read_conversation(
    model: ServedModel,
    conversation: Conversation,
    tools: ToolPrompt,
    rules: ChatRules,
    check_length: Callable[[int], None] = lambda num_chars: None,
    check_text: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """The token ids of a conversation. Raises RequestError if the model has no form of a conversation, or if
    its form has no place for what the conversation has.

    check_length: gets numbers of characters, and raises for one that is too large: first that of the turns'
        texts, then that of the prompt, which also has tools, calls, reasoning and variables of the template.
        All of this happens before anything is tokenized.
    check_text: gets the prompt's text, and raises for one that is too long. What a template leaves out, such
        as old thoughts, is no part of it.
    """
    check_length(conversation.num_chars)
    if taken := _TEMPLATE_ARGUMENTS & conversation.template_kwargs.keys():
        message = f"chat_template_kwargs can't set {', '.join(sorted(taken))}."
        raise ApiError(400, message, code="invalid_value", param="chat_template_kwargs")
    variables = dict(conversation.template_kwargs)
    if tools.shown_tools:
        variables["tools"] = tools.shown_tools

    def render(messages: list[dict[str, Any]]) -> list[int]:
        return render_chat(
            model.tokenizer,
            messages,
            add_generation_prompt=conversation.begins_answer,
            continue_final_message=conversation.goes_on,
            check_length=check_length,
            check_text=check_text,
            allow_special_tokens=rules.allow_special_tokens,
            **variables,
        )

    described = tools.description
    if described and not model.tokenizer.has_chat_template:
        raise InvalidParameter("tools", "this model has no chat template to show tools: leave tools out")

    def write(turns: Sequence[Turn]) -> list[int]:
        messages = tools.messages([template_message(turn) for turn in turns])
        return render_described(render, messages, described) if described else render(messages)

    few = variables | ({"tools": tools.shown_tools[:1]} if tools.shown_tools else {})

    def write_short(turns: Sequence[Turn]) -> list[int]:
        return render_chat(model.tokenizer, [template_message(turn) for turn in turns], **few)

    if not model.tokenizer.has_chat_template:
        return write(conversation.turns)
    return write_placed(write, conversation.turns, Probe(model.tokenizer, few, write_short))


def template_message(turn: Turn) -> dict[str, Any]:
    """A turn as the message that chat templates expect."""
    fields = {
        "role": turn.role,
        "content": turn.text,
        "name": turn.name,
        "reasoning_content": turn.reasoning,
        "tool_calls": [_template_call(call) for call in turn.calls] or None,
        "tool_call_id": turn.call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _template_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, object],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: Grammar | None = None,
    prediction: tuple[int, ...] = (),
) -> SamplingParams:
    """The parameters of the first choice. A field that the request leaves open has its value in `defaults`,
    or else the default of SamplingParams. A beam search takes no parameters of the draw from `defaults`.

    Raises InvalidParameter, or 400 for a key of logit_bias that is no token id.
    """
    _check_phrases("stop", body.stop_strings)
    values: dict[str, Any] = dict(defaults) if body.beams is None else without_draws(defaults)
    for name in _SAMPLING_FIELDS:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    return SamplingParams(
        **values,
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=read_logit_bias(body.logit_bias or {}),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=bad_words,
        grammar=grammar,
        prediction=prediction,
        beams=body.beams,
    )


def choices(params: SamplingParams, number: int) -> list[SamplingParams]:
    """The parameters of each choice: choice i has the seed `seed + i`. Only the first choice scores the
    prompt, for all of them. All answers of a beam search have the same parameters."""
    if params.beams is not None:
        return [params] * number
    others = replace(params, prompt_logprobs=None)
    if params.seed is None:
        return [params] + [others] * (number - 1)
    seeds = (_wrap(params.seed + i) for i in range(1, number))
    return [params, *(replace(others, seed=seed) for seed in seeds)]


def _wrap(seed: int) -> int:
    """`seed` wrapped into the range of a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


def read_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """The biases by token id; in JSON the keys are strings. Raises 400 for a key that is no token id."""
    for key in biases:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            message = f"logit_bias has the key {key!r}; its keys must be token ids."
            raise ApiError(400, message, code="invalid_value", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
