"""Warm-up: measures what memory a step takes beside weights, keys and values. The largest step that the
config allows is computed before memory is planned. Layers are alike, so the sweep computes the largest layer
twice (once where the model has one layer)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from penstock.cache.kv_cache import KVCache
from penstock.config import EngineConfig
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.executor import Executor
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.kernels import ForwardingKernels, Matrix, RouterFunction
from penstock.kernels.scratch import allocated
from penstock.memory.pools import MemoryPool, whole_lines
from penstock.model.family import Family
from penstock.spec import KVLayout, ModelSpec
from penstock.state_layout import GuessRoom
from penstock.weights.layer_weights import AskForExperts, ExpertGroup, LayerWeights, no_experts, with_head
from penstock.weights.tensors import ModelTensors, TensorSpec, Unit, UnitLayout

#: Parameters with which the sampler copies and sorts a row of logits. Grammars and lists of allowed tokens
#: may copy the row once more, which takes 4 bytes for each token of the vocabulary.
_PARAMS = SamplingParams(top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)


class ZeroProducts(ForwardingKernels):
    """Kernels whose products are zero. The weights of a warm-up are not initialized, and garbage in the
    output of a router would send each token elsewhere. With zeros, all tokens choose the same experts: no
    step has more rows for one expert."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias).zero_()

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        return super().router_scores(x, weight, bias, function).zero_()


def largest_step(
    config: EngineConfig, longest: int, num_past: int = 0, spec: ModelSpec | None = None
) -> Batch:
    """A step with as many tokens of as many sequences as the config allows. Each sequence has `num_past`
    computed tokens, and none is longer than `longest`. All keys and values lie in block 0. A model that
    encodes its inputs encodes as many tokens as a step encodes at most, or one input as long as `longest`.
    With recurrent states the longest sequence has a guess, and replays one: its rows are put in order."""
    rope, has_encoder = (spec.rope, spec.has_encoder) if spec is not None else (None, False)
    has_states = spec is not None and spec.state_bytes > 0
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    left = config.max_num_batched_tokens
    is_whole = spec is not None and spec.sees_prompt_both_ways
    if is_whole:  # the other sequences' tokens come beside a prompt that is as long as a step
        left += num_seqs - 1
    scheduled = []
    for index in range(num_seqs):
        num_new = min(longest - num_past, left - (num_seqs - index - 1))
        left -= num_new
        has_guess = has_states and not index and num_new > 1 and config.speculation != "off"
        num_new -= has_guess
        num_tokens = num_past + num_new
        num_encoded = max(config.max_num_batched_tokens, longest) if has_encoder and not index else 1
        sequence = Sequence(
            index,
            GenerationRequest([0] * (num_encoded if has_encoder else num_tokens), _PARAMS),
            longest + 1,
            frame=PromptFrame((0,) * num_tokens if has_encoder else (), is_whole=is_whole),
        )
        sequence.advance(num_past)
        sequence.block_table += [0] * -(-(num_tokens + has_guess) // config.block_size)
        sequence.state_slot = 0 if has_states else None
        if rope is not None:
            sequence.follow_length(rope.frequency_length(num_tokens, num_tokens))
        if sequence.encoder is not None:
            sequence.encoder.block_table += [0] * -(-num_encoded // config.block_size)
        item = ScheduledSequence.of(sequence, num_new)
        if has_guess:
            item = item._replace(drafts=DraftTree.chain((0,)), guess_rows=(0,), replayed=(0,))
        scheduled.append(item)
    encoded = (scheduled[0].sequence,) if has_encoder else ()
    return Batch(tuple(scheduled), encoded=encoded)


@torch.inference_mode()
def measure_activations(
    family: Family, tensors: ModelTensors, config: EngineConfig, kv_layout: KVLayout, batch: Batch
) -> int:
    """Bytes at the peak of a step with this batch, on the family's device. The weights are not initialized.
    On the CPU they take no memory, since nothing writes their pages."""
    device = family.device
    embedding, head = _unread(tensors.embedding, torch.device("cpu")), _unread(tensors.head, device)
    head = with_head(tensors, head, _unread(tensors.embedding, device) if tensors.is_tied else embedding)
    layers = _LargestTwice(tensors, device)
    # Layers may differ in keys, values and states where there is one stack. Where there are several, any
    # place serves.
    places = layers.places(tensors.stacks[0].name) if len(tensors.stacks) == 1 else ()
    spec = family.spec
    num_bytes = whole_lines(config.block_size * spec.kv_bytes_per_token(kv_layout))
    guesses = GuessRoom(num_rows=16, num_paths=1)  # rows of whole cache lines
    num_bytes += spec.state_bytes + guesses.num_rows * spec.guess_bytes + spec.path_bytes

    def make_arena(num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    pool = MemoryPool("warm-up", num_bytes, make_arena)
    kv_cache = KVCache(spec, 1, config.block_size, kv_layout, pool, num_states=1, guesses=guesses)
    executor = Executor(family, embedding, head, layers, kv_cache, config.max_num_seqs, places)
    sampler = Sampler(family.spec.vocab_size, frozenset())

    def step() -> None:
        for logits in executor.forward(ModelInputs.of(batch, config.block_size)):
            sampler.choose([logits[:1].zero_()], Batch(batch.scheduled[:1]))  # the sampler takes row by row

    if device.type == "cuda":
        torch.cuda.empty_cache()  # a step that uses torch's reserve would seem to take no memory
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_reserved(device)) - int(before)
    recorder = _PeakRecorder()
    with recorder, allocated():
        step()
    return recorder.peak_bytes


def _unread(
    tensors: tuple[TensorSpec, ...], device: torch.device, ask: AskForExperts = no_experts
) -> LayerWeights:
    layout = UnitLayout.of(tensors)
    weights = LayerWeights.views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device), ask)
    # Integers of 32 bits are the orders of columns, which kernels take as indices.
    weights.map(lambda part: part.zero_() if part.dtype == torch.int32 else part)
    return weights


