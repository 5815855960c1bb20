"""Gated DeltaNet in GGUF files: Qwen3-Next, and Qwen3.5 with and without experts. Heads of v have another
order in the files of Qwen3.5, and rows of Qwen3-Next's projections lie apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    Stored,
    convolution,
    log_of_negative,
    part,
    reshaped,
    whole,
)
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    QWEN_NAMES,
    SHARED_GATE,
    MixtureFile,
    shared_width,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def _delta_config(numbers: Numbers) -> dict[str, Any]:
    numbers.get("full_attention_interval")
    numbers.get("nextn_predict_layers")
    values = numbers.integer("ssm.time_step_rank")
    return {
        "linear_num_key_heads": numbers.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": numbers.integer("ssm.state_size"),
        "linear_value_head_dim": numbers.integer("ssm.inner_size") // values,
        "linear_conv_kernel_dim": numbers.integer("ssm.conv_kernel"),
        "layer_types": numbers.layer_kinds({"ssm_out": "linear_attention", "attn_q": "full_attention"}),
        "attention_bias": any(name.endswith("attn_q.bias") for name in numbers.tensors),
    }


def _qwen35_config(numbers: Numbers) -> dict[str, Any]:
    kind = "qwen3_5_moe_text" if numbers.architecture == "qwen35moe" else "qwen3_5_text"
    return _delta_config(numbers) | {"model_type": kind}


def _shared_config(numbers: Numbers) -> dict[str, Any]:
    width = shared_width(numbers)
    if not width:
        raise CorruptFile(f"{numbers.path} has no ffn_up_shexp.weight; download it again")
    return {
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _value_heads(numbers: Numbers) -> Tensor:
    """Qwen3.5's heads of v: those of a key head follow each other in the model's own code; in the file, the
    first heads of all key heads come first."""
    keys, values = numbers.integer("ssm.group_count"), numbers.integer("ssm.time_step_rank")
    if values % keys:
        raise CorruptFile(f"{numbers.path} has {values} heads of v for {keys} of k; download it again")
    return torch.arange(values).view(-1, keys).T.flatten()


def _value_rows(numbers: Numbers, num_rows: int) -> Tensor:
    """The rows of heads of v, after rows of q and k where there are more."""
    heads = _value_heads(numbers)
    size = numbers.integer("ssm.inner_size") if num_rows >= numbers.integer("ssm.inner_size") else len(heads)
    before = num_rows - size
    behind = before + torch.arange(size).view(len(heads), -1)[heads].flatten()
    return torch.cat((torch.arange(before), behind))


def _value_columns(stored: Stored) -> Iterator[TensorEntry]:
    matrix = Matrix((stored.entry,), columns=_value_heads(stored.numbers))
    yield made_of(stored.name("linear_attn.out_proj"), matrix)


def _of_values(name: str, change: Any = None, is_conv: bool = False) -> Rule:
    """A tensor of heads of v, whose name is no module's."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = stored.entry
        rows = _value_rows(stored.numbers, entry.shape[0])
        entry = reshaped(entry, entry.shape[0], 1, -1) if is_conv else entry
        yield made_of(stored.prefix + name, Matrix((entry,), rows), change)

    return rule


def _grouped(stored: Stored) -> Iterator[TensorEntry]:
    """Qwen3-Next's q, k, v and gate of each key head together."""
    if stored.numbers.has(stored.layer or 0, "attn_q"):
        return
    numbers, gate = stored.numbers, stored.partner("attn_gate")
    keys, rows = numbers.integer("ssm.group_count"), torch.arange(stored.entry.shape[0] + gate.shape[0])
    num_keys = keys * numbers.integer("ssm.state_size")
    sizes = (num_keys, num_keys, stored.entry.shape[0] - 2 * num_keys, gate.shape[0])
    parts = [rows_of.view(keys, -1) for rows_of in rows.split_with_sizes(sizes)]
    matrix = Matrix((stored.entry, gate), torch.cat(parts, dim=1).flatten())
    yield made_of(stored.name("linear_attn.in_proj_qkvz"), matrix)


_NEXTN: dict[str, str | Rule] = {
    "nextn.eh_proj": lambda stored: _extra(stored, "mtp.fc"),
    "nextn.enorm": lambda stored: _extra(stored, "mtp.pre_fc_norm_embedding", 1.0),
    "nextn.hnorm": lambda stored: _extra(stored, "mtp.pre_fc_norm_hidden", 1.0),
    "nextn.shared_head_norm": lambda stored: _extra(stored, "mtp.norm", 1.0),
}


def _extra(stored: Stored, module: str, offset: float = 0.0) -> Iterator[TensorEntry]:
    """A module of the head that guesses, outside of its layer."""
    change = (lambda rows: rows - offset) if offset else None
    yield made_of(f"{module}.weight", Matrix((stored.entry,)), change)


_QWEN_NORM: dict[str, str | Rule] = {"post_attention_norm": "post_attention_layernorm"}
_QWEN3NEXT: dict[str, str | Rule] = _QWEN_NORM | {
    "attn_qkv": _grouped, "attn_gate": lambda stored: iter(()), "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": convolution("linear_attn.conv1d"),
    "ssm_dt": whole("linear_attn.dt_bias"), "ssm_a": whole("linear_attn.A_log", log_of_negative),
    "ssm_norm": whole("linear_attn.norm.weight"), "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_QWEN35: dict[str, str | Rule] = _QWEN_NORM | _NEXTN | {
    "attn_qkv": part("linear_attn.in_proj_qkv", _value_rows),
    "attn_gate": part("linear_attn.in_proj_z", _value_rows),
    "ssm_alpha": part("linear_attn.in_proj_a", _value_rows),
    "ssm_beta": part("linear_attn.in_proj_b", _value_rows),
    "ssm_conv1d": _of_values("linear_attn.conv1d.weight", is_conv=True),
    "ssm_dt": _of_values("linear_attn.dt_bias"),
    "ssm_a": _of_values("linear_attn.A_log", log_of_negative),
    "ssm_norm": whole("linear_attn.norm.weight"), "ssm_out": _value_columns,
}  # fmt: skip
_QWEN_EXPERTS = MixtureFile(
    _shared_config, names=QWEN_NAMES, whole_names={SHARED_GATE: "mlp.shared_expert_gate.weight"}
)
_QWEN35_DENSE = Architecture(
    "Qwen3_5", _qwen35_config, _QWEN35, norm_offset=1.0, rotates_part=True, guessing="mtp.layers."
)
#: By llama.cpp's name of the architecture.
DELTAS = {"qwen35": _QWEN35_DENSE}
DELTA_MIXTURES = {
    "qwen3next": Architecture(
        "Qwen3Next",
        lambda numbers: {"model_type": "qwen3_next"} | _delta_config(numbers),
        _QWEN3NEXT,
        norm_offset=1.0,
        rotates_part=True,
        mixture=_QWEN_EXPERTS,
    ),
    "qwen35moe": replace(_QWEN35_DENSE, model="Qwen3_5Moe", mixture=_QWEN_EXPERTS),
}
