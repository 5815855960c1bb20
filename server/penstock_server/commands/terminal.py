"""`penstock generate` and `penstock chat`: one answer at a time, as it comes, in the terminal.

Answers go to stdout; progress and figures go to stderr, so that stdout can be piped.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock import (
    BeamParams,
    Engine,
    GenerationRequest,
    SamplingParams,
    can_chat,
    without_draws,
)
from penstock.errors import ConfigError, InvalidParameter, RequestError
from penstock_server.commands.talking.answering import REQUEST_ID, answer
from penstock_server.commands.talking.conversation import Conversation
from penstock_server.commands.talking.dialogue import Dialogue
from penstock_server.commands.talking.lines import messages, typed_text, with_history
from penstock_server.facade.loading import load_engine
from penstock_server.prompts.followed_form import follow_form
from penstock_server.settings.settings import Settings

_SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "seed",
)


def generate(settings: Settings, options: argparse.Namespace) -> int:
    """Continues the text of --prompt, or of stdin."""
    flags = sampling_flags(options)
    prompt = typed_text(options.prompt)
    with load_engine(settings) as engine:
        form = engine.forms.complete(prompt)
        token_ids = form.token_ids if form else engine.tokenizer.encode(prompt)
        params = follow_form(sampling_params(engine, flags), form)
        start = form.answer_start if form else ()
        answered = answer(engine, GenerationRequest(token_ids, params, REQUEST_ID, answer_start=start))
    print(answered, file=sys.stderr)
    return 0


def chat(settings: Settings, options: argparse.Namespace) -> int:
    """A conversation until /quit, Ctrl-D, or Ctrl-C at an empty prompt. Ctrl-C cuts an answer short."""
    flags = sampling_flags(options)
    with load_engine(settings) as engine:
        if not can_chat(engine.tokenizer):
            raise RequestError("this model has no chat template; use `penstock generate`")
        system = None if options.system is None else typed_text(options.system)
        dialogue = Dialogue(Conversation(engine, sampling_params(engine, flags), system))
        print("Type a message; /help lists what else there is.", file=sys.stderr)
        with with_history(settings.cache_dir / "chat-history"):
            dialogue.hold(messages())
    return 0


def sampling_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that are on the command line. Raises ConfigError for a wrong one."""
    try:
        flags = _given(options)
        SamplingParams(**flags)
    except InvalidParameter as error:
        name = "num_beams" if error.param == "best_of" else error.param
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error
    return flags


def _given(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in _SAMPLING_FLAGS}
    flags = {name: value for name, value in given.items() if value is not None}
    beams = beam_params(options)
    flags |= {"beams": beams} if beams is not None else {}
    return flags | ({"stop": tuple(options.stop)} if options.stop else {})


def beam_params(options: argparse.Namespace) -> BeamParams | None:
    """The beam search that the command line asks for."""
    penalty, stopping = options.length_penalty, options.early_stopping
    if options.num_beams is None:
        if penalty is not None or stopping is not None:
            raise ConfigError("--length-penalty and --early-stopping need a beam search: add --num-beams N")
        return None
    penalty = 1.0 if penalty is None else penalty
    return BeamParams(options.num_beams, 1, penalty, "never" if stopping == "never" else stopping == "true")


def sampling_params(engine: Engine, flags: dict[str, Any]) -> SamplingParams:
    """The parameters of the flags; the model's own defaults for all others."""
    advice: dict[str, Any] = engine.default_sampling
    if "beams" in flags:
        advice = without_draws(advice)
    forbidden = tuple((token_id,) for token_id in engine.forms.forbidden_ids)
    return SamplingParams(**(advice | flags), bad_words=forbidden)
