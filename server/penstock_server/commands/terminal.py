"""`penstock generate` and `penstock chat`: one answer at a time, as it comes, in the terminal.

Answers go to stdout; progress and figures go to stderr, so that stdout can be piped.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from penstock import (
    BeamParams,
    Engine,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    can_chat,
    render_chat,
    without_draws,
)
from penstock.errors import ConfigError, InvalidParameter, RequestError
from penstock_server.facade.loading import load_engine
from penstock_server.prompts.inputs import follow_form
from penstock_server.settings.settings import Settings

REQUEST_ID = "terminal"

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


@dataclass(frozen=True)
class Answered:
    text: str
    num_tokens: int
    first_token_s: float
    total_s: float

    def __str__(self) -> str:
        rate = self.num_tokens / self.total_s if self.total_s else 0.0
        return (
            f"[{self.num_tokens} tokens in {self.total_s:.1f} s: {rate:.1f} tokens/s, "
            f"the first after {self.first_token_s:.1f} s]"
        )


def generate(settings: Settings, options: argparse.Namespace) -> int:
    """Continues the text of --prompt, or of stdin."""
    flags = sampling_flags(options)
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    with load_engine(settings) as engine:
        form = engine.forms.complete(prompt)
        token_ids = form.token_ids if form else engine.tokenizer.encode(prompt)
        params = follow_form(sampling_params(engine, flags), form)
        start = form.answer_start if form else ()
        answered = answer(engine, GenerationRequest(token_ids, params, REQUEST_ID, answer_start=start))
    print(answered, file=sys.stderr)
    return 0


def chat(settings: Settings, options: argparse.Namespace) -> int:
    """A conversation until /quit, Ctrl-D, or Ctrl-C at the prompt. Ctrl-C cuts an answer short."""
    flags = sampling_flags(options)
    with load_engine(settings) as engine:
        if not can_chat(engine.tokenizer):
            raise RequestError("this model has no chat template; use `penstock generate`")
        _talk(Conversation(engine, sampling_params(engine, flags), options.system))
    return 0


def _talk(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() editing and history
    print("Type a message; /reset begins anew, /quit ends.", file=sys.stderr)
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print("There are /reset and /quit.", file=sys.stderr)
        elif line:
            conversation.say(line)


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


class Conversation:
    """The messages of a chat, and the engine that answers them."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def reset(self) -> None:
        self._messages = list(self._beginning)

    def say(self, text: str) -> None:
        """Prints the answer to `text`. A message that the model can't take is reported and forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            token_ids = render_chat(self._engine.tokenizer, messages)
            answered = answer(self._engine, GenerationRequest(token_ids, self._params, REQUEST_ID))
        except RequestError as error:
            print(f"{error} (/reset begins anew)", file=sys.stderr)
            return
        self._messages = [*messages, {"role": "assistant", "content": answered.text}]
        print(answered, file=sys.stderr)


def answer(
    engine: Engine,
    request: GenerationRequest,
    told: Callable[[RequestOutput], str] = lambda output: output.text,
) -> Answered:
    """Prints an answer as it comes. Ctrl-C ends the answer. told: the text to print for an output. Raises
    RequestError, RequestFailed, StepFailed."""
    texts: list[str] = []
    num_tokens = 0
    start = time.monotonic()
    first = None
    engine.add(request)
    with _interruptible() as aborted:
        while engine.has_work and not aborted:
            for output in engine.step(aborted):
                if output.error is not None:
                    raise output.error
                first = first or time.monotonic()
                num_tokens = output.num_output_tokens
                texts.append(told(output))
                print(texts[-1], end="", flush=True)
    engine.abort(REQUEST_ID)
    print(flush=True)
    end = time.monotonic()
    return Answered("".join(texts), num_tokens, (first or end) - start, end - start)


@contextlib.contextmanager
def _interruptible() -> Iterator[set[str]]:
    """Inside this context Ctrl-C puts the request into the yielded set, which ends a sweep between two
    layers. A second Ctrl-C ends the program wherever it is."""
    aborted: set[str] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if aborted:
            raise KeyboardInterrupt
        aborted.add(REQUEST_ID)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield aborted
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """The lines that the user types, until the end of input or Ctrl-C."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line.strip()
