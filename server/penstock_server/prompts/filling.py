"""From a request to /v1/fill to a Question, and the text whose blanks are filled in. Not for the event loop:
long texts take long."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import BlankText, FormedPrompt
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.followed_form import follow_form
from penstock_server.prompts.inputs import Prompt, read_bad_words, sampling_params
from penstock_server.prompts.questions import Question
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.fill_bodies import FillRequest

#: The default of max_tokens.
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class FillQuestion:
    text: BlankText
    form: FormedPrompt
    question: Question


def read_fill(model: ServedModel, body: FillRequest) -> FillQuestion:
    """Raises InvalidParameter and 400 for a text without blanks, and for blanks that the model can't fill
    in."""
    text = BlankText.read(body.prompt, body.blank)
    form = model.forms.fill(text.pieces, "use /v1/completions or /v1/chat/completions")
    if text.num_blanks > 1:
        _refuse_ends(body, text.num_blanks)
    room = model.room(form) - len(form.token_ids)
    params = sampling_params(
        body,
        model.default_sampling,
        _max_tokens(body, text.num_blanks, has_closers=bool(form.closers), room=room),
        None,
        bad_words=read_bad_words(model, body.bad_words or ()) if body.bad_words else (),
    )
    params = follow_form(params, form, body.max_tokens_per_blank)
    prompts = [Prompt(form.token_ids, form=form)]
    return FillQuestion(text, form, Question(prompts, [params], form.answer_start, adapter=model.adapter))


def _max_tokens(body: FillRequest, num_blanks: int, has_closers: bool, room: int) -> int:
    """The most tokens of the answer. A blank's text and the token that closes the blank count. Without
    max_tokens, the answer is not longer than the `room` in the context."""
    limit, usual = body.max_tokens_per_blank, DEFAULT_MAX_TOKENS
    if limit is not None:
        usual = num_blanks * (limit + 1) if has_closers else limit
    most = body.max_tokens or max(1, min(usual, room))
    return most if has_closers or limit is None else min(most, limit)


def _refuse_ends(body: FillRequest, num_blanks: int) -> None:
    """Raises 400 for fields that would end the whole answer in the middle of a blank."""
    for name in ("stop", "stop_token_ids", "min_tokens", "include_stop_str_in_output"):
        if getattr(body, name):
            message = (
                f"{name} is about one answer, and this prompt has {num_blanks} blanks: leave {name} out, or "
                "fill in one blank at a time. max_tokens_per_blank limits each blank."
            )
            raise ApiError(400, message, code="unsupported_parameter", param=name)
