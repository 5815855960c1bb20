"""Calibration: quantizes a model's layers one after the other, by the inputs that each matrix has while a
text is computed (GPTQ). Takes memory for one layer, for the text's hidden states, and some 32 bytes for each
pair of inputs of the widest matrix: 6.6 GB for 14336 inputs."""

from __future__ import annotations

import hashlib

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
LENGTH, STEP_SEQS = 256, 4
BLOCK_SIZE = 16
#: Float32 numbers of a matrix that are rounded at a time; rows are independent of each other.
CHUNK_ELEMENTS = 1 << 24
#: The formats that are calibrated.
KNOWN = ((QuantizedTensor,), (Int4Tensor,))


class _ListeningKernels(ForwardingKernels):
    """Kernels that keep, for each matrix, the sum of x x^T over its inputs x."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        #: By address of the matrix.
        self.hessians: dict[int, Tensor] = {}

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantizedTensor | Int4Tensor):
            width = x.shape[1]
            hessian = self.hessians.setdefault(_address(weight), torch.zeros(width, width))
            hessian.addmm_(x.t(), x)
        return super().linear(x, weight, bias)


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
        self.name: str | None = f"GPTQ, large inputs first, by {len(ids)} sequences of {length}, {digest}"
        self._store = opened.store
        self._kernels, self._listening = kernels, _ListeningKernels(kernels)
        self._plain = opened.family(opened.spec, kernels, length)
        self._family = opened.family(opened.spec, self._listening, length)
        self._ids = torch.tensor(ids)
        spec, blocks = opened.spec, STEP_SEQS * -(-length // BLOCK_SIZE)
        heads, dim = spec.num_kv_heads, spec.head_dim
        buffer = torch.zeros(blocks * BLOCK_SIZE * FLOAT32.bytes_per_token(heads, dim), dtype=torch.uint8)
        self._kv = LayerKV(FLOAT32, kv_views(FLOAT32, buffer, blocks, BLOCK_SIZE, heads, dim))
        self._hidden: list[Tensor] = []
        self._layers = {tensors: index for index, tensors in enumerate(self._store.tensors.layers)}

    # Not inference mode: views made in it can't be written to by the store's other threads.
    @torch.no_grad()
    def read(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """The store's read_with_errors(), with compensated rounding for layers. The head is rounded plainly,
        and the returned errors are those of plain rounding. Tensors must come in the model's order: the
        embedding first, then layer after layer."""
        errors = self._store.read_with_errors(tensors, buffer, num_physical_cores())
        if tensors == self._store.tensors.embedding:
            self._embed(_views(tensors, buffer))
        index = self._layers.get(tensors)
        if index is not None:
            weights = _views(tensors, buffer)
            self._listening.hessians.clear()
            self._sweep(index, weights, is_final=False)
            for tensor in tensors:
                if tensor.is_matrix:
                    self._compensate(tensor, weights.matrix(tensor.name))
            self._sweep(index, weights, is_final=True)
        return errors

    @torch.no_grad()
    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None:
        """Take over tensors that an earlier run has converted; `buffer` holds them as the files do."""
        index = self._layers.get(tensors)
        if tensors == self._store.tensors.embedding:
            self._embed(_views(tensors, buffer))
        elif index is not None:
            self._sweep(index, _views(tensors, buffer), is_final=True)

    def _embed(self, weights: LayerWeights) -> None:
        length = self._ids.shape[1]
        for ids in torch.split(self._ids, STEP_SEQS):
            positions = torch.arange(length).repeat(len(ids))
            self._hidden.append(self._plain.embed(weights, ids.flatten(), positions))

    def _sweep(self, index: int, weights: LayerWeights, is_final: bool) -> None:
        """Compute one layer for the whole text: to collect the inputs of its matrices or, if `is_final`, to
        go on to the next layer."""
        family = self._plain if is_final else self._family
        for part, hidden in enumerate(self._hidden):
            layout = _layout(hidden.shape[0] // self._ids.shape[1], self._ids.shape[1], family.spec.rope)
            after = family.layer(index, weights, hidden, self._kv, layout)
            if is_final:
                self._hidden[part] = after

    def _compensate(self, tensor: TensorSpec, out: Matrix) -> None:
        assert isinstance(out, QuantizedTensor | Int4Tensor)
        hessian = self._listening.hessians.get(_address(out))
        if hessian is None:
            return
        try:
            turns = plan_turns(hessian)
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


def _address(matrix: QuantizedTensor | Int4Tensor) -> int:
    """Where a matrix lies."""
    return (matrix.codes if isinstance(matrix, Int4Tensor) else matrix.qweight).data_ptr()


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
