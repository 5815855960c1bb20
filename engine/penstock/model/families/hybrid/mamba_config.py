"""Mamba-2 by its names in a config.json."""

from __future__ import annotations

from typing import Any

from penstock.model.config_values import count, flag, number, refuse, require
from penstock.model.recurrent.mamba2 import Mamba2


def read_mamba(config: dict[str, Any], **others: Any) -> Mamba2:
    """Mamba-2 as IBM's and Falcon's models name its numbers; `others` are fields of Mamba2. Raises
    InvalidConfig and UnsupportedModel."""
    require(config, "hidden_act", "silu")
    heads = count(config, "mamba_n_heads", default=128)
    width = count(config, "mamba_d_ssm", default=_expanded(config))
    automatic = config.get("mamba_d_head") in (None, "auto")
    head_dim = width // heads if automatic else count(config, "mamba_d_head")
    if head_dim * heads != width:
        refuse("mamba_d_head", config.get("mamba_d_head"), f"{width} / mamba_n_heads, {heads}")
    groups = count(config, "mamba_n_groups", default=1)
    if heads % groups:
        refuse("mamba_n_groups", groups, f"a divisor of mamba_n_heads, {heads}")
    has_bias = flag(config, "mamba_proj_bias", False)
    values: dict[str, Any] = {
        "has_conv_bias": flag(config, "mamba_conv_bias", True),
        "has_in_bias": has_bias,
        "has_out_bias": has_bias,
        "step_limits": step_limits(config),
    }
    return Mamba2(
        heads,
        head_dim,
        groups,
        count(config, "mamba_d_state", default=256),
        count(config, "mamba_d_conv", default=4),
        **(values | others),
    )


def step_limits(config: dict[str, Any]) -> tuple[float, float]:
    """`time_step_limit`: the least and the largest step. Infinity may be spelled as transformers spells it,
    {"__float__": "Infinity"}. Raises InvalidConfig."""
    limits = config.get("time_step_limit") or (0.0, "inf")
    try:
        least, most = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (TypeError, ValueError, KeyError):
        refuse("time_step_limit", limits, "two numbers")
    return least, most


def _expanded(config: dict[str, Any]) -> int:
    return int(number(config, "mamba_expand", 2) * count(config, "hidden_size"))
