"""Operands of the kernels: a quantized matrix, one layer's K and V, the ragged shape of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, NumbersRecord
from penstock.spec import FLOAT16, FLOAT32, INT8, LATENT_FLOAT16, LATENT_FLOAT32, SCALE_BYTES, KVLayout

#: "relu2" is the square of "relu".
ActivationFunction = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "sigmoid"]
#: Numbers by which compiled kernels know activation functions.
ACTIVATION_CODES: dict[ActivationFunction, int] = {
    "silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4,
    "sigmoid": 5,
}  # fmt: skip


class ClampedGate(NamedTuple):
    """gpt-oss's function between an expert's two products: (up + 1) * gate * sigmoid(sharpness * gate), with
    gate at most `limit`, and up from -limit to limit. The columns of gate and up lie by turns."""

    sharpness: float
    limit: float

    def apply(self, activation: Callable[[Tensor, ActivationFunction], Tensor], gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * width] -> [num_tokens, width], with kernels' activation(). silu(a x) / a is
        x * sigmoid(a x). Every other operation rounds once for each element."""
        gate, up = gate_up.view(len(gate_up), -1, 2).unbind(2)
        sharp = gate.clamp(max=self.limit) * self.sharpness
        return activation(sharp, "silu") / self.sharpness * (up.clamp(-self.limit, self.limit) + 1)


class LimitedGate(NamedTuple):
    """silu(gate) * up, with up from -limit to limit. The gate is at most `limit` (DeepSeek V4), or what silu
    makes of the gate is (Ling 3). The columns of the gate lie before those of up."""

    limit: float
    is_behind: bool = False

    def apply(self, activation: Callable[[Tensor, ActivationFunction], Tensor], gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * width] -> [num_tokens, width], with kernels' activation()."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate if self.is_behind else gate.clamp(max=self.limit)
        opened = activation(gate, "silu")
        return (opened.clamp(max=self.limit) if self.is_behind else opened) * up.clamp(
            -self.limit, self.limit
        )


#: What lies between the two products of a gated mlp: f(gate) * up with a function f, or one with limits.
GatedFunction = ActivationFunction | ClampedGate | LimitedGate
#: The numbers by which compiled kernels know the functions with limits.
CLAMPED_GATE_CODE, LIMITED_GATE_CODE = 6, 7


def gated_code(function: GatedFunction) -> tuple[int, float, float]:
    """What compiled kernels take of a function: its number, and two more of one with limits."""
    if isinstance(function, ClampedGate):
        return CLAMPED_GATE_CODE, *function
    if isinstance(function, LimitedGate):
        return LIMITED_GATE_CODE, float(function.is_behind), function.limit
    return ACTIVATION_CODES[function], 0.0, 0.0


#: What makes scores of a router's logits: nothing, a softmax over all of them, or a sigmoid of each.
RouterFunction = Literal["none", "softmax", "sigmoid"]
#: Numbers by which compiled kernels know these functions.
ROUTER_CODES: dict[RouterFunction, int] = {"none": 0, "softmax": 1, "sigmoid": 2}
#: Numbers by which compiled kernels know layouts of keys and values: an element has 4 >> number bytes.
KV_CODES = {FLOAT32.name: 0, FLOAT16.name: 1, INT8.name: 2, LATENT_FLOAT32.name: 0, LATENT_FLOAT16.name: 1}
#: A row of so many INT8 inputs times a row of weights fits int32: 128 * 128 * 131071 < 2^31. Fast kernels
#: add a row up in int32, and reference.py computes rows with more inputs.
MAX_IN_FEATURES = 131071


