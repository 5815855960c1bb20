"""Models of transformers as files of llama.cpp's converter: names by the package `gguf`, keys and changed
tensors by the converter's rules (conversion/*.py), which stand here a second time: the reader's tables
are not used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

gguf: Any = pytest.importorskip("gguf")

Config = dict[str, Any]
#: A tensor under a name of the model's own code, or under one that `gguf` maps.
Named = tuple[str, Tensor]
#: Blocks or numbers as a file has them, and their type.
Stored = tuple[Any, str]
Store = Callable[[Tensor], Stored]
Change = Callable[[str, Tensor, Config], Iterator[Named]]

#: Names that the package lacks, since it is older than the converter; behind "blk.N.".
MISSING = {
    r"backbone\.layers\.(\d+)\.mixer\.fc1_latent_proj": "ffn_latent_down",
    r"backbone\.layers\.(\d+)\.mixer\.fc2_latent_proj": "ffn_latent_up",
    r"backbone\.layers\.(\d+)\.mixer\.experts\.up_proj": "ffn_up_exps",
    r"backbone\.layers\.(\d+)\.mixer\.experts\.down_proj": "ffn_down_exps",
}


#: Architectures that the package lacks, and one whose names they have.
KIN = {"deepseek4": "deepseek2", "bailingmoe3": "kimi-linear", "deepseek32": "glm-dsa", "hy_v3": "dots1"}


def in_layer(name: str) -> str:
    """The beginning of llama.cpp's names in the layer that a tensor belongs to."""
    match = re.search(r"(?:layers|h)\.(\d+)\.", name)
    assert match is not None
    return f"blk.{match[1]}."


