"""Calibration: quantizes a model's matrices one after the other, by the inputs that each matrix has while a
text is computed (GPTQ): those that it gets from the unquantized model, and those that it gets from matrices
that are quantized already. Takes memory for one layer as the checkpoint has it, for the text's hidden states
twice, and some 36 bytes for each pair of inputs of the widest matrix: 7.4 GB for 14336 inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, WrongTensor
from penstock.kernels import (
    BatchLayout,
    ForwardingKernels,
    Int4Tensor,
    Kernels,
    LayerKV,
    Matrix,
    QuantizedTensor,
)
from penstock.memory.hardware import num_physical_cores
from penstock.memory.kv_cache import kv_views
from penstock.model.registry import OpenModel
from penstock.spec import FLOAT32, RopeSpec
from penstock.weights.conversion.gptq import compensate_int4, compensate_int8, plan_turns
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec, UnitLayout

#: Tokens of one sequence, and sequences of a step.
LENGTH, STEP_SEQS = 512, 2
BLOCK_SIZE = 16
#: Float32 numbers of a matrix that are rounded at a time; rows are independent of each other.
CHUNK_ELEMENTS = 1 << 24
#: The formats that are calibrated.
KNOWN = ((QuantizedTensor,), (Int4Tensor,))


class ExactMatrix(NamedTuple):
    """A matrix as the checkpoint has it."""

    weight: Tensor  # of any floating dtype [out_features, in_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def rows(self, start: int, stop: int) -> ExactMatrix:
        """A view of the output channels from `start` to `stop`."""
        return ExactMatrix(self.weight[start:stop])

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        return self.weight[row_ids].float()

    def map(self, function: Callable[[Tensor], Tensor]) -> ExactMatrix:
        """The matrix with `function` applied to its tensor."""
        return ExactMatrix(function(self.weight))

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features]."""
        return self.weight.float()


class _Heard(Exception):
    """All inputs of the wanted matrix are there; what would be computed from them is not needed."""


