"""What a batch asks, and how: values that both kinds of batches take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from penstock_client.assembler import AnswerFormat, R
from penstock_client.exchange import Request
from penstock_client.patience import Patience
from penstock_client.progress import ProgressReport


@dataclass(frozen=True)
class BatchOptions:
    """The options of a batch; see Client.batch. Raises ValueError for an unusable option."""

    concurrency: int
    ordered: bool
    progress: ProgressReport
    patience_s: float | None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; give 1 or more")
        Patience(self.patience_s)


@dataclass(frozen=True)
class PromptRequests(Generic[R]):
    """The requests for the prompts of a batch. of: makes one, from a prompt and `params`."""

    of: Callable[..., Request]
    answer_format: AnswerFormat[Any, R]
    params: Mapping[str, object]

    @property
    def can_stream(self) -> bool:
        """Answers are read as streams: keep-alives tell a slow server from a dead one. Streams lack one
        field, prompt_logprobs."""
        return self.params.get("prompt_logprobs") is None
