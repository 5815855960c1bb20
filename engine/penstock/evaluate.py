"""Evaluation: how faithful an engine is to the unquantized checkpoint. Measures the perplexity of both, the
divergence of their predictions, and the error after each layer. Knows no files and prints nothing.

A text is cut into windows. Both sides compute each window from its beginning: the engine with its own
kernels, KV cache and scheduler (so long windows advance in chunks, as prompts do), the unquantized model as
transformers does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from penstock.engine import Engine
from penstock.errors import ComputationError, ConfigError
from penstock.generation.chosen import NOTHING
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch
from penstock.generation.sequence import FinishReason
from penstock.generation.sequence import Sequence as TokenSequence
from penstock.goes_with import Feature, check_together
from penstock.text.tokenizer import Tokenizer
from penstock.unquantized import Computed, UnquantizedModel
from penstock.weights.conversion.torch_threads import torch_threads

#: As many windows are computed together as the unquantized model can compute in this many bytes.
GROUP_BYTES = 1 << 30
#: Tokens whose logits are compared at a time: two rows of float32 and some of float64 for each.
ROWS = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Window:
    """A piece of text. Its last `num_scored` tokens are scored."""

    token_ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True)
class Divergence:
    """How far an engine is from the unquantized model, over the scored tokens of all windows."""

    #: The unquantized model's perplexity of the same tokens.
    perplexity: float
    #: KL(unquantized || engine) of the next token's distribution, in nats.
    mean_kl: float
    max_kl: float
    #: How often both models find the same token likeliest, 0 to 1.
    top1_agreement: float
    #: After each layer: |ours - theirs| / |theirs| of a token's hidden state, the mean of all tokens of the
    #: windows. Each token counts the same, although a first token's state is often a thousand times as long
    #: as others.
    layer_errors: tuple[float, ...]


@dataclass(frozen=True)
class Fidelity:
    """The result of an evaluation."""

    num_tokens: int
    #: exp of the mean negative log-likelihood of the scored tokens.
    perplexity: float
    divergence: Divergence | None


def prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The BOS token where the tokenizer puts one before prompts."""
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return bos if tuple(tokenizer.encode("a")[: len(bos)]) == bos else ()


def windows(tokenizer: Tokenizer, text: str, context: int, stride: int | None = None) -> list[Window]:
    """A text as windows of at most `context` tokens. Each window begins `stride` tokens after the one before
    (None: where the one before ended). Every token is scored once, in the first window that has the token, by
    the tokens before it in that window.

    Where the tokenizer puts its BOS token before prompts, each window begins with a BOS token: models that
    were trained with it predict badly without it. The BOS token is one of the `context` tokens and is not
    scored. Without a BOS token, the text's first token has no token before it and is not scored; where
    windows do not overlap, the same holds for each window's first token. Raises ConfigError.
    """
    bos = prefix(tokenizer)
    size = context - len(bos)
    stride = size if stride is None else stride
    if context < 2:
        raise ConfigError(
            f"context is {context}: a window needs at least 2 tokens, since one token is predicted from "
            "another. Give a context of 2 or more"
        )
    if not 1 <= stride <= size:
        raise ConfigError(
            f"stride is {stride}: windows with {size} tokens of the text need a stride of 1 to {size}, so "
            "that no token is left out"
        )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found, scored = [], 0
    for begin in range(0, max(1, len(token_ids) - (size - stride)), stride):
        piece = token_ids[begin : begin + size]
        first = max(scored, begin + 1 - len(bos))
        scored = begin + len(piece)
        if scored > first:
            found.append(Window((*bos, *piece), scored - first))
    if not found:
        raise ConfigError(
            f"the text has {len(token_ids)} tokens, which is too short: one token is predicted from another. "
            "Give a text of some thousand tokens for a reliable figure"
        )
    return found


def memory_bytes(reference: UnquantizedModel, windows: Sequence[Window]) -> int:
    """The memory that evaluate() takes beside the engine's own budget."""
    longest = max(len(window.token_ids) for window in windows)
    return max(GROUP_BYTES, reference.sequence_bytes(longest)) + reference.workspace_bytes()


