"""DeepSeek's mixture (arXiv 2405.04434, 2412.19437), as a config.json describes it. Other families have the
same keys and names."""

from __future__ import annotations

from typing import Any, Literal

from penstock.kernels import Routing
from penstock.model.config_values import (
    MAX_LAYERS,
    count,
    flag,
    num_experts_of,
    num_layers_of,
    number,
    refuse,
    require,
)
from penstock.model.families.mixture_frame import chosen_of, typed_layers
from penstock.model.mixture.mixture import Mixture, MixtureNames

#: The names of DeepSeek's modules.
DEEPSEEK_NAMES = MixtureNames(shared="mlp.shared_experts.")


def deepseek_mixture(
    config: dict[str, Any], scoring: Literal["softmax", "sigmoid"], num_dense: int = 0
) -> Mixture:
    """DeepSeek V2 scores experts with a softmax, V3 with a sigmoid and a correction. The first layers have an
    ordinary mlp: `num_dense` of them where the config is silent. Raises UnsupportedModel."""
    require(config, "scoring_func", scoring)
    require(config, "moe_layer_freq", 1, None)
    routing = (_softmax_routing if scoring == "softmax" else _sigmoid_routing)(config)
    num_layers = num_layers_of(config, "num_hidden_layers")
    first = int(number(config, "first_k_dense_replace", num_dense))
    size = count(config, "moe_intermediate_size")
    return Mixture(
        routing,
        count(config, "hidden_size"),
        size,
        typed_layers(config, num_layers, first),
        shared_size=int(number(config, "n_shared_experts", 0)) * size,
        names=DEEPSEEK_NAMES,
    )


def _softmax_routing(config: dict[str, Any]) -> Routing:
    """DeepSeek V2: scores that are not renormalized; a group of experts is worth its best score."""
    require(config, "topk_method", "greedy", "group_limited_greedy")
    require(config, "norm_topk_prob", False, None)
    has_groups = config.get("topk_method") == "group_limited_greedy"
    num_experts = _num_experts(config)
    num_groups, num_chosen_groups = groups_of(config, num_experts) if has_groups else (1, 1)
    return Routing(
        num_experts,
        chosen_of(config, num_experts),
        scaling=number(config, "routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        num_counted=1,
    )


def _sigmoid_routing(config: dict[str, Any]) -> Routing:
    """DeepSeek V3: a group of experts is worth the sum of its two best scores."""
    require(config, "topk_method", "noaux_tc", None)
    num_experts = _num_experts(config)
    num_groups, num_chosen_groups = groups_of(config, num_experts)
    return Routing(
        num_experts,
        chosen_of(config, num_experts),
        "sigmoid",
        is_renormalized=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
        has_correction=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def groups_of(config: dict[str, Any], num_experts: int) -> tuple[int, int]:
    """The groups of a layer, and those that a token's experts come from. Raises InvalidConfig."""
    num_groups = count(config, "n_group", default=1)
    if num_experts % num_groups:
        refuse("n_group", num_groups, f"a divisor of the number of experts, {num_experts}")
    return num_groups, count(config, "topk_group", default=1, most=num_groups)


def _num_experts(config: dict[str, Any]) -> int:
    return num_experts_of(config, "n_routed_experts", "num_local_experts", "num_experts")


def num_extra_layers(config: dict[str, Any]) -> int:
    """Layers after those of the model, which guess further tokens."""
    name = (
        "num_nextn_predict_layers" if config.get("num_nextn_predict_layers") is not None else "num_mtp_layers"
    )
    found = number(config, name, 0)
    if found > MAX_LAYERS:
        refuse(name, found, f"a number from 0 to {MAX_LAYERS}")
    return int(found)
