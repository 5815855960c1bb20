"""Completion: a whole answer, put together of what each step brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason


@dataclass
class Completion:
    """A whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: Of an answer of a beam search: see RequestOutput.
    score: float | None = None
    #: The other answers of a beam search, best first; this one is the best.
    others: list[Completion] = field(default_factory=list)

    @classmethod
    def of(cls, output: RequestOutput) -> Completion:
        """An answer that came in one output."""
        completion = cls()
        completion.extend(output)
        return completion

    def extend(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.score, self.others = output.score, [Completion.of(other) for other in output.others]
