"""How faithful an engine is to the unquantized checkpoint: perplexity of both, divergence of what they predict,
and where in the layers the difference arises. Knows no files and prints nothing.

A text is cut into windows, and each is computed from nothing by both sides: by the engine with its own kernels,
KV cache and scheduler (so long windows advance in chunks, as prompts do), by the other as transformers does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.generation.batch import ModelInputs
from penstock.generation.sequence import FinishReason, SamplingParams
from penstock.generation.sequence import Sequence as TokenSequence
from penstock.memory.hardware import num_physical_cores
from penstock.spec import ModelSpec
from penstock.text.tokenizer import Tokenizer
from penstock.unquantized import Computed, UnquantizedModel

#: The hidden states and logits that the unquantized model keeps of some windows for the comparison.
GROUP_BYTES = 2 << 30
#: Rows of logits whose distributions are compared at a time: they take 40 bytes for each word of the vocabulary.
ROWS = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Window:
    """A piece of text; its last `num_scored` tokens count."""

    token_ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True)
class Fidelity:
    """What was found, over all scored tokens of all windows."""

    num_tokens: int
    #: exp of the mean negative log-likelihood of the text's tokens: ours and the unquantized model's.
    perplexity: float
    reference_perplexity: float
    #: KL(reference || ours) of the next token's distribution, in nats.
    mean_kl: float
    max_kl: float
    #: How often both find the same token likeliest, 0 to 1.
    top1_agreement: float
    #: After each layer: |ours - reference| / |reference| of a token's hidden state, the mean of all tokens.
    #: Each token counts the same: the first one's state is often a thousand times as long as the others'.
    layer_errors: tuple[float, ...]


def windows(tokenizer: Tokenizer, text: str, context: int, stride: int | None = None) -> list[Window]:
    """A text as windows of at most `context` tokens, each `stride` tokens further on than the last (None: where
    that ended). Every token is scored once, with what stands before it in the first window that holds it.

    Where the tokenizer puts its BOS token before prompts, each window begins with one: models that were trained
    so make little of a text without. It takes one of the `context` tokens and is not scored. Otherwise a
    text's first token, and without overlap each window's, has nothing before it and is not scored. Raises
    ConfigError.
    """
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    bos = bos if tokenizer.encode("a")[: len(bos)] == bos else []
    size = context - len(bos)
    stride = size if stride is None else stride
    if not 1 <= stride <= size or context < 2:
        raise ConfigError(
            f"context is {context} and stride {stride}; windows of {size} need a stride of 1 to {size}"
        )
    found, scored = [], 0
    for begin in range(0, max(1, len(token_ids) - (size - stride)), stride):
        piece = token_ids[begin : begin + size]
        first = max(scored, begin + 1 - len(bos))
        scored = begin + len(piece)
        if scored > first:
            found.append(Window((*bos, *piece), scored - first))
    if not found:
        raise ConfigError(f"the text has {len(token_ids)} tokens; it takes at least two")
    return found


def evaluate(
    engine: Engine,
    reference: UnquantizedModel,
    windows: Sequence[Window],
    report_progress: Progress = lambda done, total: None,
) -> Fidelity:
    """Computes all windows with both. report_progress(done, total) counts windows. The engine must have no
    work of its own. Raises ConfigError if the two are not the same shape or a window does not fit, and
    CheckpointError."""
    _check(engine, reference.spec, max(len(window.token_ids) for window in windows))
    tally = _Tally(engine.spec.num_layers)
    num_threads = engine.config.num_threads or num_physical_cores()
    done = 0
    for group in _groups(windows, engine.spec):
        input_ids = torch.tensor([window.token_ids for window in group])
        with _torch_threads(num_threads):
            expected = reference.forward(input_ids)
        _compare(engine, expected, input_ids, _targets(group), tally)
        done += len(group)
        report_progress(done, len(windows))
    return tally.result()


def _check(engine: Engine, spec: ModelSpec, longest: int) -> None:
    for name in ("num_layers", "hidden_size", "vocab_size"):
        ours, other = getattr(engine.spec, name), getattr(spec, name)
        if ours != other:
            raise ConfigError(
                f"{name} is {ours} here and {other} in the unquantized checkpoint: another model"
            )
    if longest > engine.max_model_len:
        raise ConfigError(
            f"windows have {longest} tokens; this model's context here is {engine.max_model_len}"
        )


def _groups(windows: Sequence[Window], spec: ModelSpec) -> Iterator[list[Window]]:
    """Windows of equal length that are computed together, so that the unquantized weights are read less often."""
    bytes_per_token = 4 * (spec.num_layers * spec.hidden_size + spec.vocab_size)
    for length, equal in itertools.groupby(windows, lambda window: len(window.token_ids)):
        size = max(1, GROUP_BYTES // (bytes_per_token * length))
        while group := list(itertools.islice(equal, size)):
            yield group


def _targets(group: list[Window]) -> Tensor:
    """The token after each, int64 [num_tokens of all windows]; -1 where it is not scored."""
    rows = []
    for window in group:
        num_others = len(window.token_ids) - window.num_scored
        rows += [-1] * (num_others - 1) + list(window.token_ids[num_others:]) + [-1]
    return torch.tensor(rows)


def _compare(engine: Engine, expected: Computed, input_ids: Tensor, targets: Tensor, tally: _Tally) -> None:
    """Let the engine compute the same windows, as it computes prompts, and compare step by step."""
    scheduler, length = engine.scheduler, input_ids.shape[1]
    for index, token_ids in enumerate(input_ids.tolist()):
        scheduler.add(TokenSequence(index, token_ids, SamplingParams(), length))
    hidden, logits = [state.flatten(0, 1) for state in expected.hidden], expected.logits.flatten(0, 1)
    while batch := scheduler.schedule():
        inputs = ModelInputs.of(batch, scheduler.block_manager.block_size).with_all_logits()
        window = torch.tensor([item.sequence.sequence_id for item in batch.scheduled])
        counts = torch.tensor([item.num_new_tokens for item in batch.scheduled])
        rows = window.repeat_interleave(counts) * length + inputs.layout.positions
        found = engine.executor.forward(
            inputs,
            observe=lambda index, state, rows=rows: tally.add_hidden(index, hidden[index][rows], state),
        )
        for part in torch.split((targets[rows] >= 0).nonzero().flatten(), ROWS):
            tally.add_logits(logits[rows[part]], found[part], targets[rows[part]])
        scheduler.advance(batch)
        for sequence in batch.sampled:
            scheduler.finish(sequence, FinishReason.LENGTH)


class _Tally:
    """Sums over tokens."""

    def __init__(self, num_layers: int) -> None:
        self._layer_errors = [0.0] * num_layers
        self._num_computed = [0] * num_layers
        self._num_tokens = self._num_agreed = 0
        self._loss = self._reference_loss = self._kl = self._max_kl = 0.0

    def add_hidden(self, index: int, expected: Tensor, found: Tensor) -> None:
        """Hidden states after layer `index`, both [num_tokens, hidden_size]."""
        lengths = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._layer_errors[index] += float(((found - expected).norm(dim=1) / lengths).sum())
        self._num_computed[index] += len(found)

    def add_logits(self, expected: Tensor, found: Tensor, targets: Tensor) -> None:
        """Logits [num_tokens, vocab_size] and the tokens that came. In float64: divergences are as small as
        float32's rounding."""
        p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        self._kl += float(kl.sum())
        self._max_kl = max(self._max_kl, float(kl.max()))
        self._loss += float(nll_loss(q, targets, reduction="sum"))
        self._reference_loss += float(nll_loss(p, targets, reduction="sum"))
        self._num_agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._num_tokens += len(targets)

    def result(self) -> Fidelity:
        errors = zip(self._layer_errors, self._num_computed, strict=True)
        return Fidelity(
            num_tokens=self._num_tokens,
            perplexity=math.exp(self._loss / self._num_tokens),
            reference_perplexity=math.exp(self._reference_loss / self._num_tokens),
            mean_kl=self._kl / self._num_tokens,
            max_kl=self._max_kl,
            top1_agreement=self._num_agreed / self._num_tokens,
            layer_errors=tuple(error / count for error, count in errors),
        )


@contextlib.contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    """Within, torch computes with so many threads; an engine with kernels of its own leaves it one."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