def evaluate(
    engine: Engine,
    reference: UnquantizedModel | None,
    windows: Sequence[Window],
    report_progress: Progress = lambda done, total: None,
) -> Fidelity:
    """Compute all windows. Without a reference the result has a perplexity and no divergence.

    report_progress(done, total) counts windows. The engine must have no work of its own. Raises ConfigError
    if the two models have different shapes or a window does not fit, ComputationError if a logit is not a
    number, and CheckpointError.
    """
    _check(engine, reference, max(len(window.token_ids) for window in windows))
    tally, done = _Tally(engine.spec.num_layers), 0
    for group in _groups(windows, reference):
        expected = None
        if reference is not None:
            # An engine with kernels of its own leaves torch only one thread.
            with torch_threads(engine.config.num_threads):
                expected = reference.forward(torch.tensor([window.token_ids for window in group]))
        with contextlib.closing(_compare(engine, expected, group, tally)) as steps:
            for num_finished in steps:
                done += num_finished
                report_progress(done, len(windows))
    return tally.result(reference is not None)


def _check(engine: Engine, reference: UnquantizedModel | None, longest: int) -> None:
    limit, spec = engine.max_model_len, engine.spec
    check_together({Feature.PERPLEXITY, *spec.features}, spec.architecture)
    if reference is not None:
        limit = min(limit, reference.spec.max_position_embeddings)
        for name in ("num_layers", "hidden_size", "intermediate_size", "vocab_size"):
            ours, other = getattr(engine.spec, name), getattr(reference.spec, name)
            if ours != other:
                raise ConfigError(
                    f"{name} is {ours} in the model and {other} in the model to compare with, so these are "
                    "different models: compare with the checkpoint that the model was made from"
                )
    if longest > limit:
        raise ConfigError(
            f"windows have {longest} tokens, and the context here is {limit}: ask for shorter windows with "
            "--context"
        )


def _groups(windows: Sequence[Window], reference: UnquantizedModel | None) -> Iterator[list[Window]]:
    """Groups of windows with equal length. A group is computed together, so that the unquantized weights are
    read less often."""
    for length, equal in itertools.groupby(windows, lambda window: len(window.token_ids)):
        size = GROUP_BYTES // reference.sequence_bytes(length) if reference is not None else 1 << 30
        while group := list(itertools.islice(equal, max(1, size))):
            yield group


def _targets(batch: Batch, length: int) -> tuple[Tensor, Tensor]:
    """For each wanted row of logits: the index of the row's token among the tokens of all windows, and the id
    of the token after it. The id is -1 where nothing is scored. Both int64 [num_rows]."""
    rows, targets = list[int](), list[int]()
    for item in batch.scheduled:
        first = item.sequence.sequence_id * length
        rows += [first + index - 1 for index in item.scored]
        targets += [item.sequence.token_ids[index] for index in item.scored]
        if item.is_sampled:
            rows.append(first + length - 1)
            targets.append(-1)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)


def _compare(
    engine: Engine, expected: Computed | None, group: list[Window], tally: _Tally
) -> Generator[int, None, None]:
    """Let the engine compute windows as prompts whose tokens are scored, and compare. Yields after each step
    how many windows the step finished. Sequences are admitted whole and don't grow, so none is preempted and
    computed again. After an error, or if the caller stops, the engine has no work left."""
    scheduler, length = engine.scheduler, len(group[0].token_ids)
    sequences = [_sequence(number, window) for number, window in enumerate(group)]
    try:
        for sequence in sequences:
            scheduler.add(sequence)
        while batch := scheduler.schedule():
            try:
                _compare_step(engine, expected, batch, length, tally)
            except BaseException:
                scheduler.rollback(batch)
                raise
            finished = scheduler.update(batch, [NOTHING] * len(batch.scheduled))
            for sequence, _ in finished:
                scheduler.finish(sequence, FinishReason.LENGTH)
            yield len(finished)
    finally:
        for sequence in sequences:
            if sequence.finish_reason is None:
                scheduler.finish(sequence, FinishReason.ABORT)