class _ListeningKernels(ForwardingKernels):
    """Kernels that multiply by exact matrices, too, and hear the inputs of one matrix."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._address, self._num_tokens = 0, 0
        self._inputs: list[Tensor] = []

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if _address(weight) == self._address:
            self._inputs.append(x)
            if sum(map(len, self._inputs)) == self._num_tokens:
                raise _Heard
        if not isinstance(weight, ExactMatrix):
            return super().linear(x, weight, bias)
        y = x @ weight.dequantize().t()
        return y if bias is None else y + bias

    def inputs(self, matrix: Matrix, num_tokens: int, compute: Callable[[], object]) -> Tensor | None:
        """The inputs of a matrix, float32 [num_tokens, in_features], while compute() computes a layer; None
        if the layer does not multiply all tokens by the matrix."""
        self._address, self._num_tokens = _address(matrix), num_tokens
        try:
            compute()
        except _Heard:
            return torch.cat(self._inputs)
        finally:
            self._address, self._inputs = 0, []
        return None


class Calibration:
    """The Rounding of a conversion. The conversion must go through the layers in their order."""

    looks_back = True

    def __init__(
        self,
        opened: OpenModel,
        kernels: Kernels,
        token_ids: list[int],
        num_tokens: int,
        prefix: tuple[int, ...] = (),
    ) -> None:
        """Takes the text's first `num_tokens` tokens, in sequences of LENGTH, of which each begins with
        `prefix`. Raises ConfigError if the text is too short, the checkpoint is quantized already, or a
        matrix is kept in another format."""
        _check(opened)
        length = min(LENGTH, opened.spec.max_position_embeddings)
        ids = _sequences(token_ids[:num_tokens], length, prefix)
        digest = hashlib.sha256(str(ids).encode()).hexdigest()
        self.name: str | None = (
            f"GPTQ with drift, large inputs first, by {len(ids)} sequences of {length}, {digest}"
        )
        self._store = opened.store
        self._kernels = _ListeningKernels(kernels)
        self._family = opened.family(opened.spec, self._kernels, length)
        self._ids = torch.tensor(ids)
        spec, blocks = opened.spec, STEP_SEQS * -(-length // BLOCK_SIZE)
        heads, dim = spec.num_kv_heads, spec.head_dim
        buffer = torch.zeros(blocks * BLOCK_SIZE * FLOAT32.bytes_per_token(heads, dim), dtype=torch.uint8)
        self._kv = LayerKV(FLOAT32, kv_views(FLOAT32, buffer, blocks, BLOCK_SIZE, heads, dim))
        #: Hidden states of the text, STEP_SEQS sequences at a time: by matrices that are quantized already,
        #: and by the unquantized ones.
        self._hidden: list[Tensor] = []
        self._exact: list[Tensor] = []
        self._layers = {tensors: index for index, tensors in enumerate(self._store.tensors.layers)}

    # Not inference mode: views made in it can't be written to by the store's other threads.
    @torch.no_grad()
    def read(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """The store's read_with_errors(), with compensated rounding for layers. The head is rounded plainly,
        and the returned errors are those of plain rounding. Tensors must come in the model's order: the
        embedding first, then layer after layer."""
        errors = self._store.read_with_errors(tensors, buffer, num_physical_cores())
        if tensors == self._store.tensors.embedding:
            self._embed(_views(tensors, buffer), self._exact_weights(tensors, buffer))
        index = self._layers.get(tensors)
        if index is not None:
            weights, exact = _views(tensors, buffer), self._exact_weights(tensors, buffer)
            for tensor in tensors:
                if tensor.is_matrix:
                    self._calibrate(index, tensor, weights, exact)
            self._go_on(index, weights, exact)
        return errors

    @torch.no_grad()
    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None:
        """Take over tensors that an earlier run has converted; `buffer` holds them as the files do."""
        index = self._layers.get(tensors)
        if tensors == self._store.tensors.embedding:
            self._embed(_views(tensors, buffer), self._exact_weights(tensors, buffer))
        elif index is not None:
            self._go_on(index, _views(tensors, buffer), self._exact_weights(tensors, buffer))

    def _embed(self, weights: LayerWeights, exact: LayerWeights) -> None:
        length = self._ids.shape[1]
        for ids in torch.split(self._ids, STEP_SEQS):
            positions = torch.arange(length).repeat(len(ids))
            self._hidden.append(self._family.embed(weights, ids.flatten(), positions))
            self._exact.append(self._family.embed(exact, ids.flatten(), positions))

    def _exact_weights(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> LayerWeights:
        """A layer's weights, or the embedding's, with the matrices as the checkpoint has them."""
        weights = _views(tensors, buffer)
        for tensor in tensors:
            if tensor.is_matrix:
                rows = torch.cat([self._store.source.rows(tensor, part) for part in tensor.parts])
                weights = weights.joined(tensor.name, ExactMatrix(rows))
        return weights

    def _layer(self, index: int, weights: LayerWeights, hidden: Tensor) -> Tensor:
        length = self._ids.shape[1]
        layout = _layout(hidden.shape[0] // length, length, self._family.spec.rope)
        return self._family.layer(index, weights, hidden, self._kv, layout)

    def _go_on(self, index: int, weights: LayerWeights, exact: LayerWeights) -> None:
        """Compute one layer for the whole text."""
        for part in range(len(self._hidden)):
            self._hidden[part] = self._layer(index, weights, self._hidden[part])
            self._exact[part] = self._layer(index, exact, self._exact[part])

    def _inputs(self, index: int, name: str, weights: LayerWeights, hidden: Tensor) -> Tensor | None:
        """The inputs of a layer's matrix for some sequences."""
        return self._kernels.inputs(
            weights.matrix(name), len(hidden), lambda: self._layer(index, weights, hidden)
        )

    def _calibrate(self, index: int, tensor: TensorSpec, weights: LayerWeights, exact: LayerWeights) -> None:
        """Quantize one matrix by its inputs. The matrices that the layer uses before it are quantized."""
        width = tensor.shape[1]
        hessian, drift = torch.zeros(width, width), torch.zeros(width, width)
        for hidden, exact_hidden in zip(self._hidden, self._exact, strict=True):
            x = self._inputs(index, tensor.name, weights, hidden)
            wanted = self._inputs(index, tensor.name, exact, exact_hidden)
            if x is None or wanted is None:
                return
            hessian.addmm_(x.t(), x)
            drift.addmm_((wanted - x).t(), x)
        # The fewer tokens there are for each input, the more of the drift is chance.
        num_tokens = self._ids.numel()
        drift *= num_tokens / (num_tokens + width)
        self._compensate(tensor, weights.matrix(tensor.name), hessian, drift)

    def _compensate(self, tensor: TensorSpec, out: Matrix, hessian: Tensor, drift: Tensor) -> None:
        assert isinstance(out, QuantizedTensor | Int4Tensor)
        try:
            turns = plan_turns(hessian, drift)
            row = 0
            for rows in self._store.source.row_chunks(tensor, CHUNK_ELEMENTS):
                chunk = out.rows(row, row + rows.shape[0])
                if isinstance(chunk, Int4Tensor):
                    compensate_int4(rows, turns, chunk)
                else:
                    compensate_int8(rows, turns, chunk)
                row += rows.shape[0]
        except ValueError as error:
            raise WrongTensor(f"{' + '.join(tensor.parts)} can't be calibrated: {error}") from error


