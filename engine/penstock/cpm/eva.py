"""EVA (arXiv 2108.01547, 2203.09313): T5, but that EVA 2.0 scales scores by 1 / sqrt(head_dim), which T5 does
not do at all."""

from __future__ import annotations

from typing import Any

from penstock.model.config_values import count, flag
from penstock.model.families.t5 import T5
from penstock.model.families.t5_architecture import T5Spec, token_id


class EVA(T5):
    """EVA 1.0 and 2.0. An answer begins with `<s_0>`, which the config calls the token for begin."""

    architectures = ("EVAModel",)
    unused_tensors = (*T5.unused_tensors, r"^role_embeds\.weight$")

    @classmethod
    def decoder_start(cls, config: dict[str, Any]) -> tuple[int, ...]:
        return (token_id(config, "decoder_start_token_id", "bos_token_id", default=29810),)

    @classmethod
    def score_scale(cls, config: dict[str, Any]) -> float:
        return count(config, "d_kv") ** -0.5 if flag(config, "attn_scale", False) else 1.0

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> T5Spec:
        # The config says "relu", and EVA's code computes a gated gelu whatever the config says. The head has
        # a matrix of its own, and nothing scales before it.
        own = {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "scale_decoder_outputs": False,
        }
        return super().read_spec(config | own)
