"""AdapterConfig: adapter_config.json as PEFT writes it for LoRA. What changes the arithmetic is honoured or
refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointNotFound, InvalidConfig, UnsupportedModel
from penstock.kernels.low_rank import MAX_RANK
from penstock.weights.checkpoints.checkpoint import read_json
from penstock.weights.checkpoints.folder import ADAPTER_CONFIG

#: How A and B were made before the training, where the model's own weights stay as they are.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
#: Keys that change nothing once an adapter is trained.
_IDLE = frozenset(
    (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "fan_in_fan_out",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
    )
)
_HONOURED = frozenset(
    (
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    )
)
#: What is not computed, in words.
_REFUSED = {
    "use_dora": "DoRA, which scales the model's own weights, is not computed",
    "modules_to_save": "whole modules beside the adapter are not computed",
    "lora_bias": "biases of adapters are not computed",
    "trainable_token_indices": "rows of an embedding are not replaced",
    "target_parameters": "experts and other bare parameters have no adapters here",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt (aLoRA) are not computed",
    "layer_replication": "layers are not repeated",
}


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says of each module."""

    file: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    #: Names, of which modules' names are these or end with these; or a regular expression; None: any module.
    target_modules: Sequence[str] | str | None
    exclude_modules: Sequence[str] | str | None
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Raises CheckpointNotFound, CorruptFile, UnsupportedModel and InvalidConfig."""
        file = folder / ADAPTER_CONFIG
        if not file.is_file():
            raise CheckpointNotFound(f"{folder} has no {ADAPTER_CONFIG}: give a folder that PEFT saved")
        values = read_json(file)
        _check(file, values)
        layers = values.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
        patterns = values.get("layers_pattern") or ()
        try:
            return cls(
                file,
                _rank(values.get("r", 8)),
                _alpha(values.get("lora_alpha", 8)),
                bool(values.get("use_rslora")),
                {key: _rank(rank) for key, rank in (values.get("rank_pattern") or {}).items()},
                {key: _alpha(alpha) for key, alpha in (values.get("alpha_pattern") or {}).items()},
                _modules(values.get("target_modules")),
                _modules(values.get("exclude_modules")),
                None if layers is None else frozenset(map(int, layers)),
                (patterns,) if isinstance(patterns, str) else tuple(map(str, patterns)),
            )
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise InvalidConfig(f"{file} makes no sense: {error}; save the adapter again") from error

    def rank_of(self, module: str) -> int:
        """The ranks of a module's adapter."""
        return self.rank_pattern.get(_key_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A x: alpha / r, or alpha / sqrt(r) if rank-stabilized (arXiv 2312.03732)."""
        alpha = self.alpha_pattern.get(_key_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def has_target(self, module: str) -> bool:
        """Whether the config gives this module an adapter."""
        if _matches(self.exclude_modules, module) or not (
            self.target_modules is None or _matches(self.target_modules, module)
        ):
            return False
        if self.layers is None:
            return True
        patterns = self.layers_patterns or ("[^.]*",)
        found = (re.match(rf".*\.{pattern}\.(\d+)\.", f".{module}") for pattern in patterns)
        number = next((match for match in found if match), None)
        return number is not None and int(number[1]) in self.layers


def _check(file: Path, values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a config that asks for what is not computed."""
    if (kind := values.get("peft_type")) not in ("LORA", None):
        raise UnsupportedModel(f"{file}: peft_type is {kind!r}; Penstock computes LORA alone")
    if (bias := values.get("bias", "none")) != "none":
        raise UnsupportedModel(f"{file}: bias is {bias!r}; the biases of a model are not replaced")
    if (init := values.get("init_lora_weights")) not in _PLAIN_INITS:
        raise UnsupportedModel(
            f"{file}: init_lora_weights is {init!r}, which changes the model's own weights as well. Convert "
            "the adapter with peft: save_pretrained(folder, path_initial_model_for_weight_conversion=...)"
        )
    for key, value in values.items():
        if value and key not in _IDLE | _HONOURED:
            reason = _REFUSED.get(key, "nothing is known of it")
            raise UnsupportedModel(f"{file}: {key} is {value!r}; {reason}. Train without it, or merge")


def _rank(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ValueError(f"a rank is {value!r}; it must be 1 to {MAX_RANK}")
    return value


def _alpha(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"an alpha is {value!r}; it must be a number")
    return float(value)


def _modules(value: object) -> Sequence[str] | str | None:
    if isinstance(value, str):
        re.compile(value)
        return value or None
    if not isinstance(value, list | tuple | None) or not all(isinstance(each, str) for each in value or ()):
        raise ValueError(f"names of modules are {value!r}; they must be a list, or a regular expression")
    return tuple(value) if value else None


def _matches(names: Sequence[str] | str | None, module: str) -> bool:
    """A text is a regular expression, or the word for all linear modules. A name in a list is the whole name
    or the end of it."""
    if names is None:
        return False
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _key_of(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern for a module, as in PEFT: an expression for the end of its name. "" if none is."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), "")