class _LargestTwice:
    """A LayerSource that brings the largest layer of each kind in a stack: layers of a kind have tensors
    of the same names. If there are several layers of a kind, the largest one comes twice, so that
    a layer's input and output are in memory together. All experts are the largest one."""

    def __init__(self, tensors: ModelTensors, device: torch.device) -> None:
        self._units = tensors.units
        self.torch_device = device

    def begin_step(self, num_tokens: int) -> None: ...

    def runs(self, stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
        experts = [unit for unit in self._units if unit.key.stack == stack and unit.key.expert is not None]
        expert = max(experts, key=_num_bytes).tensors if experts else ()

        def ask(numbers: Iterable[int], _: Iterable[int]) -> Iterator[ExpertGroup]:
            weights = _unread(expert, self.torch_device)
            yield [(number, weights) for number in numbers]

        for unit, times in self._chosen(stack):
            yield from [[_unread(unit.tensors, self.torch_device, ask)]] * times

    def places(self, stack: str) -> list[int]:
        """The places in the stack of the layers that come."""
        return [unit.key.layer for unit, times in self._chosen(stack) for _ in range(times)]

    def synchronize(self) -> None:
        pass

    def _chosen(self, stack: str) -> list[tuple[Unit, int]]:
        """Dense units, and how often each comes."""
        kinds = defaultdict[frozenset[str], list[Unit]](list)
        for unit in self._units:
            # Products take the same memory without their lower planes.
            if unit.key.stack == stack and unit.key.expert is None and unit.key.plane is None:
                kinds[frozenset(tensor.name for tensor in unit.tensors)].append(unit)
        return [(max(alike, key=_num_bytes), min(2, len(alike))) for alike in kinds.values()]


def _num_bytes(unit: Unit) -> int:
    return unit.num_bytes


class _PeakRecorder(TorchFunctionMode):
    """Counts the bytes of all tensors that operations make, and notes the most that live at once. A
    TorchDispatchMode would also see tensors that operations make for themselves, but importing it takes a
    second."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._num_bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
