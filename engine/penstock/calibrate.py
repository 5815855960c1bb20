"""Calibration: quantizes a model's matrices one after the other, by the inputs that each matrix has while a
text is computed (GPTQ): those that it gets from the unquantized model, and those that it gets from matrices
that are quantized already. Takes memory for one layer as the checkpoint has it, for the text's hidden states
twice, and some 36 bytes for each pair of inputs of the widest matrix: 7.4 GB for 14336 inputs. With experts,
each token's state is there twice for each of its experts, too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from penstock.calibration.heard_experts import HeardExperts
from penstock.calibration.listening_kernels import ExactMatrix, ListeningKernels
from penstock.calibration.text_states import TextStates
from penstock.errors import ConfigError, WrongTensor
from penstock.goes_with import Feature, check_together
from penstock.kernels import Int4Tensor, Kernels, Matrix, QuantizedTensor
from penstock.memory.hardware import num_physical_cores
from penstock.model.families.mixture_frame import MixtureSpec
from penstock.model.registry import OpenModel
from penstock.weights.conversion.gptq import Turns, compensate_int4, compensate_int8, plan_turns
from penstock.weights.conversion.torch_threads import threads_for, threads_to_factorize, torch_threads
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec, UnitLayout

#: Tokens of one sequence.
LENGTH = 512
#: Float32 numbers of a matrix that a thread rounds at a time; rows are independent of each other.
CHUNK_ELEMENTS = 1 << 22
#: Has each thread of a pool compute torch's operations alone.
ONE_THREAD = torch.set_num_threads, (1,)
#: The formats that are calibrated.
KNOWN = ((QuantizedTensor,), (Int4Tensor,))


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
        self._store, self._spec = opened.store, opened.spec
        self._kernels = ListeningKernels(kernels)
        self._text = TextStates(opened, self._kernels, torch.tensor(ids))
        self._layers = {tensors: index for index, tensors in enumerate(self._store.tensors.layers)}
        stack = self._store.tensors.stacks[-1]
        #: The layer and the number of each expert, and how many of a layer are still to come.
        self._experts = {
            tensors: (index, number)
            for index, experts in enumerate(stack.experts)
            for number, tensors in enumerate(experts)
        }
        self._num_missing = [len(experts) for experts in stack.experts] or [0] * len(stack.layers)
        #: Of the layer in work: both paths' experts, and both paths' own weights.
        self._heard: list[HeardExperts] = []
        self._own: list[LayerWeights] = []

    # Not inference mode: views made in it can't be written to by the store's other threads.
    @torch.no_grad()
    def read(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """The store's read_with_errors(), with compensated rounding for layers. The head is rounded plainly,
        and the returned errors are those of plain rounding. Tensors must come in the model's order: the
        embedding first, then layer after layer."""
        with torch_threads(1):
            errors = self._store.read_with_errors(tensors, buffer, num_physical_cores())
            self._take(tensors, buffer, is_calibrated=True)
        return errors

    @torch.no_grad()
    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None:
        """Take over tensors that an earlier run has converted; `buffer` holds them as the files do."""
        with torch_threads(1):
            self._take(tensors, buffer, is_calibrated=False)

    def _take(self, tensors: tuple[TensorSpec, ...], buffer: Tensor, is_calibrated: bool) -> None:
        """The embedding, a layer's own tensors, or an expert's, of which `buffer` has the rounded ones."""
        if tensors == self._store.tensors.embedding:
            self._text.embed(_views(tensors, buffer), self._exact_weights(tensors, buffer))
        if tensors not in self._layers and tensors not in self._experts:
            return
        weights, exact = _views(tensors, buffer), self._exact_weights(tensors, buffer)
        if tensors in self._layers:
            self._take_layer(self._layers[tensors], tensors, weights, exact, is_calibrated)
        else:
            self._take_expert(*self._experts[tensors], tensors, (weights, exact), is_calibrated)

    def _take_layer(
        self,
        index: int,
        tensors: tuple[TensorSpec, ...],
        weights: LayerWeights,
        exact: LayerWeights,
        is_calibrated: bool,
    ) -> None:
        if self._num_missing[index]:
            gate_up = next(
                each for each in self._store.tensors.stacks[-1].experts[index][0] if each.name == "gate_up"
            )
            self._heard = [HeardExperts(gate_up.shape[1], gate_up.shape[0]) for _ in range(2)]
            weights, exact = (
                own.asking(heard.silent) for own, heard in zip((weights, exact), self._heard, strict=True)
            )
        for tensor in tensors:
            if tensor.is_matrix and is_calibrated:
                self._calibrate(index, tensor, weights, exact)
        if not self._num_missing[index]:
            self._text.go_on(index, weights, exact)
            return
        # The buffer of the layer is overwritten while experts come.
        self._own = [own.map(torch.clone) for own in (weights, exact)]
        weights, exact = (
            own.asking(heard.hearing) for own, heard in zip(self._own, self._heard, strict=True)
        )
        for _ in self._text.compute(index, weights, exact):
            pass

    def _take_expert(
        self,
        index: int,
        number: int,
        tensors: tuple[TensorSpec, ...],
        both: tuple[LayerWeights, LayerWeights],
        is_calibrated: bool,
    ) -> None:
        """An expert is quantized by the rows that it gets, without drift: for a token, the two paths may
        choose different experts."""
        spec = self._spec
        assert isinstance(spec, MixtureSpec)
        for heard, weights in zip(self._heard, both, strict=True):
            x = heard.rows(number)
            if x is None:
                continue
            is_own = weights is both[0] and is_calibrated
            for tensor in (each for each in tensors if each.is_matrix):
                matrix = weights.matrix(tensor.name)
                if is_own:
                    with threads_for(2.0 * x.shape[0] * x.shape[1] ** 2):
                        hessian = x.t() @ x
                    self._compensate(tensor, matrix, hessian, torch.zeros_like(hessian))
                x = self._kernels.linear(x, matrix, weights.optional(f"{tensor.name}.bias"))
                if tensor.name == "gate_up":
                    x = self._kernels.gated_activation(x, spec.mixture.function)
            heard.answer(number, x)
        self._num_missing[index] -= 1
        if not self._num_missing[index]:
            weights, exact = (
                own.asking(heard.answering) for own, heard in zip(self._own, self._heard, strict=True)
            )
            self._text.go_on(index, weights, exact)
            self._heard, self._own = [], []

    def _exact_weights(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> LayerWeights:
        """A layer's weights, or the embedding's, with the matrices as the checkpoint has them."""
        weights = _views(tensors, buffer)
        for tensor in tensors:
            if tensor.is_matrix:
                rows = torch.cat([self._store.source.rows(tensor, part) for part in tensor.parts])
                weights = weights.with_matrices({tensor.name: ExactMatrix(rows)})
        return weights

    def _calibrate(self, index: int, tensor: TensorSpec, weights: LayerWeights, exact: LayerWeights) -> None:
        """Quantize one matrix by its inputs. The matrices that the layer uses before it are quantized."""
        width = tensor.shape[1]
        hessian, drift = torch.zeros(width, width), torch.zeros(width, width)
        for x, wanted in self._text.inputs(index, tensor.name, weights, exact):
            if x is None or wanted is None:
                return
            with threads_for(2.0 * x.shape[0] * width**2):
                hessian.addmm_(x.t(), x)
                drift.addmm_((wanted - x).t(), x)
        # The fewer tokens there are for each input, the more of the drift is chance.
        num_tokens = self._text.ids.numel()
        drift *= num_tokens / (num_tokens + width)
        self._compensate(tensor, weights.matrix(tensor.name), hessian, drift)

    def _compensate(self, tensor: TensorSpec, out: Matrix, hessian: Tensor, drift: Tensor) -> None:
        assert isinstance(out, QuantizedTensor | Int4Tensor)
        try:
            with threads_to_factorize(tensor.shape[1]):
                turns = plan_turns(hessian, drift)
            chunks = self._store.source.row_chunks(tensor, CHUNK_ELEMENTS)
            with ThreadPoolExecutor(num_physical_cores(), "penstock-rounding", *ONE_THREAD) as pool:
                places = _with_places(chunks, out)
                while some := list(islice(places, 2 * num_physical_cores())):  # map() would read all at once
                    list(pool.map(partial(_compensate, turns=turns), some))
        except ValueError as error:
            raise WrongTensor(f"{' + '.join(tensor.parts)} can't be calibrated: {error}") from error


def _with_places(
    chunks: Iterable[Tensor], out: QuantizedTensor | Int4Tensor
) -> Iterator[tuple[Tensor, QuantizedTensor | Int4Tensor]]:
    """Chunks of rows, each with where it goes."""
    row = 0
    for rows in chunks:
        yield rows, out.rows(row, row + rows.shape[0])
        row += rows.shape[0]


def _compensate(chunk: tuple[Tensor, QuantizedTensor | Int4Tensor], turns: Turns) -> None:
    rows, out = chunk
    if isinstance(out, Int4Tensor):
        compensate_int4(rows, turns, out)
    else:
        compensate_int8(rows, turns, out)


def _check(opened: OpenModel) -> None:
    """Raises ConfigError for models that can't be calibrated."""
    has_experts = bool(opened.store.tensors.stacks[-1].experts)
    kinds = {
        Feature.CALIBRATE: True,
        Feature.FOREIGN_EXPERTS: has_experts and not isinstance(opened.spec, MixtureSpec),
        Feature.QUANTIZED: opened.store.is_quantized,
    }
    features = opened.spec.features | {feature for feature, is_so in kinds.items() if is_so}
    check_together(features, opened.spec.architecture)
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


def _views(tensors: tuple[TensorSpec, ...], buffer: Tensor) -> LayerWeights:
    return LayerWeights.views(UnitLayout.of(tensors), buffer)
