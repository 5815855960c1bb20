"""RopeTable: rotary position embeddings. config.json becomes tables of cosines and sines, computed in
float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout, Kernels
from penstock.model.config_values import refuse
from penstock.spec import RopeSpec

#: Kinds of layers, as config.json names them in `layer_types`.
FULL, WINDOW = "full_attention", "sliding_attention"


def read_rope(config: dict[str, Any], rotary_dim: int) -> RopeSpec:
    """The rope of a config.json, old style (rope_theta, rope_scaling) or new (rope_parameters).

    Raises UnsupportedModel for a scaling that is not known.
    """
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    thetas = parameters.pop("rope_theta", None), scaling.pop("rope_theta", None), config.get("rope_theta")
    theta = next((each for each in (*thetas, config.get("rotary_emb_base")) if each is not None), 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        refuse("rope_theta", theta, "a number above 0")
    scaling = {**parameters, **scaling}
    kind = str(scaling.pop("rope_type", None) or scaling.pop("type", None) or "default")
    kind = "longrope" if kind == "su" else kind
    if kind not in _FREQUENCIES:
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported. Supported are: {', '.join(_FREQUENCIES)}"
        )
    scaling.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    if config.get("original_max_position_embeddings"):  # transformers prefers this one
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    scaling.setdefault("original_max_position_embeddings", scaling["max_position_embeddings"])
    rope = RopeSpec(float(theta), rotary_dim, kind, scaling)
    if kind == "longrope":
        return replace(rope, short_length=int(_number(rope, "original_max_position_embeddings")))
    if kind == "dynamic":
        return replace(rope, short_length=int(_number(rope, "max_position_embeddings")))
    return rope


def rotary_dim(config: dict[str, Any], head_dim: int, share: float = 1.0) -> int:
    """How many dimensions of a head rope rotates. `share` counts where the config has none."""
    parameters = config.get("rope_parameters") or {}
    own = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return int(head_dim * float(own or share))


def read_layer_ropes(
    config: dict[str, Any], rotary_dim: int, kinds: Sequence[str], thetas: dict[str, float]
) -> tuple[RopeSpec, ...]:
    """The rope of each layer, where it depends on the layer's kind. Newer configs have `rope_parameters` for
    each kind. Older ones describe the rope of full layers, and layers with a window are not scaled. `thetas`
    are the bases where `rope_parameters` has none."""
    nested = config.get("rope_parameters") or {}
    if not any(kind in nested for kind in thetas):
        nested = {FULL: config.get("rope_scaling") or nested, WINDOW: None}
    ropes = {}
    for kind in set(kinds):
        own = {"rope_parameters": nested.get(kind), "rope_scaling": None, "rope_theta": thetas[kind]}
        ropes[kind] = read_rope(config | own, rotary_dim)
    return tuple(ropes[kind] for kind in kinds)


def check_frequencies(rope: RopeSpec) -> None:
    """Raises InvalidConfig for a rope whose parameters make no frequencies of it."""
    parameters = {"rope_type": rope.scaling, "rope_theta": rope.theta, **rope.parameters}
    for frequencies, factor in _all_frequencies(rope):
        is_sane = bool((frequencies.isfinite() & (frequencies >= 0)).all()) and 0 < factor < math.inf
        if not is_sane or frequencies.shape[-1] != rope.rotary_dim // 2:
            refuse("rope_parameters", parameters, "numbers that make frequencies")


def _all_frequencies(rope: RopeSpec) -> list[tuple[Tensor, float]]:
    """For short sequences and for long ones. Raises ValueError for lists of other lengths than the heads'."""
    short = rope.short_length
    try:
        if rope.scaling == "dynamic":
            return [_dynamic(rope, torch.tensor([short, 2 * short]), None)]
        return [
            _FREQUENCIES[rope.scaling](rope, length) for length in ((short, short + 1) if short else (1,))
        ]
    except RuntimeError as error:
        raise ValueError(f"rope_parameters: {error}") from error


def context_length(rope: RopeSpec, max_position_embeddings: int) -> int:
    """How many positions a model has. With dynamic NTK, max_position_embeddings says for how many positions
    the model was trained, and the model has `factor` times as many. With YaRN, people who stretch a model
    often leave max_position_embeddings as it was; then the same holds."""
    trained = {"dynamic": "max_position_embeddings", "yarn": "original_max_position_embeddings"}
    if rope.scaling not in trained:
        return max_position_embeddings
    return max(max_position_embeddings, int(_number(rope, trained[rope.scaling]) * _number(rope, "factor")))


