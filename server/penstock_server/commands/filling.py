"""`penstock fill`: the blanks of one text, in the terminal. The rules are those of /v1/fill."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pydantic import ValidationError

from penstock import (
    BeamParams,
    BlankText,
    Engine,
    GenerationRequest,
    PromptForms,
    RequestOutput,
)
from penstock.errors import ConfigError
from penstock_server.answers.fill_format import SpanReader
from penstock_server.commands.talking.answering import REQUEST_ID, Answered, answer
from penstock_server.commands.talking.lines import typed_text
from penstock_server.commands.terminal import sampling_flags
from penstock_server.facade.inside import model_of
from penstock_server.facade.loading import load_engine, load_tokenizer, open_source
from penstock_server.prompts.filling import FillQuestion, read_fill
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.fill_bodies import FillRequest
from penstock_server.settings.settings import Settings


def fill(settings: Settings, options: argparse.Namespace) -> int:
    """Fills in the blanks of --text, or of stdin, and prints the whole text as it grows."""
    flags = sampling_flags(options)
    if options.blank == "":
        raise ConfigError("--blank is empty: give the text that is a blank, or leave --blank out")
    text = typed_text(options.text).removesuffix("\n" if options.text is None else "")
    blanks = BlankText.read(text, options.blank)
    body = _body(text, options, flags)
    _check_model(settings, blanks)
    with load_engine(settings) as engine:
        try:
            asked = read_fill(model_of(engine), body)
        except ApiError as error:
            raise ConfigError(str(error.detail)) from error
        answered = _answer(engine, asked, options)
    print(answered, file=sys.stderr)
    return 0


def _check_model(settings: Settings, text: BlankText) -> None:
    """Raises InvalidParameter if the model can't fill in the blanks. The model's config and tokenizer tell,
    so that a large model need not be loaded first."""
    opened = open_source(settings)
    with opened.store.checkpoint:
        forms = PromptForms(load_tokenizer(settings, opened), opened.spec.has_encoder)
        forms.fill(text.pieces, "use `penstock generate` or `penstock chat`")


def _body(text: str, options: argparse.Namespace, flags: dict[str, Any]) -> FillRequest:
    fields = _fields(flags) | {
        "prompt": text,
        "blank": options.blank,
        "max_tokens_per_blank": options.max_tokens_per_blank,
        "stop": list(options.stop or ()),
    }
    try:
        return FillRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0] if first["loc"] else "text").replace("_", "-")
        raise ConfigError(f"{flag}: {first['msg']}") from error


def _fields(flags: dict[str, Any]) -> dict[str, object]:
    """The flags as the fields of a request, where a beam search has four."""
    fields = dict(flags)
    beams: BeamParams | None = fields.pop("beams", None)
    if beams is not None:
        fields |= {"use_beam_search": True, "best_of": beams.num_beams}
        fields |= {"length_penalty": beams.length_penalty, "early_stopping": beams.early_stopping}
    return fields


def _answer(engine: Engine, asked: FillQuestion, options: argparse.Namespace) -> Answered:
    reader = SpanReader(engine.tokenizer, asked.form.closers, options.max_tokens_per_blank)
    pieces, spans = asked.text.pieces, [""] * asked.text.num_blanks

    def told(output: RequestOutput) -> str:
        text = ""
        for span in reader.read(output.token_ids, output.text, output.finish_reason):
            spans[span.index] += span.text
            text += span.text + (pieces[span.index + 1] if span.finish_reason else "")
        if not options.json:
            return text
        is_last = output.finish_reason is not None
        whole = {"text": asked.text.filled(spans), "spans": spans}
        return json.dumps(whole, ensure_ascii=False) if is_last else ""

    if not options.json:
        print(pieces[0], end="", flush=True)
    question = asked.question
    (prompt,), (params,) = question.prompts, question.params
    request = GenerationRequest(prompt.token_ids, params, REQUEST_ID, answer_start=question.answer_start)
    return answer(engine, request, told)
