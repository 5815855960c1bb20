"""Kimi Delta Attention in GGUF files, with latent attention in the other layers: Kimi Linear and Ling 3. A
layer's tensors tell its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    Stored,
    log_of_negative,
    reshaped,
    whole,
)
from penstock.weights.checkpoints.gguf_files.gguf_latents import NAMES, latent_sizes
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    DEEPSEEK_NAMES,
    MixtureFile,
    sigmoid_config,
)
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import NEXTN
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def _config(numbers: Numbers) -> dict[str, Any]:
    """What config.json says of the layers of both kinds. Raises CorruptFile."""
    kinds = numbers.layer_kinds({"ssm_beta": "linear_attention", "attn_kv_a_mqa": "full_attention"})
    if "linear_attention" not in kinds:
        raise CorruptFile(f"{numbers.path} has no ssm_beta.weight in any layer; download it again")
    beta = numbers.tensors[f"blk.{kinds.index('linear_attention')}.ssm_beta.weight"]
    numbers.get("attention.value_length")
    return latent_sizes(numbers) | sigmoid_config(numbers) | {
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
        "intermediate_size": numbers.largest("feed_forward_length"),
        "layer_types": kinds,
        "linear_num_heads": beta.shape[0],
        "linear_head_dim": numbers.integer("kda.head_dim"),
        "linear_conv_kernel_dim": numbers.integer("ssm.conv_kernel"),
        "num_key_value_heads": numbers.num_heads,
        "hidden_act": "silu",
        "num_nextn_predict_layers": int(numbers.get("nextn_predict_layers", 0)),
    }  # fmt: skip


def _kimi_config(numbers: Numbers) -> dict[str, Any]:
    return _config(numbers) | {"model_type": "kimi_linear", "mla_use_nope": True, "q_lora_rank": None}


def _ling_config(numbers: Numbers) -> dict[str, Any]:
    return _config(numbers) | {
        "model_type": "bailing_hybrid",
        "kda_safe_gate": bool(numbers.get("kda.safe_gate", True)),
        "kda_lower_bound": numbers.real("kda.gate_lower_bound", -5.0),
        "expert_swiglu_limit_list": numbers.get("swiglu_clamp_exp"),
        "share_expert_swiglu_limit_list": numbers.get("swiglu_clamp_shexp"),
    }


def _convolution(name: str) -> Rule:
    """The weight of a convolution, [1, channels, 1, width] in files."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = reshaped(stored.entry, -1, 1, stored.entry.shape[-1])
        yield made_of(f"{stored.prefix}self_attn.{name}.weight", Matrix((entry,)))

    return rule


_KDA: dict[str, str | Rule] = NAMES | {
    "ssm_conv1d_q": _convolution("q_conv1d"), "ssm_conv1d_k": _convolution("k_conv1d"),
    "ssm_conv1d_v": _convolution("v_conv1d"), "ssm_beta": "self_attn.b_proj",
    "ssm_dt": whole("self_attn.dt_bias"), "ssm_norm": whole("self_attn.o_norm.weight", None, -1),
}  # fmt: skip
_KIMI: dict[str, str | Rule] = _KDA | {
    "ssm_a": whole("self_attn.A_log", log_of_negative, 1, 1, -1, 1),
    "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj",
}  # fmt: skip
#: The file has e^A_log here, and whole matrices under the words of Kimi's first narrow ones.
_LING: dict[str, str | Rule] = _KDA | NEXTN | {
    "ssm_a": whole("self_attn.A_log", torch.log, -1), "ssm_f_a": "self_attn.f_proj",
    "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj",
}  # fmt: skip
#: By llama.cpp's name of the architecture.
KDA_MIXTURES = {
    "kimi-linear": Architecture(
        "KimiLinear",
        names=_KIMI,
        mixture=MixtureFile(
            _kimi_config,
            "block_sparse_moe.experts.",
            ("w1", "w3", "w2"),
            {
                word: str(module).replace("mlp.", "block_sparse_moe.")
                for word, module in DEEPSEEK_NAMES.items()
            },
            {"exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias"},
            scores=None,
        ),
    ),
    "bailingmoe3": Architecture(
        "BailingHybrid",
        names=_LING,
        mixture=MixtureFile(
            _ling_config,
            names=DEEPSEEK_NAMES,
            whole_names={"exp_probs_b": "mlp.gate.e_score_correction_bias"},
            scores=None,
        ),
    ),
}