class RopeTable:
    """cos and sin of a step's tokens, looked up in tables, float32 [rows, rotary_dim / 2]. Their bytes are
    RopeSpec.table_bytes(). A row is a position. LongRoPE has the rows of short sequences first, then the rows
    of long ones.

    Dynamic NTK has other frequencies for each length, and therefore no table: each step computes cos and sin
    of its tokens."""

    def __init__(self, rope: RopeSpec, max_model_len: int, device: torch.device | None = None) -> None:
        self._rope = rope
        num_rows = 0 if rope.scaling == "dynamic" else max_model_len
        self._cos, self._sin = (table.to(device) for table in _tables(rope, num_rows))
        self._last: tuple[BatchLayout, tuple[Tensor, Tensor]] | None = None

    @property
    def is_interleaved(self) -> bool:
        """Whether pairs are (2i, 2i + 1), and not (i, i + half)."""
        return self._rope.is_interleaved

    def at(self, batch: BatchLayout) -> tuple[Tensor, Tensor]:
        """cos and sin of a step's tokens, each float32 [num_tokens, rotary_dim / 2]. All layers of a step ask
        for the same batch and get the same tensors, which nobody writes to."""
        last = self._last
        if last is None or last[0] is not batch:
            last = self._last = batch, self._of(batch.positions, batch.rope_lengths)
        return last[1]

    def turn(self, kernels: Kernels, x: Tensor, batch: BatchLayout) -> None:
        """Rotate a step's heads [num_tokens, num_heads, head_dim] in place."""
        cos, sin = self.at(batch)
        kernels.rope(x, cos, sin, self._rope.is_interleaved)

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of other positions, of a rope whose frequencies depend on no length."""
        return self._of(positions, None)

    def _of(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._rope.scaling == "dynamic":
            return _cos_sin(positions, *_dynamic(self._rope, positions + 1, lengths))
        rows = positions if lengths is None else positions + (lengths > 0) * self._rope.short_length
        return self._cos[rows], self._sin[rows]


def _tables(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions of short sequences, then of long sequences if there can be any."""
    short = min(rope.short_length or max_model_len, max_model_len)
    lengths = (short, max_model_len) if short < max_model_len else (short,)
    parts = [_cos_sin(torch.arange(length), *_FREQUENCIES[rope.scaling](rope, length)) for length in lengths]
    cos, sin = (torch.cat(tables) for tables in zip(*parts, strict=True))
    return cos, sin


def _cos_sin(positions: Tensor, inverse_frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Frequencies are float64 [rotary_dim / 2], or [num_tokens, rotary_dim / 2] where each token has its own
    frequencies."""
    angles = positions.double()[:, None] * inverse_frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _dynamic(rope: RopeSpec, lengths: Tensor, prompts: Tensor | None) -> tuple[Tensor, float]:
    """Dynamic NTK: a longer sequence has a larger base; up to the trained length the base is the plain one.
    `lengths` are the lengths of the sequences up to each token, int64 [num_tokens]. Where the token's prompt
    is longer, the prompt's length counts. Powers are computed as exp of log: the last bits of torch's power
    depend on where in a tensor a number lies."""
    lengths = lengths if prompts is None else torch.maximum(lengths, prompts)
    factor, dim, device = _number(rope, "factor"), rope.rotary_dim, lengths.device
    stretch = lengths.clamp_min(rope.short_length).double() * (factor / rope.short_length) - (factor - 1)
    log_base = math.log(rope.theta) + stretch.log() * (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return (-exponents * log_base[:, None]).exp(), 1.0


def _plain(rope: RopeSpec) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return 1.0 / rope.theta**exponents


def _number(rope: RopeSpec, name: str, default: float | None = None) -> float:
    value = rope.parameters.get(name)
    value = default if value is None else value  # null in a config stands for the default
    if not isinstance(value, int | float):
        raise UnsupportedModel(f"rope scaling {rope.scaling!r} lacks its parameter {name}")
    return float(value)


def _default(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    return _plain(rope) / _number(rope, "factor"), 1.0


def _proportional(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Gemma 4's: the share `partial_rotary_factor` of the pairs is turned, with frequencies as if all were,
    and the other pairs stay as they are."""
    num_turned = int(_number(rope, "partial_rotary_factor", 1.0) * rope.rotary_dim // 2)
    is_turned = torch.arange(rope.rotary_dim // 2) < num_turned
    return _plain(rope) * is_turned / _number(rope, "factor", 1.0), 1.0


def _llama3(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones are kept, and those between
    are blended."""
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    original = _number(rope, "original_max_position_embeddings")
    frequencies = _plain(rope)
    turns = original * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / _number(rope, "factor")), 1.0


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN enlarges cosines and sines of a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): stretched and plain frequencies are blended by the number of turns within the
    original context."""
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")

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
    mscale, of_all = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    has_both = mscale > 0 and of_all > 0
    attention = yarn_factor(factor, mscale) / yarn_factor(factor, of_all) if has_both else yarn_factor(factor)
    return frequencies * (1 - stretch + stretch / factor), _number(rope, "attention_factor", attention)


def score_factor(rope: RopeSpec) -> float:
    """The factor of scores that DeepSeek's models have beside that of cosines and sines: keys and queries
    each have it in all dimensions, also in those without rope."""
    everywhere = _number(rope, "mscale_all_dim", 0.0)
    if rope.scaling == "default" or not everywhere:
        return 1.0
    return yarn_factor(_number(rope, "factor"), everywhere) ** 2


def _longrope(rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one factor per dimension. Sequences up to the original length have one
    list of factors, longer ones another. The factor of cos and sin is the same for both, since this factor
    depends on the config and not on the sequence."""
    original = _number(rope, "original_max_position_embeddings")
    name = "long_factor" if length > original else "short_factor"
    factors = torch.tensor(rope.parameters[name], dtype=torch.float64)
    ratio = _number(rope, "factor", _number(rope, "max_position_embeddings") / original)
    attention = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return _plain(rope) / factors, _number(rope, "attention_factor", attention)


#: (rope, length of the sequence) -> inverse frequencies [rotary_dim / 2], and the factor of cos and sin.
_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
    "longrope": _longrope,
}
