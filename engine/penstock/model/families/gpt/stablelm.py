"""StableLM (Stability AI, 2023 and arXiv 2402.17834): layer norms and rope on part of each head, around
Llama's mlp. The 12B model has attention and mlp in parallel, and norms on the heads of q and k."""

from __future__ import annotations

from typing import Any

from penstock.model.config_values import count, flag
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import MODEL_NAMES, GPTSpec, Keys, partial_rope
from penstock.model.layers import PLAIN, AttentionForm
from penstock.model.norms import HeadNorms, Norm
from penstock.weights.tensors import TensorSpec


class StableLM(GPT):
    """Each head of q and k has a norm of its own, without bias."""

    architectures = ("StableLmForCausalLM",)
    optional_prefix = "model."
    names = MODEL_NAMES._replace(up=("mlp.gate_proj", "mlp.up_proj"))
    keys = Keys()
    default_activation = "silu"
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        is_parallel = flag(config, "use_parallel_residual", False)
        norms = HeadNorms(Norm(is_centred=True), has_own_weights=True)
        return cls._spec(
            config,
            rope=partial_rope(config, 0.25),
            num_kv_heads=count(config, "num_key_value_heads", "num_attention_heads"),
            attention=AttentionForm(norms=norms) if flag(config, "qk_layernorm", False) else PLAIN,
            has_qkv_bias=flag(config, "use_qkv_bias", False),
            has_o_bias=False,
            has_mlp_bias=False,
            has_gate=True,
            is_parallel=is_parallel,
            has_mlp_norm=not is_parallel,
        )

    @classmethod
    def head_norm_tensors(cls, spec: GPTSpec, prefix: str) -> tuple[TensorSpec, ...]:
        if spec.attention.norms is None:
            return ()

        def norm(name: str, part: str, num_heads: int) -> TensorSpec:
            parts = tuple(f"{prefix}{part}.norms.{head}.weight" for head in range(num_heads))
            return TensorSpec(name, (num_heads * spec.head_dim,), parts)

        return (
            norm("q_norm", cls.names.q_norm, spec.num_heads),
            norm("k_norm", cls.names.k_norm, spec.num_kv_heads),
        )