def keep(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield name, value


def permuted(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """q and k as llama.cpp rotates them: halves of a head by turns."""
    if name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
        key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        heads = config[key] or config["num_attention_heads"]
        value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
    yield name, value


def with_one(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    yield name, value + 1 if is_norm else value


def nemotron(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield name, value + 1 if name.endswith("norm.weight") else value


def by_head(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Merged q, k and v of each head, as q of all heads, then k, then v."""
    heads = config.get("n_head") or config["num_attention_heads"]
    if "query_key_value" in name:
        value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(value.shape)
    yield name, value


def bloom(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield from by_head(name.removeprefix("transformer."), value, config)


def by_group(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    if "query_key_value" in name:
        heads, groups = config["num_attention_heads"], config["num_kv_heads"]
        rows = value.view(groups, heads // groups + 2, -1, value.shape[1])
        parts = rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        value = torch.cat([part.reshape(-1, value.shape[1]) for part in parts])
    yield name, value


def gpt2(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    is_turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, value.T if is_turned else value


def stacked_norms(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Tensors of heads came together already."""
    yield name.replace("layernorm.norms.weight", "layernorm.weight"), value


def halves(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Gate and up of all experts, or of a shared mlp, apart."""
    base = name.removesuffix(".weight")
    has_experts = bool(config.get("num_local_experts"))
    if base.endswith("experts.gate_up_proj") or base.endswith("block_sparse_moe.input_linear"):
        gate, up = value.chunk(2, dim=1)
        prefix = in_layer(name) + "ffn_"
        yield from ((f"{prefix}gate_exps.weight", gate), (f"{prefix}up_exps.weight", up))
    elif base.endswith("shared_mlp.input_linear"):
        ending = "_shexp" if has_experts else ""
        prefix = in_layer(name) + "ffn_"
        gate, up = value.chunk(2)
        yield from ((f"{prefix}gate{ending}.weight", gate), (f"{prefix}up{ending}.weight", up))
    elif base.endswith("shared_mlp.output_linear") and not has_experts:
        yield in_layer(name) + "ffn_down.weight", value  # type: ignore[index]
    else:
        yield name, value


def turned_halves(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Llama 4's experts, with inputs first."""
    if name.endswith("experts.gate_up_proj"):
        yield from halves(name, value.mT, config)
    else:
        yield name, value.mT if name.endswith("experts.down_proj") else value


def gpt_oss(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    for kind in ("", "_bias"):
        if name.endswith(f"gate_up_proj{kind}"):
            ending = "bias" if kind else "weight"
            prefix = in_layer(name) + "ffn_"
            value = value if kind else value.mT
            yield f"{prefix}gate_exps.{ending}", value[:, ::2]
            yield f"{prefix}up_exps.{ending}", value[:, 1::2]
            return
        if name.endswith(f"experts.down_proj{kind}"):
            prefix = in_layer(name) + "ffn_"
            yield f"{prefix}down_exps.{'bias' if kind else 'weight'}", value if kind else value.mT
            return
    yield name + ".weight" * name.endswith("sinks"), value


def mamba(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """A = -exp(A_log) and D as columns, the convolution without its middle axis, the norm by groups."""
    if name.endswith(".A_log"):
        value = -value.exp()[:, None]
    elif name.endswith(".D"):
        value = value[:, None]
    elif "conv1d.weight" in name:
        value = value.squeeze()
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        value = value.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    yield re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name), value


def falcon_h1(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Every factor is multiplied into a matrix."""
    gate, down = config["mlp_multipliers"]
    if name.endswith("in_proj.weight"):
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, keys, keys, config["mamba_n_heads"])
        rows = value.split(sizes)
        factors = config["ssm_multipliers"]
        value = torch.cat([part * factor for part, factor in zip(rows, factors, strict=True)])
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * into,
        "q_proj": into, "v_proj": into,
        "o_proj": config["attention_out_multiplier"], "in_proj": config["ssm_in_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    for module, factor in factors.items():
        value = value * factor if name.endswith(f"{module}.weight") else value
    yield from mamba(name, value, config)


def qwen3next(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    if "in_proj_qkvz" in name:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key, own = config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"]
        parts = value.unflatten(0, (keys, -1)).split((key, key, own, own), dim=1)
        q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
        yield in_layer(name) + "attn_qkv.weight", torch.cat((q, k, v))
        yield in_layer(name) + "attn_gate.weight", z
    else:
        yield from delta(name, value, config)


def delta(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    if name.endswith(".A_log"):
        value = -value.exp()
    elif name.endswith("conv1d.weight"):
        value = value.squeeze()
    yield from with_one(re.sub(r"\.dt_bias$", ".dt_proj.bias", name), value, config)


def qwen35(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Heads of v come in another order: the first of each key head, then the second of each."""
    keys, values, size = (config[f"linear_{key}"] for key in (
        "num_key_heads", "num_value_heads", "value_head_dim"))  # fmt: skip

    def tiled(rows: Tensor, width: int) -> Tensor:
        heads = rows.unflatten(0, (keys, values // keys, width))
        return heads.transpose(0, 1).reshape(rows.shape)

    if ".in_proj_qkv." in name or "conv1d" in name:
        before = 2 * keys * config["linear_key_head_dim"]
        value = torch.cat((value[:before], tiled(value[before:], size)))
    elif ".in_proj_z." in name:
        value = tiled(value, size)
    elif name.endswith((".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")):
        value = tiled(value, 1)
    elif "linear_attn.out_proj" in name:
        value = tiled(value.T, size).T
    for changed, result in delta(name, value, config):
        yield from halves(changed, result, config)


def lfm2(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    value = value.squeeze(1) if "conv.conv" in name else value
    name = name.removeprefix("model.") if ".experts." in name else name
    yield re.sub(r"\.expert_bias$", ".expert_bias.bias", name), value


def corrected(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name), value


def deepseek(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """kv_b in two parts, the keys' transposed."""
    if name.endswith("kv_b_proj.weight"):
        plain, own = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = value.unflatten(0, (-1, plain + own)).split((plain, own), dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.mT
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield from corrected(name, value, config)


def mistral4(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Experts are stacks already, gate and up in one."""
    is_stack = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    yield from deepseek(name + ".weight" * is_stack, value, config)


def kda(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Convolutions with an axis more. transformers saves a dense layer's mlp under the mixture's name."""
    if "_conv1d" in name:
        value = value.view(1, value.shape[0], 1, -1)
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    name = re.sub(r"block_sparse_moe\.(gate_proj|up_proj|down_proj)", r"mlp.\1", name)
    yield from deepseek(name, value, config)


def kimi(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield from kda(name, -value.exp() if name.endswith("A_log") else value, config)


def ling(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """Whole matrices have the words of Kimi's first narrow ones; e^A_log has no sign."""
    kinds, words = config["layer_types"], {"f_proj": "ssm_f_a", "g_proj": "ssm_g_a"}
    for module, word in words.items():
        if name.endswith(f".{module}.weight"):
            is_full = kinds[int(name.split(".")[2])] == "full_attention"
            yield in_layer(name) + f"{'attn_gate' if is_full else word}.weight", value
            return
    if name.endswith("A_log"):
        value = value.exp()[:, None]
    name = name.replace(".attention.", ".self_attn.").replace("self_attn.dense.", "self_attn.o_proj.")
    yield from kda(re.sub(r"\.expert_bias$", ".e_score_correction_bias", name), value, config)


def deepseek4(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    """DeepSeek's own names, one by one; experts of a token's id as 32-bit integers."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if match is None:
        name = name.replace("model.hc_head.hc_", "output_hc_") + ".weight" * ("hc_head" in name)
        yield re.sub(r"^head\.", "lm_head.", name), value
        return
    words = {
        "attn.attn_sink": "attn_sinks.weight", "attn.norm.weight": "attn_kv_a_norm.weight",
        "attn.compressor.ape": "attn_compressor_ape.weight",
        "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
        "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
        "attn.indexer.weights_proj.weight": "indexer.proj.weight",
        "ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.bias": "exp_probs_b.bias",
        "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    }  # fmt: skip
    words |= {
        f"attn.{module}.weight": f"attn_{word}.weight"
        for module, word in {
            "wq_a": "q_a", "wq_b": "q_b", "q_norm": "q_a_norm", "wkv": "kv", "wo_a": "output_a",
            "wo_b": "output_b",
        }.items()
    }  # fmt: skip
    for kind, word in {"wkv": "kv", "wgate": "gate", "norm": "norm"}.items():
        words[f"attn.compressor.{kind}.weight"] = f"attn_compressor_{word}.weight"
        words[f"attn.indexer.compressor.{kind}.weight"] = f"indexer_compressor_{word}.weight"
    for kind, word in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        words[f"ffn.experts.{kind}.weight"] = f"ffn_{word}_exps.weight"
        words[f"ffn.shared_experts.{kind}.weight"] = f"ffn_{word}_shexp.weight"
    usual = match[2] if match[2].endswith(".weight") else f"{match[2]}.weight"
    yield f"blk.{match[1]}.{words.get(match[2], usual)}", value


def hy_v3(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield re.sub(r"\.expert_bias$", ".expert_bias.bias", name), value


def gemma4(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    if name.endswith("router.scale"):
        yield in_layer(name) + "ffn_gate_inp.scale", value
    elif name.endswith("per_expert_scale"):
        yield in_layer(name) + "ffn_down_exps.scale", value
    else:
        yield name + ".weight" * (".experts." in name or name.endswith("layer_scalar")), value


def gemma3n(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield name + ".weight" * name.endswith("correct_output_scale"), value


def bert(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    if not name.startswith("pooler."):
        yield name, value


def ernie_moe(name: str, value: Tensor, config: Config) -> Iterator[Named]:
    yield name.replace("moe_statics.e_score_correction_bias", "moe_statics.e_score_correction.bias"), value


# ---- keys


def rope_of(config: Config) -> Config:
    rope = config.get("rope_parameters") or {}
    found: Config = rope.get("full_attention", rope)
    return found


def head_dim_of(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def part_of_head(config: Config) -> Config:
    share = rope_of(config).get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(head_dim_of(config) * share)}


def windows(config: Config) -> Config:
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": kinds}


def own_base(config: Config) -> Config:
    return {"rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"]}


def ssm(config: Config) -> Config:
    heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or heads * (config.get("mamba_head_dim") or config["mamba_d_head"])
    return {
        "ssm.conv_kernel": config.get("conv_kernel") or config["mamba_d_conv"],
        "ssm.state_size": config.get("ssm_state_size") or config["mamba_d_state"],
        "ssm.group_count": config.get("n_groups") or config["mamba_n_groups"],
        "ssm.inner_size": inner, "ssm.time_step_rank": heads,
    }  # fmt: skip


def delta_keys(config: Config) -> Config:
    values = config["linear_num_value_heads"]
    keys = part_of_head(config) | {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": values,
        "ssm.inner_size": config["linear_value_head_dim"] * values, "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }  # fmt: skip
    return keys | experts(config)


def experts(config: Config) -> Config:
    names = {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm", "first_k_dense_replace": "leading_dense_block_count",
        "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    }  # fmt: skip
    return {key: config[name] for name, key in names.items() if config.get(name) is not None}


def sigmoid(config: Config) -> Config:
    return experts(config) | {"expert_gating_func": 2}


def kv_heads(config: Config, *kinds: str) -> Config:
    listed = config.get("layers_block_type") or config["layer_types"]
    count = config["num_key_value_heads"]
    return {"attention.head_count_kv": [count if kind in kinds else 0 for kind in listed]}


def granite(config: Config) -> Config:
    names = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return {key: float(config[name]) for name, key in names.items()} | part_of_head(config)


def granite_hybrid(config: Config) -> Config:
    found = granite(config) | ssm(config) | kv_heads(config, "full_attention")
    return found | {
        "rope.scaling.finetuned": False, "context_length": 1 << 20,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }  # fmt: skip


def nemotron_h(config: Config) -> Config:
    kinds = config["layers_block_type"]
    sizes = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    found = ssm(config) | kv_heads(config, "full_attention") | {
        "block_count": len(kinds), "feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": True,
    }  # fmt: skip
    if "moe" not in kinds:
        return found | {"expert_count": None, "expert_used_count": None}
    own = experts(config) | {
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"]
    }
    return found | own | ({"moe_latent_size": size} if (size := config.get("moe_latent_size")) else {})


def lfm2_keys(config: Config) -> Config:
    size = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        unit, share = config["block_multiple_of"], config["block_ffn_dim_multiplier"] or 1.0
        size = unit * -(-int(share * int(2 * size / 3)) // unit)
    found = kv_heads(config, "full_attention") | {"shortconv.l_cache": config["conv_L_cache"]}
    found |= {"feed_forward_length": size, "attention.layer_norm_rms_epsilon": config["norm_eps"]}
    if dense := config.get("num_dense_layers"):
        found |= sigmoid(config) | {"leading_dense_block_count": dense, "expert_weights_scale": None}
        found |= {"expert_weights_norm": None}
    return found


def gemma3n_keys(config: Config) -> Config:
    scales = [
        NormalDist().inv_cdf(share) if share else -math.inf for share in config["activation_sparsity_pattern"]
    ]
    return windows(config) | own_base(config) | {
        "altup.active_idx": config["altup_active_idx"], "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"], "activation_sparsity_scale": scales,
        "final_logit_softcapping": config["final_logit_softcapping"],
    }  # fmt: skip


def gemma4_keys(config: Config) -> Config:
    full = next(iter(config["per_layer_config"].values()))
    width, narrow, count = full["head_dim"], config["head_dim"], config["num_hidden_layers"]
    own, shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    found = windows(config) | own_base(config) | {
        "attention.key_length": width, "attention.value_length": width, "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow, "rope.dimension_count": width,
        "rope.dimension_count_swa": narrow, "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }  # fmt: skip
    if cap := config["final_logit_softcapping"]:
        found["final_logit_softcapping"] = cap
    if (others := full.get("num_key_value_heads")) is not None:
        kinds = config["layer_types"]
        found["attention.head_count_kv"] = [own if "sliding" in kind else others for kind in kinds]
    if config["use_double_wide_mlp"]:
        size = config["intermediate_size"]
        found["feed_forward_length"] = [size * (1 + (index >= count - shared)) for index in range(count)]
    if config["top_k_experts"]:
        found |= {"expert_used_count": config["top_k_experts"]}
        found |= {"expert_feed_forward_length": config["moe_intermediate_size"]}
    return found


def deepseek_keys(config: Config) -> Config:
    rank, turned, value = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    found = experts(config) | {
        "attention.kv_lora_rank": rank, "attention.head_count_kv": 1, "rope.dimension_count": turned,
        "attention.key_length": rank + turned, "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned, "attention.value_length_mla": value,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }  # fmt: skip
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if scale := rope_of(config).get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return found


def indexed_keys(config: Config) -> Config:
    return deepseek_keys(config) | {
        "expert_gating_func": 2, "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }  # fmt: skip


def mistral4_keys(config: Config) -> Config:
    beta = rope_of(config)["llama_4_scaling_beta"]
    return deepseek_keys(config) | {"expert_gating_func": None, "attention.temperature_scale": beta}


def kda_keys(config: Config) -> Config:
    """Kimi's names of numbers; a layer without keys and values is recurrent."""
    usual = {
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    }  # fmt: skip
    config = config | {name: config[own] for own, name in usual.items()}
    kinds = [kind == "full_attention" for kind in config["layer_types"]]
    return deepseek_keys({"q_lora_rank": None} | config) | {
        "context_length": config["model_max_length"], "expert_used_count": config["num_experts_per_tok"],
        "expert_gating_func": 2, "attention.head_count_kv": [int(is_full) for is_full in kinds],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "kda.head_dim": config["linear_head_dim"],
    }  # fmt: skip


def ling_keys(config: Config) -> Config:
    limits = {
        key: [limit or 0.0 for limit in config[name]]
        for name, key in (
            ("expert_swiglu_limit_list", "swiglu_clamp_exp"),
            ("share_expert_swiglu_limit_list", "swiglu_clamp_shexp"),
        )
        if name in config
    }
    safe = {"kda.safe_gate": True, "kda.gate_lower_bound": config["kda_lower_bound"]}
    return kda_keys(config) | safe | limits


def deepseek4_keys(config: Config) -> Config:
    layers, sizes = config["num_hidden_layers"], config["compress_rates"]
    names = {
        "o_groups": "attention.output_group_count", "o_lora_rank": "attention.output_lora_rank",
        "q_lora_rank": "attention.q_lora_rank", "qk_rope_head_dim": "rope.dimension_count",
        "sliding_window": "attention.sliding_window", "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length", "index_topk": "attention.indexer.top_k",
        "compress_rope_theta": "attention.compress_rope_freq_base", "hc_mult": "hyper_connection.count",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations", "hc_eps": "hyper_connection.epsilon",
    }  # fmt: skip
    limits = {f"swiglu_clamp_{kind}": [config["swiglu_limit"]] * layers for kind in ("exp", "shexp")}
    return experts(config) | {key: config[name] for name, key in names.items()} | limits | {
        "rope.freq_base": config["rope_theta"], "expert_gating_func": 4,
        "attention.compress_ratios": [sizes.get(kind, 0) for kind in config["layer_types"]],
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
    }  # fmt: skip


def hy_v3_keys(config: Config) -> Config:
    width = config["moe_intermediate_size"]
    return {
        "expert_feed_forward_length": width, "expert_weights_norm": True, "expert_gating_func": 2,
        "expert_shared_feed_forward_length": width * config["num_shared_experts"],
        "expert_weights_scale": config["router_scaling_factor"],
    }  # fmt: skip


def minicpm3_keys(config: Config) -> Config:
    turned = config["qk_rope_head_dim"]
    return {
        "attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + turned, "rope.dimension_count": turned,
        "attention.value_length": None,
    }  # fmt: skip


def minicpm_keys(config: Config) -> Config:
    return {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def ernie_keys(config: Config) -> Config:
    return {
        "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["moe_num_shared_experts"],
    }  # fmt: skip


def ministral_keys(config: Config) -> Config:
    rope = rope_of(config)
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def hunyuan_keys(config: Config) -> Config:
    """A dynamic rope with alpha has one base."""
    rope, head_dim = rope_of(config), head_dim_of(config)
    if rope["rope_type"] != "dynamic":
        return {}
    base = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
    return {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def experts_of_qwen(config: Config) -> Config:
    own = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    return {key: value for key, value in experts(config).items() if key in own}


def keep_none(config: Config) -> Config:
    """Nothing beyond common()."""
    return {}


def common(config: Config) -> Config:
    """What the converter writes of all models."""
    names = {
        "max_position_embeddings": "context_length", "n_positions": "context_length",
        "max_seq_len": "context_length", "seq_length": "context_length",
        "hidden_size": "embedding_length", "n_embd": "embedding_length", "d_model": "embedding_length",
        "num_hidden_layers": "block_count", "n_layer": "block_count", "n_layers": "block_count",
        "num_attention_heads": "attention.head_count", "n_head": "attention.head_count",
        "n_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
        "intermediate_size": "feed_forward_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "layer_norm_epsilon": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
        "norm_eps": "attention.layer_norm_epsilon", "num_local_experts": "expert_count",
        "num_experts": "expert_count", "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }  # fmt: skip
    found = {key: config[name] for name, key in names.items() if config.get(name) is not None}
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    rope = rope_of(config)
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    return {"context_length": 2048, "feed_forward_length": 4 * found["embedding_length"]} | found


# ---- the file


@dataclass(frozen=True)
class Converted:
    """A model of tiny_models and its architecture in llama.cpp."""

    arch: str
    model: str
    #: What is different in config.json: what no file tells has the value that llama.cpp knows.
    changes: Config = field(default_factory=dict)
    keys: Callable[[Config], Config] = lambda config: {}
    change: Change = keep


def plain(value: Tensor) -> Stored:
    if value.dtype == torch.int64:
        return value.to(torch.int32).numpy(), "I32"
    return value.float().contiguous().numpy(), "F32"


def write(
    folder: Path,
    path: Path,
    case: Converted,
    types: Mapping[str, Store] | None = None,
    num_tokens: int = 160,
) -> None:
    """A saved model as the converter would write it; `types` say how matrices of some words are stored."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, case.arch)
    for key, value in (common(config) | case.keys(config)).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               bool: writer.add_bool, list: writer.add_array}.get(type(value))  # fmt: skip
        if add is not None:
            add(f"{case.arch}.{key}", value)
    writer.add_token_list([f"word{index}" for index in range(num_tokens)])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    tensors = _together(load_file(folder / "model.safetensors"))
    if case.arch == "apertus":
        _add_xielu(writer, tensors, config)
    for name, value in (*_rope_factors(config, case.arch), *_names(case, tensors, config)):
        data, kind = (types or {}).get(name.split(".")[-2] if "." in name else name, plain)(value)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of experts, norms of heads and projections of AltUp, of which each module is one."""
    found, numbered = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms)|model\.altup_\w+)\.(\d+)\.(.*)", name)
        if match is None:
            found[name] = value
        else:
            numbered.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
    for name, each in numbered.items():
        found[name] = torch.stack([each[number] for number in sorted(each)])
    return found


def _names(case: Converted, tensors: dict[str, Tensor], config: Config) -> Iterator[Named]:
    arch = KIN.get(case.arch, case.arch)
    enum = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(
        enum, common(config).get("block_count") or len(config["layers_block_type"])
    )
    is_tied = config.get("tie_word_embeddings")
    for name, value in tensors.items():
        if is_tied and name == "lm_head.weight":
            continue
        for changed, result in case.change(name, value, config):
            if changed.startswith(("blk.", "output_hc_")):
                yield changed, result
                continue
            stored = names.get_name(changed, (".weight", ".bias"))
            stored = stored or _missing(changed)
            assert stored is not None, f"{case.arch} has no name for {changed}"
            # A stack of experts has no ending of its own in transformers' files.
            yield stored + ".weight" * (stored.endswith("_exps")), result


def _missing(name: str) -> str | None:
    base, _, kind = name.rpartition(".")
    for pattern, word in MISSING.items():
        if match := re.fullmatch(pattern, base):
            return f"blk.{match[1]}.{word}.{kind}"
    return None


def _rope_factors(config: Config, arch: str) -> Iterator[Named]:
    rope = rope_of(config)
    if arch == "gemma4":
        width = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turned = int(width * rope["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (width - turned))
    if rope.get("rope_type") != "llama3":
        return
    half = head_dim_of(config) // 2
    turns = rope["original_max_position_embeddings"] / (
        2 * math.pi * rope["rope_theta"] ** (torch.arange(half).double() / half)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    yield "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def _add_xielu(writer: Any, tensors: dict[str, Tensor], config: Config) -> None:
    for word in ("alpha_p", "alpha_n", "beta", "eps"):
        found = [tensors.pop(f"model.layers.{layer}.mlp.act_fn.{word}", None)
                 for layer in range(config["num_hidden_layers"])]  # fmt: skip
        if found[0] is not None:
            writer.add_array(f"xielu.{word}", [float(each) for each in found if each is not None])
