"""DeepSeek V2 and V3 in GGUF files, written with llama.cpp's Python package by the rules of llama.cpp's
converter: with the matrix "kv_b" in two parts as newer converters write it, and whole as older ones did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_formats_in import assert_computes
from test_gguf import TOKENS, finish, numbers
from test_gguf_mixtures import Q4_K_M, pieces, rounded, stored_name
from test_gguf_types import decoded, random_blocks
from tiny_models import YARN_ROPE, build
from torch import Tensor

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.model.registry import open_model
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.quantize import quantize

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 256, "q_lora_rank": 256,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "attention_bias": False,
}  # fmt: skip
ROPE = YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}
#: Name of a model in tiny_models, what is different, and whether "kv_b" lies in two parts.
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("DeepSeek V2", {"rope_parameters": ROPE}, True),
    ("DeepSeek V2-Lite, biases", {"q_lora_rank": None}, False),
    ("DeepSeek V3", {"rope_parameters": ROPE, "norm_topk_prob": True}, True),
]
FLAGS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def metadata(model: Any, is_split: bool) -> dict[str, Any]:
    """What the converter says beyond what it says of all models."""
    config = model.config
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    width, value = config.qk_nope_head_dim + turned, config.v_head_dim
    is_sigmoid = config.model_type == "deepseek_v3"
    found = numbers(model) | {
        "attention.kv_lora_rank": rank, "rope.dimension_count": turned,
        "attention.key_length": rank + turned if is_split else width,
        "attention.value_length": rank if is_split else value,
        "attention.head_count_kv": 1 if is_split else config.num_attention_heads,
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts, "expert_feed_forward_length": 256,
        "leading_dense_block_count": config.first_k_dense_replace, "expert_gating_func": 1 + is_sigmoid,
        "expert_weights_scale": float(config.routed_scaling_factor), "expert_weights_norm": is_sigmoid,
    }  # fmt: skip
    if is_split:
        found |= {"attention.key_length_mla": width, "attention.value_length_mla": value}
    if config.q_lora_rank:
        found |= {"attention.q_lora_rank": config.q_lora_rank}
    if config.n_group:
        found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if scale := config.rope_parameters.get("mscale_all_dim"):
        found |= {"rope.scaling.yarn_log_multiplier": 0.1 * scale}
    return found


def split(writer: Any, name: str, value: Tensor, config: Any, seed: int) -> None:
    """Write "kv_b" in two parts of random blocks. `value` becomes what the engine should make of them."""
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    parts = []
    for word, kind, shape in (
        ("attn_k_b", "Q8_0", (heads, rank, config.qk_nope_head_dim)),
        ("attn_v_b", "Q4_K", (heads, config.v_head_dim, rank)),
    ):
        blocks = random_blocks(kind, shape[0] * shape[1], shape[2], seed)
        data = blocks.reshape(*shape[:2], -1)
        writer.add_tensor(name.replace("attn_kv_b", word), data, raw_dtype=gguf.GGMLQuantizationType[kind])
        parts.append(decoded(kind, blocks).view(shape))
    whole = torch.cat((parts[0].mT, parts[1]), dim=1).flatten(0, 1)
    value.copy_(quantize(whole.contiguous(), 32).dequantize())


def write(model: Any, path: Path, is_split: bool, **changes: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in (metadata(model, is_split) | changes).items():
        if value is not None:
            getattr(writer, FLAGS[type(value)])(f"deepseek2.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_token_list(TOKENS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.num_hidden_layers)
    for name, value in model.named_buffers():
        if name.endswith("correction_bias"):
            writer.add_tensor(f"{names.get_name(name.removesuffix('_bias'))}.bias", value.numpy())
    for seed, (parameter, whole) in enumerate(model.named_parameters()):
        for index, (name, value) in enumerate(pieces(parameter, whole.data, config)):
            stored = stored_name(name, config, names)
            if "attn_kv_b" in stored and is_split:
                split(writer, stored, value, config, seed)
                continue
            data, kind = rounded(stored, name, value, config, Q4_K_M, 10 * seed + index)
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


@pytest.mark.parametrize(("name", "changes", "is_split"), CASES)
def test_logits_equal_transformers(
    name: str, changes: dict[str, Any], is_split: bool, tmp_path: Path
) -> None:
    model = build(name, tmp_path / "source", **(SIZES | changes))
    write(model, tmp_path / "model.gguf", is_split)
    config = read_config(tmp_path / "model.gguf")
    same = ("architectures", "model_type", *SIZES, "n_group", "topk_group", "num_key_value_heads")
    theirs = model.config.to_dict() | {"architectures": [type(model).__name__]}
    theirs |= {"n_group": theirs["n_group"] or 1, "topk_group": theirs["topk_group"] or 1}
    assert {key: config[key] for key in same} == {key: theirs[key] for key in same}
    assert_computes(tmp_path / "model.gguf", model, is_rounded=True)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = build("DeepSeek V2", tmp_path / "source", **(SIZES | {"rope_parameters": ROPE}))
    write(model, tmp_path / "kind.gguf", True, expert_gating_func=4)
    with pytest.raises(UnsupportedModel, match="routers of kind 4"):
        read_config(tmp_path / "kind.gguf")
    write(model, tmp_path / "whole.gguf", True)
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(content.replace(b"blk.1.attn_v_b", b"blk.1.attn_w_b"))
    with pytest.raises(CorruptFile, match="blk.1.attn_k_b.weight without its partner"):
        open_model(tmp_path / "half.gguf")


#: Groups of experts in files of converters that did not say them.
@pytest.mark.parametrize(
    ("scores", "count", "groups"),
    [(2, 256, (8, 4)), (1, 160, (8, 3)), (1, 64, (1, 1)), (2, 384, (1, 1))],
)
def test_groups_that_no_file_tells(scores: int, count: int, groups: tuple[int, int], tmp_path: Path) -> None:
    model = build("DeepSeek V2", tmp_path / "source", **(SIZES | {"rope_parameters": ROPE}))
    silent = {"expert_group_count": None, "expert_group_used_count": None}
    write(model, tmp_path / "it.gguf", True, expert_gating_func=scores, expert_count=count, **silent)
    config = read_config(tmp_path / "it.gguf")
    assert (config["n_group"], config["topk_group"]) == groups
