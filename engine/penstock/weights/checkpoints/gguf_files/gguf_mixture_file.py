"""MixtureFile: a mixture of experts in the files of an architecture. A tensor of three axes holds a matrix
of every expert of a layer: each expert's becomes an entry of its own, which is read without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Rule, Stored, reshaped, row_slice
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_same
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of, renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: More experts than a layer of any known model has.
MAX_EXPERTS = 8192
#: The words of llama.cpp for what an expert has.
GATE, UP, DOWN, GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"
SHARED_GATE = "ffn_gate_inp_shexp"
#: llama.cpp's numbers of what makes scores of a router's logits.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


@dataclass(frozen=True)
class MixtureFile:
    """How the files of an architecture hold its mixture, and what config.json says of it."""

    #: What config.json has beyond what all mixtures have.
    own_config: Callable[[Numbers], dict[str, Any]]
    #: The beginning of an expert's names, and its modules: gate, up, down.
    expert: str = "mlp.experts."
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    names: Mapping[str, str | Rule] = field(default_factory=dict)
    #: Names of tensors that are no module's weight or bias.
    whole_names: Mapping[str, str] = field(default_factory=dict)
    #: The model's own code has gate and up in one matrix, row by row by turns.
    has_turns: bool = False
    #: llama.cpp's number of what makes scores of a router's logits. None: the file decides.
    scores: int | None = SOFTMAX
    #: What the files leave out of rope's parameters.
    rope: Mapping[str, Any] = field(default_factory=dict)

    def width(self, numbers: Numbers) -> int:
        """The inner width of an expert. Raises UnsupportedModel."""
        stacked = next(
            (each for name, each in numbers.tensors.items() if name.endswith(f".{DOWN}.weight")), None
        )
        if stacked is not None and len(stacked.shape) == 3:
            return stacked.shape[2]
        return numbers.integer("expert_feed_forward_length", numbers.get("feed_forward_length"))

    def config(self, numbers: Numbers, rope: dict[str, Any]) -> dict[str, Any]:
        """What config.json says of the mixture."""
        count, chosen = numbers.integer("expert_count"), numbers.integer("expert_used_count")
        if self.scores is not None and numbers.get("expert_gating_func", 0) != 0:
            check_same(numbers, "expert_gating_func", self.scores, "Penstock knows one kind of scores here")
        return {
            "rope_parameters": rope | (dict(self.rope) if rope["rope_type"] == "yarn" else {}),
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": self.width(numbers),
        } | self.own_config(numbers)

    def knows(self, word: str) -> bool:
        """Whether a tensor belongs to the mixture, and is no module of the layer's own."""
        return _stacked(word) in (GATE, UP, DOWN, GATE_UP) or word in self.whole_names

    def entries(self, stored: Stored) -> Iterator[TensorEntry]:
        """The entries that a tensor becomes. Raises CorruptFile and UnsupportedModel."""
        word, prefix = stored.word, stored.prefix
        if word in self.whole_names:
            # A matrix with one row lies in files as a vector.
            is_flat = word == SHARED_GATE and len(stored.entry.shape) == 1
            entry = reshaped(stored.entry, 1, -1) if is_flat else stored.entry
            yield renamed(prefix + self.whole_names[word], entry)
        elif not self.has_turns or word == DOWN:
            yield from self._apart(stored)
        elif word == GATE:
            partner = stored.partner(UP)
            pairs = zip(_slices(stored, stored.entry), _slices(stored, partner), strict=True)
            for number, pair in enumerate(pairs):
                yield by_turns(stored.name(f"{self.expert}{number}.gate_up_proj"), *pair)
        elif word == GATE_UP:
            raise UnsupportedModel(
                f"{stored.numbers.path} has {stored.entry.name}, and Penstock reads gate and up apart"
            )

    def _apart(self, stored: Stored) -> Iterator[TensorEntry]:
        gate, up, down = self.modules
        word = _stacked(stored.word)
        parts = {GATE: (gate,), UP: (up,), DOWN: (down,), GATE_UP: (gate, up)}[word]
        if word != stored.word:  # older files have each expert alone: ffn_gate.3
            alone = stored.word.rpartition(".")[2]
            yield renamed(stored.name(f"{self.expert}{alone}.{parts[0]}"), stored.entry)
            return
        for number, matrix in enumerate(_slices(stored, stored.entry)):
            height = matrix.shape[0] // len(parts)
            for index, module in enumerate(parts):
                rows = row_slice(matrix, index * height, height) if len(parts) > 1 else matrix
                yield renamed(stored.name(f"{self.expert}{number}.{module}"), rows)


def _stacked(word: str) -> str:
    """The word for a matrix of all experts, where a word means that of one of them."""
    name, _, number = word.rpartition(".")
    return f"{name}_exps" if number.isdecimal() else word


def _slices(stored: Stored, whole: TensorEntry) -> Iterator[TensorEntry]:
    """Each expert's part of a tensor. Raises CorruptFile."""
    count = stored.numbers.integer("expert_count")
    if len(whole.shape) < 2 or whole.shape[0] != count or count > MAX_EXPERTS or 0 in whole.shape:
        raise CorruptFile(
            f"{stored.numbers.path}: tensor {whole.name} has shape {list(whole.shape)}, where {count} "
            "experts are needed; download the file again"
        )
    num_bytes = whole.num_bytes // count
    first = replace(whole, shape=whole.shape[1:], num_bytes=num_bytes)
    return (replace(first, offset=whole.offset + number * num_bytes) for number in range(count))


def by_turns(name: str, first: TensorEntry, second: TensorEntry) -> TensorEntry:
    """The rows of two tensors by turns, as one tensor."""
    rows = torch.arange(first.shape[0] + second.shape[0]).view(2, -1).T.flatten()
    return made_of(name, Matrix((first, second), rows))


#: Names of a mixture in Llama's frame, by Qwen's modules.
QWEN_NAMES: dict[str, str | Rule] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
#: By DeepSeek's.
DEEPSEEK_NAMES: dict[str, str | Rule] = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip


def sigmoid_config(numbers: Numbers) -> dict[str, Any]:
    """DeepSeek V3's router, by config.json's keys."""
    if numbers.get("expert_gating_func", 0) != 0:
        check_same(numbers, "expert_gating_func", SIGMOID, "Penstock knows one kind of scores here")
    num_groups = numbers.integer("expert_group_count", 1)
    return {
        "n_routed_experts": numbers.integer("expert_count"),
        "n_shared_experts": int(numbers.get("expert_shared_count", 0)),
        "routed_scaling_factor": numbers.real("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", False)),
        "n_group": num_groups,
        "topk_group": numbers.integer("expert_group_used_count", num_groups),
        "first_k_dense_replace": int(numbers.get("leading_dense_block_count", 0)),
    }


def shared_width(numbers: Numbers) -> int:
    """The inner width of the shared expert; 0: there is none."""
    found = (each for name, each in numbers.tensors.items() if name.endswith("ffn_up_shexp.weight"))
    shared = next(found, None)
    return shared.shape[0] if shared is not None else 0
