"""Mixtures that have the attention of a dense family: Granite MoE, ERNIE 4.5 MoE, Hunyuan-A13B."""

from __future__ import annotations

from typing import Any

from penstock.kernels import Routing
from penstock.model.config_values import count, num_experts_of, number, refuse, require
from penstock.model.families.dense.llama_relatives import Ernie45, Granite, HunYuanDense
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, all_layers, chosen_of, with_mixture
from penstock.model.mixture.mixture import Mixture, MixtureNames


class GraniteMoe(MixtureFamily, Granite):
    """Granite with experts that lie in one tensor. The best logits get a softmax of their own."""

    architectures = ("GraniteMoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        num_experts = num_experts_of(config, "num_local_experts", "num_experts")
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=True)
        names = MixtureNames(
            "block_sparse_moe.router.layer",
            "block_sparse_moe.experts.",
            merged_gate_up="block_sparse_moe.input_linear.weight",
            merged_down="block_sparse_moe.output_linear.weight",
            in_memory=(
                ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
                ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
                ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ),
        )
        size, layers = spec.intermediate_size, all_layers(spec)
        return with_mixture(spec, Mixture(routing, spec.hidden_size, size, layers, names=names))


class Ernie45Moe(MixtureFamily, Ernie45):
    """ERNIE 4.5 with experts: a corrected softmax, and a shared expert."""

    architectures = ("Ernie4_5_MoeForCausalLM",)
    #: A block that guesses further tokens.
    unused_tensors = (r"^model\.mtp_",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "use_bias", False, None)
        spec = super().read_spec(config)
        num_experts = num_experts_of(
            config, "moe_num_experts", "num_experts", "num_local_experts", default=64
        )
        routing = Routing(
            num_experts,
            chosen_of({"moe_k": 6} | config, num_experts, "moe_k"),
            is_renormalized=True,
            least_sum=number(config, "moe_norm_min", 1e-12),
            has_correction=True,
        )
        size = count(config, "moe_intermediate_size")
        return with_mixture(
            spec,
            Mixture(
                routing,
                spec.hidden_size,
                size,
                _ernie_layers(config, spec.num_layers),
                shared_size=int(number(config, "moe_num_shared_experts", 2)) * size,
                has_correction_row=True,
                names=MixtureNames(
                    shared="mlp.shared_experts.",
                    correction="mlp.moe_statics.e_score_correction_bias",
                    in_memory=(
                        (
                            "mlp.gate.moe_statics.e_score_correction_bias",
                            "mlp.moe_statics.e_score_correction_bias",
                        ),
                    ),
                ),
            ),
        )


def _ernie_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    """The layers with experts: some from a first to a last one."""
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    for name, layer in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if not isinstance(layer, int):
            refuse(name, layer, "the number of a layer")
    interval = count(config, "moe_layer_interval", default=1)
    last = num_layers - 1 if last == -1 else last
    return frozenset(index for index in range(first, last + 1) if (index + 1) % interval == 0)


class HunYuanMoe(MixtureFamily, HunYuanDense):
    """Hunyuan with experts in every layer, and a shared one."""

    architectures = ("HunYuanMoEV1ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "moe_layer_num_skipped", 0, None)
        spec = super().read_spec(config)
        num_experts = num_experts_of({"num_experts": _same(config, "num_experts")}, "num_experts")
        chosen = {"moe_topk": _same(config, "moe_topk")}
        routing = Routing(num_experts, chosen_of(chosen, num_experts, "moe_topk"), is_renormalized=True)
        size = _same({"moe_intermediate_size": spec.intermediate_size} | config, "moe_intermediate_size")
        shared = _same({"num_shared_expert": 1} | config, "num_shared_expert") * spec.intermediate_size
        names = MixtureNames("mlp.gate.wg", shared="mlp.shared_mlp.")
        layers = all_layers(spec)
        mixture = Mixture(routing, spec.hidden_size, size, layers, shared_size=shared, names=names)
        return with_mixture(spec, mixture)


def _same(config: dict[str, Any], name: str) -> int:
    """A number that config.json gives once or for each layer. Raises UnsupportedModel where layers differ."""
    value = config.get(name)
    if isinstance(value, list) and value:
        for other in value:
            require({name: other, "model_type": config.get("model_type")}, name, value[0])
        return count({name: value[0]}, name)
    return count(config, name)
