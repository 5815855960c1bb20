"""Every error that the engine raises, so that a caller can handle a whole branch at once.

PenstockError
├── ConfigError                a setting is wrong, or two settings contradict each other
├── CapacityError              something does not fit: the message says what is needed and what there is
├── CheckpointError            something about the files of a model
│   ├── CheckpointNotFound     no such folder, or no config.json / weights in it
│   ├── DownloadError          a hub repository could not be fetched (also: offline and not cached)
│   ├── UnsupportedModel       an unknown architecture, or a variant that we do not compute exactly
│   ├── InvalidConfig          config.json has a value of the wrong type, or out of any range
│   ├── UnsafeCheckpoint       the weights are pickles: not allowed, or a pickle asks for more than tensors
│   ├── CorruptFile            a file is truncated, malformed or changed under us
│   ├── MissingTensor          the model needs a tensor that no file holds
│   ├── UnexpectedTensor       a file holds a tensor that the model does not know
│   └── WrongTensor            a tensor has the wrong shape or dtype
├── RequestError               the request is at fault; the engine goes on
│   ├── InvalidParameter       a sampling parameter is out of range (`param` names it)
│   │   └── TemplateLost       the chat template takes too much time or memory for the messages
│   └── ContextOverflow        the prompt with its answer exceeds the context or the KV budget
├── QueueFull                  the queue is full: the request is refused, and could be taken later
├── RequestFailed              one request could not be computed; the engine and the other requests go on
│   ├── ComputationError       the model computed NaN for the request
│   ├── NoTokenLeft            the request's own parameters leave no token to choose
│   ├── TooFewAnswers          a beam search found fewer answers than it had to return
│   ├── QueueTimeout           the request waited for its first step until its time was up
│   └── DeadlineExceeded       the request's time was up before its answer ended
├── HandoverError              the processor could not compute its share of a product beside a card
├── StepFailed                 a layer could not be read: the step's requests are lost, the engine goes on
│   └── MachineAway            another machine that computes some of the layers is away
└── EngineDead                 the engine thread ended; nothing more will be computed
    └── EngineStopped          the engine thread ended because it was told to
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class PenstockError(Exception):
    """Root of the tree."""


class ConfigError(PenstockError):
    """A setting is wrong, or two settings contradict each other."""


#: A machine's memories, as flags name them: --host-memory, --device-memory.
MemoryName = Literal["host", "device"]


class CapacityError(PenstockError):
    """Something does not fit into its budget."""

    def __init__(self, message: str, memory: MemoryName | None = None) -> None:
        """memory: the memory that is too small for a model; None if the error is about something else."""
        super().__init__(message)
        self.memory = memory


class CheckpointError(PenstockError):
    """Something is wrong with the files of a model."""


class CheckpointNotFound(CheckpointError):
    """There is no such folder, or nothing in the folder could be a model."""


class DownloadError(CheckpointError):
    """A hub repository could not be fetched."""


class UnsupportedModel(CheckpointError):
    """We do not compute this architecture, or this variant of it, exactly."""


class InvalidConfig(CheckpointError):
    """config.json has a value that no model can have."""


class UnsafeCheckpoint(CheckpointError):
    """The weights exist only as pickles, which were not allowed; or a pickle asks for what no checkpoint
    needs."""


class CorruptFile(CheckpointError):
    """A file is truncated, malformed, or not what its header says."""


class MissingTensor(CheckpointError):
    """The model needs a tensor that no file holds."""


class UnexpectedTensor(CheckpointError):
    """A file holds a tensor that the model does not know."""


class WrongTensor(CheckpointError):
    """A tensor has another shape or dtype than the config says."""


class RequestError(PenstockError):
    """The request is at fault: it is refused, and the engine goes on."""


class InvalidParameter(RequestError):
    """A sampling parameter is out of range."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class TemplateLost(InvalidParameter):
    """The model's chat template takes too much time or memory for the messages."""

    def __init__(self) -> None:
        super().__init__(
            "messages",
            "the model's chat template takes too much time or memory for these messages: send fewer or "
            "shorter ones; if the same happens with a short message, the template is broken",
        )


class ContextOverflow(RequestError):
    """The prompt together with its answer exceeds the context length or the KV budget."""

    def __init__(
        self, message: str, num_prompt_tokens: int, max_model_len: int, num_answer_tokens: int = 0
    ) -> None:
        """num_answer_tokens: what the request asks for, if the prompt alone would fit; else 0."""
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.num_answer_tokens = num_answer_tokens


class QueueFull(PenstockError):
    """The queue is full: the request is refused, and could be taken later."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        """retry_after_s: seconds until there may be room again; None if that is unknown."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(PenstockError):
    """One request could not be computed; the other requests of its steps were."""


class ComputationError(RequestFailed):
    """The model computed NaN for the request."""


class NoTokenLeft(RequestFailed):
    """The request's own parameters contradict each other: at some point of the answer no token is left to
    choose. Which tokens a grammar, bad words or penalties leave is known only while the answer is made."""

    def __init__(self, params: Sequence[str]) -> None:
        """params: names of the parameters that took tokens away."""
        names = " and ".join(params) or "its penalties"
        super().__init__(f"{names} leave no token to choose; loosen one of them")
        self.params = tuple(params)


class TooFewAnswers(RequestFailed):
    """A beam search found fewer answers than it had to return: the request's own parameters allow no
    others."""

    def __init__(self, num_found: int, num_wanted: int) -> None:
        super().__init__(
            f"the request allows {num_found} answers, and n asks for {num_wanted}; lower n, or loosen what "
            "restricts the answers"
        )


class QueueTimeout(RequestFailed):
    """The request waited for its first step until its time was up; it could be taken later."""

    #: Seconds until there may be room again; None if that is unknown.
    retry_after_s: int | None = None


class DeadlineExceeded(RequestFailed):
    """The request's time was up before its answer ended."""


class HandoverError(PenstockError):
    """The processor could not compute its share of a product beside a card."""


class StepFailed(PenstockError):
    """A layer could not be read or computed, so the requests of one step could not be computed."""

    def __init__(self, request_ids: list[str], message: str) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class MachineAway(StepFailed):
    """A machine that computes some of the layers has been away for longer than requests wait for it. They
    could be taken when the machine is back."""


class EngineDead(PenstockError):
    """The engine thread ended: nothing more will be computed by this process."""


class EngineStopped(EngineDead):
    """The engine was told to stop."""


#: What ends the requests of a step and not the engine: StepFailed tells the caller.
STEP_ERRORS = (CheckpointError, HandoverError)
#: Errors of Python's that a malformed file causes: a word in place of a number, a missing number, a division
#: by zero.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
