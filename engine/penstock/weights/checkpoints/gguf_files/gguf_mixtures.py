"""Mixtures of experts in GGUF files. A tensor of three axes holds a matrix of every expert of a layer: each
expert's becomes an entry of its own, which is read without the other experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_same
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers, window_layers
from penstock.weights.checkpoints.gguf_files.gguf_rows import GgufRows, renamed
from penstock.weights.checkpoints.int4_form import Int4Form, Int4Source
from penstock.weights.checkpoints.int8_source import Int8Source
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: More experts than a layer of any known model has.
MAX_EXPERTS = 8192
#: The words of llama.cpp for what an expert has.
GATE, UP, DOWN, GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"
SHARED_GATE = "ffn_gate_inp_shexp"


@dataclass(frozen=True)
class MixtureFile:
    """How the files of an architecture hold its mixture, and what config.json says of it."""

    #: The architecture in config.json, without "ForCausalLM".
    model: str
    model_type: str
    #: What config.json has beyond what all models have.
    own_config: Callable[[Numbers], dict[str, Any]]
    #: The beginning of an expert's names, and its modules: gate, up, down.
    expert: str = "mlp.experts."
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    names: dict[str, str] = field(default_factory=dict)
    #: Names of tensors that are no module's weight or bias.
    whole_names: dict[str, str] = field(default_factory=dict)
    exchanges_rows: bool = False
    #: The model's own code has gate and up in one matrix, row by row by turns.
    has_turns: bool = False
    #: llama.cpp's number of what makes scores of a router's logits: 1 is softmax. None: the file decides.
    scores: int | None = 1
    #: What the files leave out of rope's parameters.
    rope: dict[str, Any] = field(default_factory=dict)

    def width(self, numbers: Numbers) -> int:
        """The inner width of an expert. Raises UnsupportedModel."""
        stacked = numbers.tensors.get(f"blk.{numbers.integer('block_count') - 1}.{DOWN}.weight")
        if stacked is not None and len(stacked.shape) == 3:
            return stacked.shape[2]
        return numbers.integer("expert_feed_forward_length", numbers.get("feed_forward_length"))

    def config(self, numbers: Numbers, rope: dict[str, Any]) -> dict[str, Any]:
        """What config.json says of the mixture."""
        count, chosen = numbers.integer("expert_count"), numbers.integer("expert_used_count")
        if self.scores is not None and numbers.get("expert_gating_func", 0) != 0:
            check_same(numbers, "expert_gating_func", self.scores, "Penstock knows one kind of scores here")
        return {
            "model_type": self.model_type,
            "rope_parameters": rope | (self.rope if rope["rope_type"] == "yarn" else {}),
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": self.width(numbers),
        } | self.own_config(numbers)

    def knows(self, word: str) -> bool:
        """Whether a tensor belongs to the mixture, and is no module of the layer's own."""
        return _stacked(word) in (GATE, UP, DOWN, GATE_UP) or word in self.whole_names

    def entries(
        self, numbers: Numbers, stored: TensorEntry, name: tuple[str, str, str]
    ) -> Iterator[TensorEntry]:
        """The entries that a tensor becomes. `name`: layer, word and kind ("weight" or "bias")."""
        layer, word, kind = name
        prefix = f"model.layers.{layer}."
        if word in self.whole_names:
            # A matrix with one row lies in files as a vector.
            is_flat = word == SHARED_GATE and len(stored.shape) == 1
            stored = replace(stored, shape=(1, *stored.shape)) if is_flat else stored
            yield renamed(prefix + self.whole_names[word], GgufRows(stored))
            return
        if not self.has_turns or word == DOWN:
            yield from self._apart(numbers, stored, prefix, word, kind)
        elif word == GATE:
            partner = numbers.tensors.get(stored.name.replace(GATE, UP))
            if partner is None or partner.shape != stored.shape:
                raise CorruptFile(f"{numbers.path} has no {UP} that fits {stored.name}; download it again")
            pairs = zip(_slices(numbers, stored), _slices(numbers, partner), strict=True)
            for number, (gate, up) in enumerate(pairs):
                yield by_turns(f"{prefix}{self.expert}{number}.gate_up_proj.{kind}", gate, up)
        elif word == GATE_UP:
            raise UnsupportedModel(f"{numbers.path} has {stored.name}, and Penstock reads gate and up apart")

    def _apart(
        self, numbers: Numbers, stored: TensorEntry, prefix: str, word: str, kind: str
    ) -> Iterator[TensorEntry]:
        gate, up, down = self.modules
        parts = {GATE: (gate,), UP: (up,), DOWN: (down,), GATE_UP: (gate, up)}[_stacked(word)]
        if word != _stacked(word):  # older files have each expert alone: ffn_gate.3
            alone = word.rpartition(".")[2]
            yield renamed(f"{prefix}{self.expert}{alone}.{parts[0]}.{kind}", GgufRows(stored))
            return
        for number, whole in enumerate(_slices(numbers, stored)):
            for index, part in enumerate(parts):
                rows = GgufRows(_rows(whole, index, len(parts)))
                yield renamed(f"{prefix}{self.expert}{number}.{part}.{kind}", rows)


