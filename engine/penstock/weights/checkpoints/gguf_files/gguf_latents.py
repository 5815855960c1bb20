"""DeepSeek V2, V3 and V3.2, GLM-5 and Mistral 4 in GGUF files: a mixture with latent attention (MLA). Newer
files have the matrix that makes keys and values of a latent in two parts, head by head, and the part of the
keys transposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import GROUP
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, Rule, Stored, whole
from penstock.weights.checkpoints.gguf_files.gguf_dense import minicpm_factors
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_same
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    DEEPSEEK_NAMES,
    SIGMOID,
    SOFTMAX,
    MixtureFile,
)
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import NEXTN
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry

KEYS, VALUES = "attn_k_b", "attn_v_b"
CORRECTED = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
#: Groups of experts and how many of them a token may use, by scores and number of experts, where a file of an
#: older converter does not say: those of DeepSeek V2 and V3. Other models have no groups.
GROUPS = {(SOFTMAX, 160): (8, 3), (SIGMOID, 256): (8, 4)}
NAMES: dict[str, str | Rule] = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    KEYS: lambda stored: _kv_b(stored), VALUES: lambda stored: _kv_b(stored),
}  # fmt: skip


@dataclass(frozen=True)
class LatentMixtureFile(MixtureFile):
    """The mixture, and the two parts of "kv_b"."""

    #: The file has a tenth of this number of config.json, which is that of scores and of rope alike.
    log_share: ClassVar[float] = 0.1

    def config(self, numbers: Numbers, rope: dict[str, Any]) -> dict[str, Any]:
        scale = numbers.real("rope.scaling.yarn_log_multiplier", 0.0) / self.log_share
        scales = {"mscale": scale, "mscale_all_dim": scale} if rope["rope_type"] == "yarn" and scale else {}
        return super().config(numbers, rope | scales)


def _kv_b(stored: Stored) -> Iterator[TensorEntry]:
    """The matrix in two parts, of which the first makes it. Raises CorruptFile."""
    pair = [stored.entry.name.replace(stored.word, part) for part in (KEYS, VALUES)]
    keys, values = (stored.numbers.tensors.get(name) for name in pair)
    if keys is None or values is None:
        raise CorruptFile(
            f"{stored.numbers.path} has {stored.entry.name} without its partner; download it again"
        )
    if stored.word == KEYS:
        yield joined(f"{stored.prefix}self_attn.kv_b_proj.weight", keys, values)


def joined(name: str, keys: TensorEntry, values: TensorEntry) -> TensorEntry:
    """[num_heads * (plain_dim + value_dim), rank], of keys [num_heads, rank, plain_dim] and values
    [num_heads, value_dim, rank]. Blocks of the keys lie along another axis than the rows: they are decoded,
    and become INT8. Raises CorruptFile."""
    if not (len(keys.shape) == len(values.shape) == 3 and keys.shape[:2] == values.shape[::2]):
        raise CorruptFile(
            f"{keys.file}: {keys.name} {list(keys.shape)} and {values.name} {list(values.shape)} don't fit; "
            "download the file again"
        )
    num_heads, rank, plain = keys.shape
    step = plain + values.shape[1]
    each = [replace(part, shape=(num_heads * part.shape[1], part.shape[2])) for part in (keys, values)]
    parts = [renamed(part.name, part) for part in each]

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        first, end = start // step, -(-stop // step)
        k, v = (
            part.read_rows(checkpoint, first * height, end * height).float().view(end - first, height, -1)
            for part, height in zip(parts, (rank, values.shape[1]), strict=True)
        )
        rows = torch.cat((k.mT, v), dim=1).flatten(0, 1)
        return rows[start - first * step : stop - first * step]

    shape, num_bytes = (num_heads * step, rank), keys.num_bytes + values.num_bytes
    return TensorEntry(
        name, keys.file, keys.offset, "F32", shape, num_bytes, decode, has_outputs_first=True,
        group_size=GROUP,
    )  # fmt: skip


def latent_sizes(numbers: Numbers) -> dict[str, Any]:
    """The sizes of heads and latents, by config.json's keys."""

    def length(name: str) -> int:
        own = numbers.get(f"attention.{name}_mla")
        plain = numbers.get(f"attention.{name}")
        return numbers.integer(
            f"attention.{name}_mla" if own is not None or plain is None else f"attention.{name}"
        )

    turned = numbers.integer("rope.dimension_count")
    return {
        "kv_lora_rank": numbers.integer("attention.kv_lora_rank"),
        "q_lora_rank": numbers.get("attention.q_lora_rank"),
        "qk_nope_head_dim": length("key_length") - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": length("value_length"),
    }


