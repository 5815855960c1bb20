"""Mixtures in GGUF files, written with llama.cpp's Python package by the rules of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_formats_in import assert_computes
from test_gguf import TOKENS, finish, numbers
from test_gguf_types import KEPT, decoded, random_blocks
from test_mixtures import expert_bytes
from tiny_models import build
from torch import Tensor

from penstock.kernels import Int4Tensor, QuantizedTensor
from penstock.model.registry import open_model
from penstock.spec import UnitKey
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize

gguf = pytest.importorskip("gguf")

#: By model_type: llama.cpp's name, and how transformers' experts lie.
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe",
                 "gpt_oss": "gpt-oss"}  # fmt: skip
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 64,
}  # fmt: skip
#: Types of blocks as `llama-quantize` chooses them for Q4_K_M, and for gpt-oss; "" is the type of all others.
Q4_K_M = {"attn_v": "Q8_0", "ffn_down_exps": "Q6_K", "output": "Q6_K", "ffn_down_shexp": "Q5_0", "": "Q4_K"}
#: As files for little memory mix them: experts with the fewest bits, groups of 16 beside others.
UD_Q2_K_XL = {"ffn_gate_exps": "IQ2_XS", "ffn_up_exps": "IQ2_XXS", "ffn_down_exps": "IQ3_S", "": "Q3_K"}
MXFP4 = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4", "": "Q8_0"}


def pieces(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """A parameter of transformers as the converter names it: views, so that a change changes the model."""
    prefix, _, word = name.rpartition(".")
    if "experts." not in name or not word.startswith("gate_up_proj"):
        yield name, value
    elif config.model_type == "gpt_oss":
        for index, part in enumerate(("gate", "up")):
            yield f"{prefix}.{part}_proj.{word}", value[..., index::2]
    else:
        width = value.shape[1] // 2
        yield f"{prefix}.gate_proj.weight", value[:, :width]
        yield f"{prefix}.up_proj.weight", value[:, width:]


def stored_name(name: str, config: Any, names: Any) -> str:
    """llama.cpp's name, with what converters add to names without an ending."""
    if "sinks" in name:
        return f"{names.get_name(name)}.weight"
    kind = "bias" if name.endswith("bias") else "weight"
    base = name.removesuffix(".weight").removesuffix("bias").rstrip("._")
    base = base.removesuffix(".gate_up_proj")  # gpt-oss: gate_proj.gate_up_proj, of pieces()
    return f"{names.get_name(base)}.{kind}"


def write(model: Any, path: Path, kinds: dict[str, str], changes: dict[str, Any] | None = None) -> None:
    """A file of a model, whose matrices have random blocks. The model's become what the package says of them,
    in INT8 where they have other numbers than codes of 4 bits and integers."""
    config, arch = model.config, ARCHITECTURES[model.config.model_type]
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer = gguf.GGUFWriter(path, arch)
    own = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    own |= {"expert_feed_forward_length": 256} if arch not in ("llama", "olmoe") else {}
    for key, value in (numbers(model) | own | (changes or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_token_list(TOKENS)
    enum = {name: one for one, name in gguf.constants.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    for seed, (parameter, whole) in enumerate(model.named_parameters()):
        for index, (name, value) in enumerate(pieces(parameter, whole.data, config)):
            stored = stored_name(name, config, names)
            data, kind = rounded(stored, name, value, config, kinds, 10 * seed + index)
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


def rounded(stored: str, name: str, value: Tensor, config: Any, kinds: dict[str, str], seed: int) -> Any:
    """The blocks of a tensor and their type. `value` becomes what the engine should make of them."""
    word = stored.split(".")[-2]
    is_stack = word.endswith("_exps")
    if value.dim() < (3 if is_stack else 2) or word in ("ffn_gate_inp", "ffn_gate_inp_shexp"):
        return value.squeeze().contiguous().numpy(), "F32"
    is_turned = is_stack and config.model_type == "gpt_oss"
    shape = value.mT.shape if is_turned else value.shape
    kind = kinds.get(word, kinds[""])
    blocks = random_blocks(kind, shape[:-1].numel(), shape[-1], seed)
    weight = decoded(kind, blocks)
    if kind not in KEPT:
        weight = quantize(weight, 32).dequantize()
    weight = weight.view(shape)
    if config.model_type == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
    value.copy_(weight.mT if is_turned else weight)
    return blocks.reshape(*shape[:-1], -1), kind


def make(name: str, folder: Path, kinds: dict[str, str], **changes: Any) -> Any:
    model = build(name, folder / "source", **(WIDE | changes))
    write(model, folder / "model.gguf", kinds)
    return model


KINDS = [("Qwen3-MoE", Q4_K_M), ("Qwen2-MoE", Q4_K_M), ("Mixtral", Q4_K_M), ("OLMoE", Q4_K_M),
         ("gpt-oss", MXFP4), ("gpt-oss", {"": "Q8_0"}), ("Qwen3-MoE", UD_Q2_K_XL),
         ("gpt-oss", {"": "IQ2_S", "ffn_down_exps": "TQ1_0"})]  # fmt: skip


@pytest.mark.parametrize(("name", "kinds"), KINDS)
def test_logits_equal_transformers(name: str, kinds: dict[str, str], tmp_path: Path) -> None:
    model = make(name, tmp_path, kinds, **({"swiglu_limit": 7.0} if name == "gpt-oss" else {}))
    assert_computes(tmp_path / "model.gguf", model, is_rounded=True)


@pytest.mark.parametrize(("name", "kinds"), [KINDS[0], KINDS[4]])
def test_converted_experts_are_one_read_each(
    name: str, kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In our own form of codes, since compressed-tensors has no name for these blocks: the same bytes."""
    monkeypatch.setattr("penstock.weights.conversion.convert.read_companions", lambda *_: {})
    make(name, tmp_path, kinds)
    store = open_model(tmp_path / "model.gguf").store
    convert(store, tmp_path / "converted")
    converted = open_model(tmp_path / "converted").store
    assert all(converted.contiguous_unit(key) is not None for key in converted.units)
    assert expert_bytes(converted) == expert_bytes(store)
    key = UnitKey("decoder", 1, 2)
    weights = converted.read_unit(key, torch.empty(converted.units[key].num_bytes, dtype=torch.uint8))
    down = weights.matrix("down")
    assert isinstance(weights.matrix("gate_up"), Int4Tensor)
    assert isinstance(down, QuantizedTensor if name == "Qwen3-MoE" else Int4Tensor)