class Matrix(Protocol):
    """A matrix of weights in some weight format. Kernels know the format by the value's type."""

    @property
    def out_features(self) -> int: ...

    def rows(self, start: int, stop: int) -> Matrix:
        """A view of the output channels from `start` to `stop`."""

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Matrix:
        """The matrix with `function` applied to each of its tensors, for example to copy it to another
        device."""

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features]."""


class _Int8Parts(NamedTuple):
    qweight: Tensor  # int8 [out_features, in_features], contiguous
    scale: Tensor  # float32 [out_features] or [out_features, num_groups], contiguous


class QuantizedTensor(_Int8Parts):
    """A matrix of INT8 integers, symmetric: w = qweight * scale. A scale belongs to an output channel or to a
    group of the channel's inputs; all groups have the same size."""

    @cached_property
    def native(self) -> tuple[int, int, int, int]:
        """out_features, num_groups, and the addresses of qweight and scale, for compiled kernels of the host.
        The addresses are asked for once: a tensor never moves. A streamed buffer that gets another layer's
        bytes keeps its address, and each layer has a matrix of its own in the buffer."""
        return self.out_features, self.num_groups, self.qweight.data_ptr(), self.scale.data_ptr()

    @cached_property
    def record(self) -> MatrixRecord | None:
        """The same for compiled kernels of experts; None: the rows are too wide for them."""
        out_features, num_groups, qweight, scale = self.native
        numbers, in_features = NumbersRecord(scale=scale, block_groups=1), self.shape[1]
        if in_features > MAX_IN_FEATURES:
            return None
        return MatrixRecord(qweight, None, numbers, num_groups, in_features, out_features)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.qweight.shape[0], self.qweight.shape[1]

    @property
    def num_groups(self) -> int:
        return 1 if self.scale.dim() == 1 else self.scale.shape[1]

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """A view of the output channels from `start` to `stop`."""
        return QuantizedTensor(self.qweight[start:stop], self.scale[start:stop])

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        rows = QuantizedTensor(self.qweight[row_ids], self.scale[row_ids])
        return rows.dequantize() if self.num_groups > 1 else rows.qweight.float() * rows.scale.view(-1, 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The matrix with `function` applied to each of its tensors."""
        return QuantizedTensor(function(self.qweight), function(self.scale))

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features]."""
        scale = self.scale.view(self.qweight.shape[0], -1)
        return self.qweight.float() * scale.repeat_interleave(self.qweight.shape[1] // scale.shape[1], 1)


@dataclass(frozen=True)
class LayerKV:
    """One layer's part of the KV cache."""

    layout: KVLayout
    parts: tuple[Tensor, ...]  # of the shapes that the layout says
    #: The layer's recurrent states: float32 [num_states, *shape] for each part of its StateLayout.
    states: tuple[Tensor, ...] = ()
    #: For each part of the state: what drafts brought to it, float32 [num_rows, *shape] for each shape of
    #: StatePart.fed.
    kept: tuple[tuple[Tensor, ...], ...] = ()
    #: Room for copies of states, from which paths of guesses go on: float32 [num_paths, *shape] for each
    #: part.
    ahead: tuple[Tensor, ...] = ()

    @cached_property
    def plain(self) -> tuple[int, Tensor, Tensor | None]:
        """The code of a layout in KV_CODES; K [num_blocks, num_kv_heads, head_dim, block_size]; V
        [num_blocks, num_kv_heads, block_size, head_dim], or None where the beginning of a key is the value.
        With INT8 both are [num_blocks, num_kv_heads, head_dim + SCALE_BYTES, block_size], which
        int8_parts() cuts. Raises TypeError for another layout."""
        code = KV_CODES.get(self.layout.name)
        if code is None:
            raise TypeError(
                f"these kernels can't read keys and values as {self.layout.name}; they know: "
                + ", ".join(KV_CODES)
            )
        has_values = len(self.parts) > 1 and self.layout.parts[1].name == "v"
        return code, self.parts[0], self.parts[1] if has_values else None

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """num_kv_heads, head_dim, block_size, of a layout with a code."""
        _, num_kv_heads, width, block_size = self.plain[1].shape
        return num_kv_heads, width - (SCALE_BYTES if self.layout is INT8 else 0), block_size

    def int8_parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of INT8 keys and values: codes of K, int8 [num_blocks, num_kv_heads, head_dim, block_size];
        codes of V, int8 [num_blocks, num_kv_heads, block_size, head_dim]; scales of K and of V, bfloat16
        [num_blocks, num_kv_heads, block_size] each."""
        num_heads, head_dim, block_size = self.sizes
        sizes = [head_dim * block_size, SCALE_BYTES * block_size]
        (k, k_scale), (v, v_scale) = (torch.split(part.flatten(2), sizes, 2) for part in self.parts)
        return (
            k.view(-1, num_heads, head_dim, block_size), v.view(-1, num_heads, block_size, head_dim),
            k_scale.view(torch.bfloat16), v_scale.view(torch.bfloat16),
        )  # fmt: skip

    @cached_property
    def native(self) -> tuple[int, int | None, int, int, int, int]:
        """For compiled kernels of the host: the addresses of K and V, the layout's code, num_kv_heads,
        head_dim, block_size. Raises TypeError for a layout without a code."""
        code, k, v = self.plain
        return k.data_ptr(), address(v), code, *self.sizes

    @cached_property
    def native_states(self) -> tuple[int, int]:
        """Likewise the addresses of a recurrent layer's states, of which there may be one: then 0."""
        rows, *heads = (each.data_ptr() for each in self.states)
        return rows, heads[0] if heads else 0


@dataclass(frozen=True)
class StateSlots:
    """Where the recurrent states of a step's sequences lie. A sequence whose first token is in the step
    begins with a zero state, whatever is in its slot."""

    slots: Tensor  # int32 [num_seqs]
    #: Copies that are kept of states in the middle of a step. Those of sequence s are
    #: save_start[s]:save_start[s + 1], in the order of rows. int32 [num_seqs + 1]
    save_start: Tensor
    #: The step's row after which the state is copied, and the slot that gets the copy. int32 [num_saves]
    save_rows: Tensor
    save_slots: Tensor


@dataclass(frozen=True)
class GuessedPaths:
    """The guesses of a step, path by path from a sequence's first guess to the last one of a run. A path goes
    on from a copy of the state that the sequence's certain tokens leave. A guess may lie on several paths."""

    slots: Tensor  # int64 [num_paths]: the slot of each path's sequence
    rows: Tensor  # int64 [num_path_rows]: the step's rows of the paths
    #: Of `rows`. The copies of states have the slots 0, 1, ...
    layout: BatchLayout
    guesses: Tensor  # int64 [num_guesses]: the step's row of each guess
    kept: Tensor  # int64 [num_guesses]: the row of LayerKV.kept that gets what the guess brings to the state


@dataclass(frozen=True)
class GuessedStates:
    """The order in which layers with states compute a step's rows, if it has guesses or replays some. Each
    sequence has one state: first it gets the right guesses of the sequence's last step, which are replayed
    from LayerKV.kept, and then the step's tokens that are certain. The paths come after that."""

    replayed: Tensor  # int64 [num_replayed]: rows of LayerKV.kept
    #: int64 [num_certain_rows]: rows of the `replayed` ones with the step's after them
    rows: Tensor
    #: Of `rows`.
    layout: BatchLayout
    #: int64 [num_tokens]: where each of the step's rows is among the results of `rows`, with those of
    #: paths.rows after them
    places: Tensor
    paths: GuessedPaths | None = None

    def certain(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """What `rows` bring to a state, by what the step's rows [num_tokens, ...] bring. kept: of guesses;
        None: it does not matter what the replayed ones bring."""
        if not len(self.replayed):
            return x[self.rows]
        before = x.new_zeros(len(self.replayed), *x.shape[1:]) if kept is None else kept[self.replayed]
        return torch.cat((before, x))[self.rows]


@dataclass(frozen=True)
class RamSplits:
    """Splits of 256 keys to which the processor attends where they lie: in RAM, beside a card. A token that
    has them sees none of their keys in the card's memory."""

    #: Of each, one token's: the token's row in the step, its position, the split, and the place of the
    #: result. int32 [num_items, 4]
    items: Tensor
    #: The splits' blocks, counted through those in RAM: int32 [num_items, 256 / block_size].
    blocks: Tensor
    #: A multiple of the number of the step's tokens.
    num_places: int


@dataclass(frozen=True)
class RamKV:
    """What a layer's tokens see in RAM, beside a card."""

    #: The layer's blocks that lie in RAM.
    kv: LayerKV
    splits: RamSplits
    #: The items' rows and splits, int64 [num_items] each, on the card.
    tokens: Tensor
    numbers: Tensor


class WritesKV(Protocol):
    """Kernels that write K and V."""

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None: ...


@dataclass(frozen=True)
class BatchLayout:
    """Which tokens of a step belong to which sequence, and where their K and V lie.

    The step's tokens lie one sequence after the other. The tokens query_start[s]:query_start[s + 1] belong to
    sequence s, and are the last of this sequence's context_lens[s] tokens.
    """

    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: block * block_size + offset in the block
    block_tables: Tensor  # int32 [num_seqs, max_blocks], padded with 0
    query_start: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs], the step's tokens included
    #: RopeSpec.frequency_length() of each token's sequence, int64 [num_tokens]; None where all are 0.
    rope_lengths: Tensor | None = None
    #: int32 [num_seqs]: every token of sequence s sees the sequence's first prefix_lens[s] keys, also those
    #: after the token; at most context_lens[s]. None: a token sees the keys up to its own position, and no
    #: others.
    prefix_lens: Tensor | None = None
    #: Where the encoded inputs of the same tokens' sequences lie, for a decoder that attends to them: all
    #: keys are in the prefix. None in models without an encoder.
    cross: BatchLayout | None = None
    #: None in models without recurrent states, and where `guessed` has the order of the rows.
    states: StateSlots | None = None
    #: None in steps without guesses, unless right guesses of a step before are replayed.
    guessed: GuessedStates | None = None
    #: Tokens whose K and V are written once more, into blocks of branches of drafts, which go on from them:
    #: their rows, and the slots. int64 [num_copies]; None where there are none.
    copied_rows: Tensor | None = None
    copied_slots: Tensor | None = None
    #: Splits of keys that are not in the card's memory, and whose blocks are below 0 in block_tables. None
    #: where there are none; only kernels that leave them to the processor (attending_in_ram()) get others.
    in_ram: RamKV | None = None
    #: What layers of a step leave for later layers of the same step, by names of their own.
    notes: dict[str, Any] = field(default_factory=dict, compare=False)

    def to(self, device: torch.device) -> BatchLayout:
        """On a device; queued, if it is a GPU."""
        return self.with_tensors([each.to(device, non_blocking=True) for each in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """All tensors, also those inside of its parts, in an order of their own."""
        found = list[Tensor]()
        _add_tensors(self, found)
        return found

    def with_tensors(self, tensors: Iterable[Tensor]) -> BatchLayout:
        """The layout with others in place of tensors(), in their order."""
        assert self.in_ram is None, "it is for one layer, on one device"
        found: BatchLayout = _with_tensors(self, iter(tensors))
        return found

    def write_kv(self, kernels: WritesKV, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        """Write a layer's K and V of the step's tokens, [num_tokens, num_kv_heads, head_dim] each."""
        kernels.write_kv(k, v, kv, self.slot_mapping)
        if self.copied_rows is not None and self.copied_slots is not None:
            kernels.write_kv(k[self.copied_rows], v[self.copied_rows], kv, self.copied_slots)

    @cached_property
    def native(self) -> tuple[int, int, int, int, int | None, int]:
        """For compiled kernels of the host, which all layers of a step call: the address of block_tables,
        max_blocks, the addresses of query_start, context_lens and prefix_lens, num_seqs."""
        return (
            self.block_tables.data_ptr(), self.block_tables.shape[1], self.query_start.data_ptr(),
            self.context_lens.data_ptr(), address(self.prefix_lens), self.num_seqs,
        )  # fmt: skip

    @cached_property
    def native_states(self) -> tuple[int, int, int, int, int, int, int]:
        """For compiled kernels of the host: the addresses of query_start, context_lens and the tensors of
        `states`, num_seqs."""
        states = self.states
        assert states is not None, "the step's sequences have no states"
        return (
            self.query_start.data_ptr(), self.context_lens.data_ptr(), states.slots.data_ptr(),
            states.save_start.data_ptr(), states.save_rows.data_ptr(), states.save_slots.data_ptr(),
            self.num_seqs,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True)
class DistanceBias:
    """A term of each score that depends on the distance from a query to a key, as in T5 (arXiv
    1910.10683)."""

    #: float32 [num_heads, 2 * max_distance + 1]. A key `d` positions after its query (before it, where d is
    #: negative) has the entry max_distance + d; keys that are farther away have that of max_distance.
    table: Tensor
    #: The sequence's first tokens are a segment of their own if this is above 0: their number. Between a
    #: query and a key of different segments, the distance does not count but `across`.
    boundary: int = 0
    #: float32 [2, num_heads]: for queries of the first segment, then for those of the second.
    across: Tensor | None = None

    @property
    def max_distance(self) -> int:
        return self.table.shape[1] // 2

    @property
    def native(self) -> tuple[int, int, int, int | None]:
        """For compiled kernels of the host: the address of the table, max_distance, boundary, the address of
        `across`."""
        return self.table.data_ptr(), self.max_distance, self.boundary, address(self.across)


@dataclass(frozen=True)
class AttentionSpec:
    """Constants of one layer's attention."""

    num_heads: int
    #: Scores are q . k * scale.
    scale: float
    #: A token attends to the last `window` tokens, itself included; 0 means to all tokens.
    window: int = 0
    #: Scores become softcap * tanh(score / softcap); 0 means no cap (Gemma 2, arXiv 2408.00118).
    softcap: float = 0.0
    #: ALiBi: slope * (key position - query position) is added (arXiv 2108.12409). float32 [num_heads]
    alibi_slopes: Tensor | None = None
    distance_bias: DistanceBias | None = None
    #: Positions are cut into chunks of so many, and a token attends to its own chunk alone; 0 means to all
    #: tokens. A layer has a window or chunks, or neither.
    chunk: int = 0
    #: A score of each head beside those of its keys, float32 [num_heads]. The sink takes a share of the
    #: softmax and has no value (arXiv 2309.17453).
    sinks: Tensor | None = None
    #: Where the cached row of a token is key and value: the first so many numbers are the value.
    latent_dim: int = 0

    @property
    def has_biases(self) -> bool:
        """Whether scores have terms of distances (ModelSpec.biases_scores)."""
        return self.alibi_slopes is not None or self.distance_bias is not None

    def first_seen(self, position: int) -> int:
        """The first key that a token at `position` sees."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    @cached_property
    def native(
        self,
    ) -> tuple[float, float, int, int, int | None, int | None, int, int, int | None, int | None, int]:
        """For compiled kernels of the host: scale, softcap, window, chunk, the address of alibi_slopes,
        DistanceBias.native, the address of the sinks, and latent_dim."""
        bias = (None, 0, 0, None) if self.distance_bias is None else self.distance_bias.native
        return (
            self.scale, self.softcap, self.window, self.chunk, address(self.alibi_slopes), *bias,
            address(self.sinks), self.latent_dim,
        )  # fmt: skip


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass; () of other types. Each step asks for them."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _add_tensors(operand: Any, found: list[Tensor]) -> None:
    """Add the tensors of a dataclass and of the dataclasses inside of it."""
    for name in _field_names(operand.__class__):
        value = getattr(operand, name)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            _add_tensors(value, found)


def _with_tensors(operand: Any, others: Iterator[Tensor]) -> Any:
    """The dataclass with others in place of _add_tensors(), in their order."""
    values = {}
    for name in _field_names(operand.__class__):
        value = getattr(operand, name)
        if isinstance(value, Tensor):
            value = next(others)
        elif _field_names(value.__class__):
            value = _with_tensors(value, others)
        values[name] = value
    return type(operand)(**values)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor begins in memory."""
    return None if tensor is None else tensor.data_ptr()