def _stacked(word: str) -> str:
    """The word for a matrix of all experts, where a word means that of one of them."""
    name, _, number = word.rpartition(".")
    return f"{name}_exps" if number.isdecimal() else word


def _slices(numbers: Numbers, stored: TensorEntry) -> Iterator[TensorEntry]:
    """Each expert's part of a tensor. Raises CorruptFile."""
    count = numbers.integer("expert_count")
    if len(stored.shape) < 2 or stored.shape[0] != count or count > MAX_EXPERTS or 0 in stored.shape:
        raise CorruptFile(
            f"{numbers.path}: tensor {stored.name} has shape {list(stored.shape)}, where {count} experts are "
            "needed; download the file again"
        )
    num_bytes = stored.num_bytes // count
    first = replace(stored, shape=stored.shape[1:], num_bytes=num_bytes)
    return (replace(first, offset=stored.offset + number * num_bytes) for number in range(count))


def _rows(matrix: TensorEntry, index: int, count: int) -> TensorEntry:
    """One of `count` equal parts of a matrix's rows."""
    num_bytes = matrix.num_bytes // count
    shape = (matrix.shape[0] // count, *matrix.shape[1:])
    return replace(matrix, shape=shape, offset=matrix.offset + index * num_bytes, num_bytes=num_bytes)


def by_turns(name: str, first: TensorEntry, second: TensorEntry) -> TensorEntry:
    """The rows of two tensors by turns, as one tensor. Raises UnsupportedModel."""
    pair = [renamed(each.name, GgufRows(each)) for each in (first, second)]
    rows, num_bytes = 2 * first.shape[0], first.num_bytes + second.num_bytes
    shape = (rows, *first.shape[1:])
    sources = [each.int4 for each in pair]
    if sources[0] is not None and sources[1] is not None and sources[0].form == sources[1].form:
        codes = TurnsOfCodes(sources[0], sources[1])
        return replace(int4_entry(name, first, (rows, shape[1]), codes), num_bytes=num_bytes)
    if pair[0].dtype != pair[1].dtype:
        raise UnsupportedModel(f"{first.file} has {first.name} and {second.name} in types of two kinds")

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        return _turns(start, stop, *(_some(checkpoint, each, start, stop) for each in pair))

    integers = [each.int8 for each in pair]
    both = None
    if integers[0] and integers[1] and integers[0].group_size == integers[1].group_size:
        both = TurnsOfIntegers(integers[0], integers[1])
    return replace(pair[0], name=name, shape=shape, num_bytes=num_bytes, decode=decode, int4=None, int8=both)


@dataclass(frozen=True)
class TurnsOfCodes:
    """Two matrices of 4-bit codes, row by row by turns."""

    first: Int4Source
    second: Int4Source

    @property
    def form(self) -> Int4Form:
        return self.first.form

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        rows = start // 2, -(-stop // 2)
        first, second = (source.read(checkpoint, *rows) for source in (self.first, self.second))
        return {name: _turns(start, stop, array, second[name]) for name, array in first.items()}


@dataclass(frozen=True)
class TurnsOfIntegers:
    """Two matrices of INT8 in groups of one size, row by row by turns."""

    first: Int8Source
    second: Int8Source

    @property
    def group_size(self) -> int:
        return self.first.group_size

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = start // 2, -(-stop // 2)
        first, second = (source.read(checkpoint, *rows) for source in (self.first, self.second))
        return _turns(start, stop, first[0], second[0]), _turns(start, stop, first[1], second[1])


def _some(checkpoint: Checkpoint, entry: TensorEntry, start: int, stop: int) -> Tensor:
    return entry.read_rows(checkpoint, start // 2, -(-stop // 2))


def _turns(start: int, stop: int, first: Tensor, second: Tensor) -> Tensor:
    """Rows start:stop of two tensors by turns, of which the rows from start // 2 on are there."""
    both = torch.stack((first, second), dim=1).flatten(0, 1)
    return both[start % 2 :][: stop - start]


#: Names of a mixture in Llama's frame, by Qwen's modules.
_QWEN = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip


def _qwen3_config(numbers: Numbers) -> dict[str, Any]:
    # llama.cpp takes these for granted.
    return _norm(numbers, True) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen2_config(numbers: Numbers) -> dict[str, Any]:
    shared = numbers.tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is None or len(shared.shape) != 2:
        raise CorruptFile(f"{numbers.path} has no blk.0.ffn_up_shexp.weight; download it again")
    return _qwen3_config(numbers) | {
        **_norm(numbers, False),
        "shared_expert_intermediate_size": shared.shape[0],
        "qkv_bias": "blk.0.attn_q.bias" in numbers.tensors,
    }


def _norm(numbers: Numbers, usual: bool) -> dict[str, Any]:
    """Whether the weights of a token's experts add up to one."""
    return {"norm_topk_prob": bool(numbers.get("expert_weights_norm", usual))}


def _mixtral_config(numbers: Numbers) -> dict[str, Any]:
    check_same(numbers, "expert_weights_norm", True, "the weights of a token's experts add up to one here")
    return {"sliding_window": None}


def _olmoe_config(numbers: Numbers) -> dict[str, Any]:
    return _norm(numbers, False) | {"clip_qkv": numbers.get("attention.clamp_kqv")}


def _gpt_oss_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window")
    return {
        "attention_bias": True,
        "sliding_window": window,
        "layer_types": window_layers(numbers, 2, window),
    }


#: By llama.cpp's name of the architecture.
MIXTURES = {
    "llama": MixtureFile(
        "Mixtral",
        "mixtral",
        _mixtral_config,
        "block_sparse_moe.experts.",
        ("w1", "w3", "w2"),
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        exchanges_rows=True,
    ),
    "qwen2moe": MixtureFile(
        "Qwen2Moe",
        "qwen2_moe",
        _qwen2_config,
        names=_QWEN,
        whole_names={SHARED_GATE: "mlp.shared_expert_gate.weight"},
    ),
    "qwen3moe": MixtureFile("Qwen3Moe", "qwen3_moe", _qwen3_config, names=_QWEN),
    "olmoe": MixtureFile("Olmoe", "olmoe", _olmoe_config, names=_QWEN),
    "gpt-oss": MixtureFile(
        "GptOss",
        "gpt_oss",
        _gpt_oss_config,
        names={"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
        whole_names={"attn_sinks": "self_attn.sinks"},
        has_turns=True,
        scores=3,
        rope={"truncate": False},
    ),
}