def _check(opened: OpenModel) -> None:
    """Raises ConfigError for models that can't be calibrated."""
    if opened.spec.has_encoder or opened.spec.sees_prompt_both_ways:
        raise ConfigError(
            f"{opened.spec.architecture} sees its prompts both ways, and only decoders that see a text "
            "one way are calibrated so far; convert without --calibrate"
        )
    if opened.store.is_quantized:
        raise ConfigError(
            "the checkpoint is quantized already; calibrate where the unquantized one is converted"
        )
    for tensor in opened.store.tensors.multiplied:
        if tensor.format.operand_types not in KNOWN:
            raise ConfigError(
                f"{' + '.join(tensor.parts)} is kept as {tensor.format.name}, and calibration rounds "
                "INT8 and INT4 alone: convert without a calibration text"
            )


def _sequences(token_ids: list[int], length: int, prefix: tuple[int, ...]) -> list[list[int]]:
    """Sequences of `length` tokens. Raises ConfigError if there is none."""
    own = length - len(prefix)
    if len(token_ids) < own:
        raise ConfigError(
            f"{len(token_ids)} tokens are too few to calibrate by; at least {own} are needed, and some "
            "thousands are better: give a longer text, or a larger --calibration-tokens"
        )
    starts = range(0, len(token_ids) - own + 1, own)
    return [[*prefix, *token_ids[start : start + own]] for start in starts]


def _address(matrix: Matrix) -> int:
    """Where a matrix lies."""
    assert isinstance(matrix, QuantizedTensor | Int4Tensor | ExactMatrix)
    return matrix[0].data_ptr()


def _views(tensors: tuple[TensorSpec, ...], buffer: Tensor) -> LayerWeights:
    return LayerWeights.views(UnitLayout.of(tensors), buffer)


def _layout(num_seqs: int, length: int, rope: RopeSpec | None) -> BatchLayout:
    """A batch of whole sequences of one length, each in blocks of its own."""
    width = -(-length // BLOCK_SIZE)
    tables = torch.arange(num_seqs * width, dtype=torch.int32).view(num_seqs, width)
    positions = torch.arange(length)
    slots = (tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)[:, :length]
    rope_length = rope.frequency_length(length, length) if rope is not None else 0
    return BatchLayout(
        positions=positions.repeat(num_seqs),
        slot_mapping=slots.flatten(),
        block_tables=tables,
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * length,
        context_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        rope_lengths=torch.full((num_seqs * length,), rope_length) if rope_length else None,
    )
