"""A model of BMInf (CPM-1, CPM-2.1, EVA) as if it were a Hugging Face folder in INT8, integer for integer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cpm.bminf_file import NAME, is_bminf, read_tree
from penstock.cpm.derived_config import derive
from penstock.cpm.known_names import FFN_LAYER
from penstock.cpm.merged_rows import Piece, merge_rows
from penstock.errors import CorruptFile
from penstock.weights.checkpoints.checkpoint import Checkpoint, read_json
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.strided_rows import StridedRows

__all__ = ["is_bminf", "open_checkpoint", "read_config"]

#: BMInf's name of a tensor outside of layers -> transformers' name.
_GPT = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "layernorm.weight": "transformer.ln_f.weight",
    "layernorm.bias": "transformer.ln_f.bias",
}
_GPT_LAYER = {
    "ln_attn": "ln_1",
    "self_attn.linear_out": "attn.c_proj",
    "ln_ff": "ln_2",
    "ff.linear_in": "mlp.c_fc",
    "ff.linear_out": "mlp.c_proj",
}
_T5 = {
    "input_embedding.weight": "shared.weight",
    "output_embedding.weight": "lm_head.weight",
    "ln_enc.weight": "encoder.final_layer_norm.weight",
    "ln_dec.weight": "decoder.final_layer_norm.weight",
}
_PROJECTIONS = {"project_q": "q", "project_k": "k", "project_v": "v", "linear_out": "o"}
_PARAMETER = re.compile(r"(layers|enc_layers|dec_layers)\.(\d+)\.(.*)\.(weight|scale|bias)")
_BIAS_TABLE = re.compile(r"position_bias_(enc|dec)\.weight")
#: What compressed-tensors calls INT8 with one scale per output channel.
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises CorruptFile."""
    entries = {entry.name: entry for entry in _entries(read_tree(folder / NAME))}
    return Checkpoint(folder, _config(folder, entries), entries)


def read_config(folder: Path) -> dict[str, Any]:
    """The config in the form of config.json. Raises CorruptFile."""
    return open_checkpoint(folder).config


def _config(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, Any]:
    derived = derive(entries)
    if derived.get("model_type") == "eva":
        derived |= {"relative_attention_max_distance": 256}
    own = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return derived | own | {"quantization_config": _QUANTIZATION}


def _entries(tree: dict[str, TensorEntry]) -> Iterator[TensorEntry]:
    """The parameters under transformers' names."""
    for name, entry in tree.items():
        match = _PARAMETER.fullmatch(name)
        if match is None:
            yield _outside_of_layers(entry)
        elif match[1] != "layers":
            yield replace(entry, name=_t5_name(entry, *match.groups()))
        elif match[3] in _GPT_LAYER:
            yield replace(entry, name=f"transformer.h.{match[2]}.{_GPT_LAYER[match[3]]}.{_kind(match[4])}")
        elif match[3] == "self_attn.project_q":
            yield _fused(tree, match[2], match[4])
        elif match[3] not in ("self_attn.project_k", "self_attn.project_v"):
            raise _unknown(entry)


def _outside_of_layers(entry: TensorEntry) -> TensorEntry:
    if match := _BIAS_TABLE.fullmatch(entry.name):
        stack = "encoder" if match[1] == "enc" else "decoder"
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return _turned(name, entry)
    name = (_GPT | _T5).get(entry.name, "")
    if not name:
        raise _unknown(entry)
    return replace(entry, name=name)


def _turned(name: str, entry: TensorEntry) -> TensorEntry:
    """A table [heads, buckets] as [buckets, heads]."""
    if len(entry.shape) != 2:
        raise _unknown(entry)
    shape, span = entry.shape[::-1], replace(entry, shape=(entry.shape[0] * entry.shape[1],))
    return replace(entry, name=name, shape=shape, decode=StridedRows(span, shape, (1, shape[0])).read)


def _fused(tree: dict[str, TensorEntry], layer: str, kind: str) -> TensorEntry:
    """q, k and v of GPT-2 as one tensor."""
    parts = [tree.get(f"layers.{layer}.self_attn.project_{part}.{kind}") for part in "qkv"]
    found = [part for part in parts if part is not None and part.shape]
    if len(found) != len(parts):
        raise CorruptFile(f"layer {layer} of BMInf's file lacks a part of q, k and v; download it again")
    pieces = [Piece(part, 0, part.shape[0]) for part in found]
    return merge_rows(f"transformer.h.{layer}.attn.c_attn.{_kind(kind)}", pieces)


def _t5_name(entry: TensorEntry, stack: str, layer: str, module: str, kind: str) -> str:
    stack = "encoder" if stack == "enc_layers" else "decoder"
    ffn, parts = FFN_LAYER[stack], {"ln_attn": "0.layer_norm", "ln_cross_attn": "1.layer_norm"}
    parts |= {"ln_ff": f"{ffn}.layer_norm", "ff.linear_in": f"{ffn}.DenseReluDense.wi_0"}
    parts |= {"ff.linear_gated": f"{ffn}.DenseReluDense.wi_1", "ff.linear_out": f"{ffn}.DenseReluDense.wo"}
    parts |= {f"self_attn.{ours}": f"0.SelfAttention.{theirs}" for ours, theirs in _PROJECTIONS.items()}
    parts |= {f"cross_attn.{ours}": f"1.EncDecAttention.{theirs}" for ours, theirs in _PROJECTIONS.items()}
    if module not in parts:
        raise _unknown(entry)
    return f"{stack}.block.{layer}.layer.{parts[module]}.{_kind(kind)}"


def _kind(kind: str) -> str:
    return "weight_scale" if kind == "scale" else kind


def _unknown(entry: TensorEntry) -> CorruptFile:
    return CorruptFile(f"{entry.file} has {entry.name}, which no model of BMInf has; download the file again")
