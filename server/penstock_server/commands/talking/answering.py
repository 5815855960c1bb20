"""answer(): one answer of an engine, printed as it comes; Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from penstock import Engine, GenerationRequest, RequestOutput
from penstock_server.facade.figures import duration, rate

REQUEST_ID = "terminal"


@dataclass(frozen=True)
class Answered:
    text: str
    num_tokens: int
    first_token_s: float
    total_s: float

    def __str__(self) -> str:
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        per_s = f": {rate(self.num_tokens / self.total_s)} tokens/s" if self.total_s else ""
        return (
            f"[{tokens} in {duration(self.total_s)}{per_s}, the first after {duration(self.first_token_s)}]"
        )


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
