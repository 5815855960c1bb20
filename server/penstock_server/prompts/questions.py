"""From the body of a request to a Question, prompts and SamplingParams, for each route.

Long texts and large grammars take long, so that these functions don't belong on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from penstock import Grammar, SamplingParams
from penstock.errors import ContextOverflow, InvalidParameter
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.followed_form import follow_form
from penstock_server.prompts.inputs import (
    Prompt,
    choices,
    read_bad_words,
    read_conversation,
    read_prompts,
    refuse_endless_text,
    refuse_long_text,
    refuse_overlong,
    sampling_params,
    truncated,
)
from penstock_server.prompts.structured_outputs import read_format, read_grammar
from penstock_server.protocol.conversation import Conversation
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.generation_fields import GenerationFields
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.settings.chat_rules import ChatRules
from penstock_server.tools.prompting import ToolPrompt
from penstock_server.tools.reasoning import Reasoning
from penstock_server.tools.use import ToolUse

if TYPE_CHECKING:
    from penstock import Adapter

#: The default of max_tokens for /v1/completions, as at OpenAI.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Question:
    """The engine's task: each prompt gets an answer for each element of `params`."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    #: See GenerationRequest.
    answer_start: tuple[int, ...] = ()
    #: How to read answers that may hold reasoning or calls of tools; None: answers are text alone.
    use: ToolUse | None = None
    #: What changes the model for these answers; None: the model as it is.
    adapter: Adapter | None = None


class Constraints(TypedDict):
    """The constraints on an answer's tokens, as sampling_params() takes them."""

    bad_words: tuple[tuple[int, ...], ...]
    grammar: Grammar | None


def read_completion(model: ServedModel, body: CompletionRequest) -> Question:
    if body.echo and not model.predicts_prompt:
        message = (
            "echo has no meaning here: this model reads the prompt as a whole, and predicts none of its "
            "tokens. Leave echo out."
        )
        raise ApiError(400, message, code="unsupported_parameter", param="echo")
    prompts = read_prompts(model, body)
    form = prompts[0].form  # texts and token ids are not mixed, so that all or none have a form
    if any(prompt.form is not form and None in (prompt.form, form) for prompt in prompts):
        message = (
            "prompt_embeds and texts can't be prompts of one request here, since this model reads texts in a "
            "form of their own. Send two requests."
        )
        raise ApiError(400, message, code="unsupported_parameter", param="prompt_embeds")
    room = model.room(form) - max(prompt.num_tokens for prompt in prompts)
    usual = max(1, min(DEFAULT_MAX_TOKENS, room))
    num_scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_scored = max(body.logprobs, num_scored or 0)
    params = sampling_params(
        body,
        model.default_sampling,
        usual if body.max_tokens is None else body.answer_tokens,
        body.logprobs,
        num_scored,
        **_constraints(model, body),
    )
    params = follow_form(params, form)
    start = form.answer_start if form else ()
    return Question(prompts, choices(params, body.num_choices), start, adapter=model.adapter)


def _constraints(model: ServedModel, body: GenerationFields) -> Constraints:
    return {
        "bad_words": read_bad_words(model, body.bad_words or ()),
        "grammar": read_grammar(model, body),
    }


def read_chat(model: ServedModel, body: ChatCompletionRequest, rules: ChatRules) -> Question:
    use = ToolUse.of(body.as_conversation.tools, model.tokenizer, rules.tool_call_parser)
    whole = _read_messages(model, body, use.prompt, rules)
    use = _with_reasoning(model, use, body.as_conversation, rules, whole)
    token_ids = truncated(model, body, whole)
    params = sampling_params(
        body,
        model.default_sampling,
        body.answer_tokens,
        body.num_logprobs,
        body.prompt_logprobs,
        prediction=_read_prediction(model, body),
        **_constraints(model, body),
    )
    params = _bound(model, use, params, body.as_conversation.thinking_budget)
    answers, prompts = choices(params, body.num_choices), [Prompt(token_ids)]
    return Question(prompts, answers, use=use if use.parser() else None, adapter=model.adapter)


def within_context(model: ServedModel, question: Question) -> Question:
    """`question` for an API whose limit of tokens is the most that a client would take: an answer may fill
    the context where it has no room for so many."""
    longest = max(prompt.num_tokens for prompt in question.prompts)
    room = model.room(question.prompts[0].form) - longest

    def fitting(params: SamplingParams) -> SamplingParams:
        is_cut = params.max_tokens is not None and params.max_tokens > room
        return replace(params, max_tokens=None) if is_cut else params

    return replace(question, params=[fitting(params) for params in question.params])


def count_tokens(
    model: ServedModel,
    conversation: Conversation,
    rules: ChatRules,
    check_length: Callable[[int], None],
    check_text: Callable[[str], None],
) -> int:
    """The number of tokens of the prompt that a conversation makes. The checks and errors are those of
    read_conversation()."""
    use = ToolUse.of(conversation.tools, model.tokenizer, rules.tool_call_parser)
    return len(read_conversation(model, conversation, use.prompt, rules, check_length, check_text))


