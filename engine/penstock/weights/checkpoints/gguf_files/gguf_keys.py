"""The keys of a GGUF file that change what a model computes: a key is read, or has a value that changes
nothing, or the file is refused."""

from __future__ import annotations

from typing import Any

from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers

#: Keys that say nothing of the arithmetic, or what the tensors' shapes say as well. The sections of a rope
#: with several axes have the same angle for each axis of a text.
IDLE = frozenset((
    "context_length", "vocab_size", "tensor_data_layout", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_shared_count", "pooling_type", "classifier.output_labels",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.dimension_sections",
    "attention.layer_norm_epsilon", "attention.q_lora_rank", "rope.scaling.type",
))  # fmt: skip
#: Values of other keys that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True, 1),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.value_scale": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "num_loops": (0, 1),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "router_logit_softcapping": (0.0,),
    "use_parallel_residual": (False, 0),
}
#: Numbers of YaRN that change no other rope. `yarn_attn_factor` does: llama.cpp multiplies by it in each.
OF_YARN = frozenset(f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier"))
#: Of a linear rope: any other share than none makes it YaRN.
NEUTRAL_IN_LINEAR: dict[str, tuple[Any, ...]] = {"rope.scaling.yarn_ext_factor": (0.0, -1.0)}
#: Keys of other kinds of files, which llama.cpp reads, too.
_OTHER = ("adapter.", "xielu.", "clip.", "diffusion.", "imatrix.")


def check_keys(numbers: Numbers, rope_type: str) -> None:
    """Raises UnsupportedModel for a key of the architecture that nobody asked for, and that changes what the
    model computes. `rope_type` is config.json's."""
    prefix, is_yarn = f"{numbers.architecture}.", rope_type == "yarn"
    neutral = NEUTRAL | (NEUTRAL_IN_LINEAR if rope_type == "linear" else {})
    for full, value in numbers.metadata.items():
        name = full.removeprefix(prefix)
        is_own = full.startswith(prefix)
        if is_own and (name in numbers.asked or name in IDLE or (name in OF_YARN and not is_yarn)):
            continue
        if is_own and not isinstance(value, list) and value in neutral.get(name, ()):
            continue
        is_other = full.startswith(_OTHER) and (numbers.architecture, full[:6]) != ("apertus", "xielu.")
        if is_own or is_other:
            shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            raise UnsupportedModel(
                f"{numbers.path} has {shown} for {full}, which Penstock does not compute with for this "
                "architecture. Use the original repository if that is supported"
            )
    kind = numbers.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{numbers.path} is a file of kind {kind!r} (general.type), and no model")


def check_same(numbers: Numbers, name: str, expected: Any, why: str) -> None:
    """Raises UnsupportedModel for a key that has another value than `expected`, which is what is computed."""
    value = numbers.get(name, expected)
    if value != expected:
        raise UnsupportedModel(
            f"{numbers.path} has {value!r} for {numbers.architecture}.{name}; {why}, which is {expected!r}"
        )
