"""Rotary position embeddings: config.json -> tables of cosines and sines, computed in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.spec import RopeSpec


def read_rope(config: dict[str, Any], rotary_dim: int) -> RopeSpec:
    """The rope of a config.json, old style (rope_theta, rope_scaling) or new (rope_parameters).

    Raises UnsupportedModel for a scaling that is not known.
    """
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or scaling.pop("rope_theta", None)
    theta = theta or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    scaling = {**parameters, **scaling}
    kind = str(scaling.pop("rope_type", None) or scaling.pop("type", None) or "default")
    kind = "longrope" if kind == "su" else kind
    if kind not in _FREQUENCIES:
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; there are: {', '.join(_FREQUENCIES)}"
        )
    scaling.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    if config.get("original_max_position_embeddings"):  # transformers prefers it to the scaling's own
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return RopeSpec(float(theta), rotary_dim, kind, scaling)


class RopeTable:
    """cos and sin of every position, float32 [max_model_len, rotary_dim / 2]."""

    def __init__(self, rope: RopeSpec, max_model_len: int, device: torch.device | None = None) -> None:
        inverse_frequencies, factor = _FREQUENCIES[rope.scaling](rope, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float64)[:, None] * inverse_frequencies
        self._cos = (angles.cos() * factor).float().to(device=device)
        self._sin = (angles.sin() * factor).float().to(device=device)
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of int64 [num_tokens] positions, each [num_tokens, rotary_dim / 2]. Every layer of a
        step asks for those of the same tensor, which nobody writes to."""
        last = self._last
        if last is None or last[0] is not positions:
            last = self._last = positions, (self._cos[positions], self._sin[positions])
        return last[1]


def _plain(rope: RopeSpec) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return 1.0 / rope.theta**exponents


def _number(rope: RopeSpec, name: str, default: float | None = None) -> float:
    value = rope.parameters.get(name)
    value = default if value is None else value  # configs write null for "as by default"
    if not isinstance(value, int | float):
        raise UnsupportedModel(f"rope scaling {rope.scaling!r} lacks its parameter {name}")
    return float(value)


def _default(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope) / _number(rope, "factor"), 1.0


def _dynamic(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    # Its frequencies change while a sequence grows past what the model was trained for, and with them
    # every cached key: only the range in which it equals plain rope has one answer.
    if max_model_len > _number(rope, "max_position_embeddings"):
        raise UnsupportedModel(
            "dynamic rope scaling beyond max_position_embeddings is not supported; pass --max-model-len "
            f"{int(_number(rope, 'max_position_embeddings'))} or less"
        )
    return _plain(rope), 1.0


def _llama3(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, between them blended."""
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    original = _number(rope, "original_max_position_embeddings")
    frequencies = _plain(rope)
    turns = original * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / _number(rope, "factor")), 1.0


def _yarn(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): blend by the number of turns within the original context."""
    factor, original = (
        _number(rope, "factor"),
        _number(
            rope,
            "original_max_position_embeddings",
            _number(rope, "max_position_embeddings"),
        ),
    )

    def dimension(turns: float) -> float:
        logarithm = math.log(original / (turns * 2 * math.pi))
        return rope.rotary_dim * logarithm / (2 * math.log(rope.theta))

    low, high = (
        dimension(_number(rope, "beta_fast", 32.0)),
        dimension(_number(rope, "beta_slow", 1.0)),
    )
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = _plain(rope)
    attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if "mscale" in rope.parameters or "mscale_all_dim" in rope.parameters:
        raise UnsupportedModel("YaRN with mscale is not supported")
    return frequencies * (1 - stretch + stretch / factor), _number(rope, "attention_factor", attention)


def _longrope(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a factor per dimension, one list for contexts up to the original
    length and one beyond. The engine's max_model_len decides, so that cached keys never change."""
    original = _number(rope, "original_max_position_embeddings")
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = torch.tensor(rope.parameters[name], dtype=torch.float64)
    ratio = _number(rope, "factor", _number(rope, "max_position_embeddings") / original)
    attention = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return _plain(rope) / factors, _number(rope, "attention_factor", attention)


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