def _sequence(number: int, window: Window) -> TokenSequence:
    """A window as a prompt that wants no answer."""
    request = GenerationRequest(window.token_ids, SamplingParams(max_tokens=0))
    length = len(window.token_ids)
    return TokenSequence(number, request, length, first_scored=length - window.num_scored)


def _compare_step(
    engine: Engine, expected: Computed | None, batch: Batch, length: int, tally: _Tally
) -> None:
    inputs = ModelInputs.of(batch, engine.scheduler.block_manager.block_size)
    if expected is None:
        parts = engine.model.executor.forward(inputs)
    else:
        numbers = torch.tensor([item.sequence.sequence_id for item in batch.scheduled])
        counts = torch.tensor([item.num_new_tokens for item in batch.scheduled])
        tokens = numbers.repeat_interleave(counts) * length + inputs.layout.positions
        parts = engine.model.executor.forward(inputs, observe=partial(tally.add_hidden, expected, tokens))
    rows, targets = _targets(batch, length)
    for logits in parts:
        is_scored = targets[: len(logits)] >= 0
        for some in torch.split(is_scored.nonzero().flatten(), ROWS) if is_scored.any() else ():
            tally.add_loss(logits[some], targets[some])
            if expected is not None:
                theirs = expected.logits.flatten(0, 1)[rows[some]]
                tally.add_divergence(theirs, logits[some], targets[some])
        rows, targets = rows[len(logits) :], targets[len(logits) :]
        del logits  # before the next part is made


class _Tally:
    """Sums over tokens. Distributions are in float64, since divergences are as small as float32's
    rounding."""

    def __init__(self, num_layers: int) -> None:
        self._layer_errors = [0.0] * num_layers
        self._num_computed = [0] * num_layers
        self._num_tokens = self._num_agreed = 0
        self._loss = self._reference_loss = self._kl = self._max_kl = 0.0

    def add_hidden(self, expected: Computed, rows: Tensor, index: int, found: Tensor) -> None:
        """found: hidden states after layer `index`, [num_tokens, hidden_size], and inputs of later layers
        after them. rows: their tokens, as indices among the tokens of all windows."""
        states = expected.hidden[index].flatten(0, 1)[rows]
        found = found[:, : states.shape[1]]
        lengths = states.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._layer_errors[index] += float(((found.to(states.device) - states).norm(dim=1) / lengths).sum())
        self._num_computed[index] += len(rows)

    def add_loss(self, logits: Tensor, targets: Tensor) -> None:
        """Logits [num_tokens, vocab_size] and the tokens that follow in the text. Raises ComputationError."""
        self._loss += _loss(logits.double().log_softmax(-1), targets, "the engine's")
        self._num_tokens += len(targets)

    def add_divergence(self, expected: Tensor, found: Tensor, targets: Tensor) -> None:
        """Logits of both models, [num_tokens, vocab_size]. Raises ComputationError."""
        p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        self._kl += float(kl.sum())
        self._max_kl = max(self._max_kl, float(kl.max()))
        self._reference_loss += _loss(p, targets, "the unquantized model's")
        self._num_agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def result(self, is_compared: bool) -> Fidelity:
        number = self._num_tokens
        divergence = None
        if is_compared:
            errors = zip(self._layer_errors, self._num_computed, strict=True)
            divergence = Divergence(
                perplexity=_exp(self._reference_loss / number),
                mean_kl=self._kl / number,
                max_kl=self._max_kl,
                top1_agreement=self._num_agreed / number,
                layer_errors=tuple(error / count for error, count in errors),
            )
        return Fidelity(number, _exp(self._loss / number), divergence)


def _loss(log_probabilities: Tensor, targets: Tensor, whose: str) -> float:
    loss = float(nll_loss(log_probabilities, targets, reduction="sum"))
    if not math.isfinite(loss):
        raise ComputationError(
            f"{whose} logits are not numbers: the checkpoint may be damaged, download or convert it again"
        )
    return loss


def _exp(x: float) -> float:
    """exp(x), at most exp(709), which is about the largest float64: JSON has no infinity."""
    return math.exp(min(x, 709.0))