def _read_prediction(model: ServedModel, body: ChatCompletionRequest) -> tuple[int, ...]:
    """The tokens that the answer is expected to have."""
    if body.prediction is None or not body.prediction.text:
        return ()
    refuse_long_text(model, len(body.prediction.text))
    refuse_overlong(model, body.prediction.text)
    return tuple(model.tokenizer.encode(body.prediction.text, add_special_tokens=False))


def _read_messages(
    model: ServedModel, body: ChatCompletionRequest, tools: ToolPrompt, rules: ChatRules
) -> list[int]:
    """The token ids of all messages."""
    conversation = body.as_conversation
    if body.truncate_prompt_tokens is not None:
        return read_conversation(model, conversation, tools, rules, partial(refuse_endless_text, model))
    return read_conversation(model, conversation, tools, rules, *_whole(model))


def _whole(model: ServedModel) -> tuple[Callable[[int], None], Callable[[str], None]]:
    """read_conversation()'s checks for a prompt that the model must take whole."""
    return partial(refuse_long_text, model), partial(refuse_overlong, model)


def _with_reasoning(
    model: ServedModel, use: ToolUse, conversation: Conversation, rules: ChatRules, prompt: list[int]
) -> ToolUse:
    last_turn = conversation.turns[-1].text if conversation.goes_on else None
    reasoning = Reasoning.of(model.tokenizer, rules.reasoning_parser, prompt, last_turn)
    return replace(use, reasoning=reasoning, shows_reasoning=conversation.shows_reasoning)


def _bound(
    model: ServedModel, use: ToolUse, params: SamplingParams, thinking_budget: int | None
) -> SamplingParams:
    """`params`, bound to what the tools demand as well, after the thinking. Raises InvalidParameter."""
    params = use.binding.bind(params)
    use.binding.check(model, params.grammar)
    must_call = use.prompt.mode in ("named", "required")
    return params if use.reasoning is None else use.reasoning.bind(params, thinking_budget, must_call)


def read_response(model: ServedModel, body: ResponsesRequest, rules: ChatRules) -> Question:
    prompt, use = read_input(model, body, rules, *_whole(model))
    params = sampling_params(
        body,
        model.default_sampling,
        body.max_output_tokens,
        body.num_logprobs,
        bad_words=read_bad_words(model, body.bad_words or ()),
        grammar=read_format(model, body.format, "text.format"),
    )
    params = _bound(model, use, params, body.as_conversation.thinking_budget)
    return Question([prompt], [params], use=use if use.parser() else None, adapter=model.adapter)


def read_input(
    model: ServedModel,
    body: ResponsesRequest,
    rules: ChatRules,
    check_length: Callable[[int], None],
    check_text: Callable[[str], None] = lambda text: None,
) -> tuple[Prompt, ToolUse]:
    """The input of /v1/responses. The checks and errors are those of read_conversation()."""
    conversation = body.as_conversation
    use = ToolUse.of(conversation.tools, model.tokenizer, rules.tool_call_parser)
    if body.truncation == "auto":
        room = model.room() - (body.max_output_tokens or 1)
        conversation = _fitting(model, conversation, use.prompt, rules, room)
    token_ids = _read_conversation(model, conversation, use.prompt, rules, check_length, check_text)
    return Prompt(token_ids), _with_reasoning(model, use, conversation, rules, token_ids)


def _read_conversation(
    model: ServedModel,
    conversation: Conversation,
    tools: ToolPrompt,
    rules: ChatRules,
    check_length: Callable[[int], None],
    check_text: Callable[[str], None],
) -> list[int]:
    """read_conversation(), with the name that the messages have in a request to /v1/responses."""
    try:
        return read_conversation(model, conversation, tools, rules, check_length, check_text)
    except InvalidParameter as error:
        raise InvalidParameter("input" if error.param == "messages" else error.param, str(error)) from error


def read_fitting_chat(model: ServedModel, body: ChatCompletionRequest, rules: ChatRules) -> Question:
    """read_chat() without as many of the oldest messages as the context has no room for."""
    try:
        question = read_chat(model, body, rules)
    except ContextOverflow:
        pass
    else:
        if question.prompts[0].num_tokens < model.room():
            return question
    use = ToolUse.of(body.as_conversation.tools, model.tokenizer, rules.tool_call_parser)
    kept = _fitting(model, body.as_conversation, use.prompt, rules, model.room() - 1)
    return read_chat(model, body.with_conversation(kept), rules)


def _fitting(
    model: ServedModel, conversation: Conversation, tools: ToolPrompt, rules: ChatRules, room: int
) -> Conversation:
    """The conversation without as many of its oldest turns as have no place in `room` tokens. System turns in
    front stay, and the rest begins with a user's turn. The last user's turn always stays; if it does not fit,
    a later check refuses it with the reason."""
    turns = conversation.turns
    first = next((index for index, turn in enumerate(turns) if turn.role != "system"), 0)
    starts = [first, *(index for index in range(first + 1, len(turns)) if turns[index].role == "user")]

    def since(start: int) -> Conversation:
        return replace(conversation, turns=turns[:first] + turns[start:])

    def fits(start: int) -> bool:
        try:
            token_ids = _read_conversation(model, since(start), tools, rules, *_whole(model))
        except ContextOverflow:
            return False
        return len(token_ids) <= room

    return since(starts[bisect_left(starts[:-1], True, key=fits)])
