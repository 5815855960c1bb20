"""DeepSeek V2 and V3 in GGUF files: a mixture with latent attention (MLA). Newer files have the matrix that
makes keys and values of a latent in two parts, head by head, and the part of the keys transposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import GROUP
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, Rule, Stored
from penstock.weights.checkpoints.gguf_files.gguf_dense import minicpm_factors
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    DEEPSEEK_NAMES,
    SIGMOID,
    SOFTMAX,
    MixtureFile,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry

KEYS, VALUES = "attn_k_b", "attn_v_b"
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


def _config(numbers: Numbers) -> dict[str, Any]:
    """What config.json says of a DeepSeek. Raises UnsupportedModel."""
    scores, turned = numbers.integer("expert_gating_func", SOFTMAX), numbers.integer("rope.dimension_count")
    if scores not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel(
            f"{numbers.path} has routers of kind {scores}, of which Penstock knows 1 and 2"
        )
    width = numbers.integer("attention.key_length_mla", numbers.integer("attention.key_length"))
    value_dim = numbers.integer("attention.value_length_mla", numbers.integer("attention.value_length"))
    count, rank = numbers.integer("expert_count"), numbers.get("attention.q_lora_rank")
    num_groups, num_chosen = GROUPS.get((scores, count), (1, 1))
    num_groups = numbers.integer("expert_group_count", num_groups)
    version = "V3" if scores == SIGMOID else "V2"
    greedy = "group_limited_greedy" if num_groups > 1 else "greedy"
    return {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "model_type": f"deepseek_{version.lower()}",
        "num_key_value_heads": numbers.num_heads,
        "kv_lora_rank": numbers.integer("attention.kv_lora_rank"),
        "q_lora_rank": rank,
        "qk_nope_head_dim": width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value_dim,
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


#: By llama.cpp's name of the architecture.
LATENTS = {
    "deepseek2": Architecture(
        "DeepseekV2",
        names=NAMES,
        mixture=LatentMixtureFile(
            _config,
            names=DEEPSEEK_NAMES,
            scores=None,
            whole_names={"exp_probs_b": "mlp.gate.e_score_correction_bias"},
        ),
    ),
}
DENSE_LATENTS = {"minicpm3": Architecture("MiniCPM3", _minicpm3_config, NAMES)}