def _config(numbers: Numbers) -> dict[str, Any]:
    """What config.json says of a DeepSeek. Raises UnsupportedModel."""
    scores = numbers.integer("expert_gating_func", SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel(
            f"{numbers.path} has routers of kind {scores}, of which Penstock knows 1 and 2"
        )
    count = numbers.integer("expert_count")
    num_groups, num_chosen = GROUPS.get((scores, count), (1, 1))
    num_groups = numbers.integer("expert_group_count", num_groups)
    version = "V3" if scores == SIGMOID else "V2"
    greedy = "group_limited_greedy" if num_groups > 1 else "greedy"
    return latent_sizes(numbers) | {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "model_type": f"deepseek_{version.lower()}",
        "num_key_value_heads": numbers.num_heads,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in numbers.tensors,
        "intermediate_size": numbers.integer("feed_forward_length"),
        "first_k_dense_replace": numbers.integer("leading_dense_block_count", 0),
        "n_routed_experts": count,
        "n_shared_experts": numbers.integer("expert_shared_count", 0),
        "n_group": num_groups,
        "topk_group": numbers.integer("expert_group_used_count", num_chosen),
        "topk_method": "noaux_tc" if version == "V3" else greedy,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", False)),
        "routed_scaling_factor": numbers.real("expert_weights_scale", 1.0),
    }


def _indexed_config(numbers: Numbers) -> dict[str, Any]:
    """DeepSeek V3.2 and GLM-5. Layers without an indexer take the choice of the last one before."""
    is_glm = numbers.architecture == "glm-dsa"
    num_groups, num_chosen = (1, 1) if is_glm else (8, 4)
    has_own = [numbers.has(layer, "indexer.attn_k") for layer in range(numbers.num_layers)]
    return _config(numbers) | {
        "architectures": ["GlmMoeDsaForCausalLM" if is_glm else "DeepseekV32ForCausalLM"],
        "model_type": "glm_moe_dsa" if is_glm else "deepseek_v32",
        "n_group": numbers.integer("expert_group_count", num_groups),
        "topk_group": numbers.integer("expert_group_used_count", num_chosen),
        "index_n_heads": numbers.integer("attention.indexer.head_count"),
        "index_head_dim": numbers.integer("attention.indexer.key_length"),
        "index_topk": numbers.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if own else "shared" for own in has_own],
        "num_nextn_predict_layers": int(numbers.get("nextn_predict_layers", 0)),
    }


def _mistral4_config(numbers: Numbers) -> dict[str, Any]:
    """The width of a head is that of a whole query here."""
    found = _config(numbers)
    return found | {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"],
        "topk_method": None,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
    }


@dataclass(frozen=True)
class _Mistral4File(LatentMixtureFile):
    """Queries grow with the position."""

    def config(self, numbers: Numbers, rope: dict[str, Any]) -> dict[str, Any]:
        found = super().config(numbers, rope)
        found["rope_parameters"] |= {
            "llama_4_scaling_beta": numbers.real("attention.temperature_scale", 0.1),
            "partial_rotary_factor": found["qk_rope_head_dim"] / found["head_dim"],
        }
        return found


def _minicpm3_config(numbers: Numbers) -> dict[str, Any]:
    """Files have neither the width of values nor MiniCPM's factors, which llama.cpp knows."""
    turned, rank = numbers.integer("rope.dimension_count"), numbers.integer("attention.kv_lora_rank")
    output = numbers.tensors["blk.0.attn_output.weight"]
    return minicpm_factors(numbers) | {
        "kv_lora_rank": rank,
        "q_lora_rank": numbers.get("attention.q_lora_rank"),
        "qk_nope_head_dim": numbers.integer("attention.key_length") - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": output.shape[1] // numbers.num_heads,
    }


_INDEXED = Architecture(
    "DeepseekV32",
    names=NAMES
    | NEXTN
    | {
        "indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj",
    },
    mixture=LatentMixtureFile(
        _indexed_config, names=DEEPSEEK_NAMES, scores=None, whole_names=CORRECTED
    ),
)  # fmt: skip
#: By llama.cpp's name of the architecture.
LATENTS = {
    "deepseek2": Architecture(
        "DeepseekV2",
        names=NAMES,
        mixture=LatentMixtureFile(
            _config,
            names=DEEPSEEK_NAMES,
            scores=None,
            whole_names=CORRECTED,
        ),
    ),
    "deepseek32": _INDEXED,
    "glm-dsa": _INDEXED,
    "mistral4": Architecture(
        "Mistral4",
        names=NAMES,
        mixture=_Mistral4File(_mistral4_config, names=DEEPSEEK_NAMES, scores=None),
    ),
}
DENSE_LATENTS = {"minicpm3": Architecture("MiniCPM3", _minicpm3_config, NAMES)}


