"""GPT-J (Wang and Komatsuzaki, 2021) and CodeGen (arXiv 2203.13474): one norm for attention and mlp in
parallel, and rope on pairs of neighbours in the first dimensions of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.model.config_values import count
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Names
from penstock.spec import RopeSpec
from penstock.weights.layer_weights import LayerWeights

#: CodeGen was trained on four cores. Its rows of q, k and v are those of the first core, then of the second,
#: and so on.
NUM_CORES = 4


class GPTJ(GPT):
    """Attention has no biases; the head has one."""

    architectures = ("GPTJForCausalLM",)
    unused_tensors = (r"\.attn\.(bias|masked_bias)$",)
    names = Names(
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        o="attn.out_proj",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
    )
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        # null is no value; transformers' code fails with it.
        rotary_dim = count({"rotary_dim": 64} | config, "rotary_dim")
        return cls._spec(
            config,
            rope=RopeSpec(10000.0, rotary_dim, is_interleaved=True),
            has_qkv_bias=False,
            has_o_bias=False,
            has_head_bias=True,
            is_parallel=True,
            has_mlp_norm=False,
        )


class CodeGen(GPTJ):
    """One module has the rows of q, v and k, for each core that CodeGen was trained on."""

    architectures = ("CodeGenForCausalLM",)
    unused_tensors = (r"\.attn\.causal_mask$",)
    names = GPTJ.names._replace(qkv=("attn.qkv_proj",))

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        spec = super().read_spec(config)
        if spec.num_heads % NUM_CORES:
            raise UnsupportedModel(
                f"config.json has n_head = {spec.num_heads}; CodeGen has the rows of {NUM_CORES} cores, "
                f"so that Penstock computes only multiples of {NUM_CORES}"
            )
        return spec

    def project(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        y = super().project(weights, name, x)
        if name != "qkv":
            return y
        q, v, k = (part.flatten(1) for part in y.view(y.shape[0], NUM_CORES, 3, -1).unbind(2))
        return torch.cat((q, k, v), dim=1)