# ---- DeepSeek V4

#: llama.cpp's number of the root of a softplus.
SQRT_SOFTPLUS = 4


def _v4_config(numbers: Numbers) -> dict[str, Any]:
    """Raises UnsupportedModel for limits that differ from layer to layer."""
    check_same(numbers, "expert_gating_func", SQRT_SOFTPLUS, "Penstock knows one kind of scores here")
    check_same(numbers, "expert_weights_norm", True, "the weights of a token's experts add up to one here")
    limits = {limit for name in ("exp", "shexp") for limit in numbers.get(f"swiglu_clamp_{name}") or ()}
    if len(limits) > 1:
        raise UnsupportedModel(f"{numbers.path} has limits of gates that differ ({sorted(limits)})")
    head_dim, turned = numbers.integer("attention.key_length"), numbers.integer("rope.dimension_count")
    return {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": turned,
        "partial_rotary_factor": turned / head_dim,
        "rope_theta": numbers.real("rope.freq_base", 1e4),
        "compress_rope_theta": numbers.real("attention.compress_rope_freq_base", 160000.0),
        "compress_ratios": numbers.get("attention.compress_ratios"),
        "q_lora_rank": numbers.integer("attention.q_lora_rank"),
        "o_groups": numbers.integer("attention.output_group_count"),
        "o_lora_rank": numbers.integer("attention.output_lora_rank"),
        "sliding_window": numbers.integer("attention.sliding_window"),
        "index_n_heads": numbers.integer("attention.indexer.head_count"),
        "index_head_dim": numbers.integer("attention.indexer.key_length"),
        "index_topk": numbers.integer("attention.indexer.top_k"),
        "hc_mult": numbers.integer("hyper_connection.count"),
        "hc_sinkhorn_iters": numbers.integer("hyper_connection.sinkhorn_iterations"),
        "hc_eps": numbers.real("hyper_connection.epsilon"),
        "num_hash_layers": int(numbers.get("hash_layer_count", 0)),
        "n_routed_experts": numbers.integer("expert_count"),
        "n_shared_experts": numbers.integer("expert_shared_count", 1),
        "routed_scaling_factor": numbers.real("expert_weights_scale", 1.0),
        "swiglu_limit": next(iter(limits), 0.0),
        "scoring_func": "sqrtsoftplus",
    }


def _v4_names() -> dict[str, str | Rule]:
    modules: dict[str, str | Rule] = {
        "output": "head", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "attn_q_a": "attn.wq_a",
        "attn_q_b": "attn.wq_b", "attn_q_a_norm": "attn.q_norm", "attn_kv": "attn.wkv",
        "attn_kv_a_norm": "attn.norm", "attn_output_a": "attn.wo_a", "attn_output_b": "attn.wo_b",
        "attn_compressor_kv": "attn.compressor.wkv", "attn_compressor_gate": "attn.compressor.wgate",
        "attn_compressor_norm": "attn.compressor.norm", "indexer.attn_q_b": "attn.indexer.wq_b",
        "indexer.proj": "attn.indexer.weights_proj", "indexer_compressor_kv": "attn.indexer.compressor.wkv",
        "indexer_compressor_gate": "attn.indexer.compressor.wgate",
        "indexer_compressor_norm": "attn.indexer.compressor.norm",
    }  # fmt: skip
    hyper = [f"hc_{part}_{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")]
    alone = {name: name for name in hyper} | {
        f"output_hc_{kind}": f"model.hc_head.hc_{kind}" for kind in ("fn", "base", "scale")
    }
    alone |= {
        "attn_sinks": "attn.attn_sink", "attn_compressor_ape": "attn.compressor.ape",
        "indexer_compressor_ape": "attn.indexer.compressor.ape",
    }  # fmt: skip
    return modules | {word: whole(name) for word, name in alone.items()}


LATENTS["deepseek4"] = Architecture(
    "DeepseekV4",
    names=_v4_names(),
    rotates_part=True,
    mixture=MixtureFile(
        _v4_config,
        "ffn.experts.",
        ("w1", "w3", "w2"),
        {
            "ffn_gate_inp": "ffn.gate", "ffn_gate_shexp": "ffn.shared_experts.w1",
            "ffn_up_shexp": "ffn.shared_experts.w3", "ffn_down_shexp": "ffn.shared_experts.w2",
        },
        {"exp_probs_b": "ffn.gate.bias", "ffn_gate_tid2eid": "ffn.gate.tid2eid"},
        scores=None,
    ),
)  # fmt: skip
