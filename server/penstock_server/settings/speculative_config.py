"""SpeculativeConfig: --speculative-config, the JSON object with which users of vLLM choose who guesses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from penstock.config import EngineConfig

_TEXT = ("ngram", "suffix")
#: Heads of multi-token prediction; vLLM has a name for each family, too.
_MTP = ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
_EAGLE3 = "eagle3"
_PLANES = "planes"
#: Methods that name a model of their own.
_WITH_MODEL = ("draft_model", _EAGLE3)
_METHODS = (*_TEXT, *_WITH_MODEL, "mtp", _PLANES)
_PLANNER = "leave it out: Penstock measures how often guesses are right, and takes those that pay"
_HEADS = "is for heads that Penstock does not compute: leave it out, and take method eagle3 or mtp"
_DRAFT = "leave it out: the draft model is loaded as INT8, on the processor"
#: Keys of vLLM's that Penstock can't honour -> what to do.
_REFUSED = {
    "suffix_decoding_max_tree_depth": _PLANNER,
    "suffix_decoding_max_cached_requests": "leave it out: four texts of each cache_salt are looked up",
    "suffix_decoding_max_spec_factor": _PLANNER,
    "suffix_decoding_min_token_prob": _PLANNER,
    "num_speculative_tokens_per_batch_size": _PLANNER,
    "disable_by_batch_size": _PLANNER,
    "enable_adaptive_verification": _PLANNER,
    "speculative_token_tree": _PLANNER,
    "draft_sample_method": "leave it out: the draft model draws with the noise of the request",
    "synthetic_acceptance_rates": "leave it out: a guess is accepted where it is the token that is drawn",
    "synthetic_acceptance_length": "leave it out: a guess is accepted where it is the token that is drawn",
    "parallel_drafting": _HEADS,
    "dspark_draft_topk": _HEADS,
    "disable_padded_drafter_batch": _HEADS,
    "disable_eagle_block_drop": _HEADS,
    "index_share_for_mtp_iteration": _HEADS,
    "use_local_argmax_reduction": "is for several GPUs: leave it out",
    "use_heterogeneous_vocab": "leave it out, and take a draft model with the vocabulary of the model",
    "tensor_parallel_size": "leave it out: a draft model is computed on one machine",
    "quantization": _DRAFT,
    "moe_backend": _DRAFT,
    "attention_backend": _DRAFT,
    "kv_cache_dtype": _DRAFT,
    "draft_load_config": _DRAFT,
    "max_model_len": "leave it out: a draft model guesses up to its own context",
    "revision": "download the revision first, and give its folder as the model",
    "code_revision": "leave it out: no code of a repository is run",
    "enforce_eager": "leave it out: there are no CUDA graphs to do without",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What the object says; None where it says nothing."""

    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    is_mtp: bool = False
    is_planes: bool = False
    is_eagle3: bool = False

    @property
    def is_of_one_model(self) -> bool:
        """Whether it names what belongs to one model: a draft model, or what came with the model."""
        return self.model is not None or self.is_mtp or self.is_planes

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From JSON. A key that asks for nothing (null, false) is honoured whatever its name. Raises
        ValueError, which says what to do."""
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON: {error}") from None
        if not isinstance(entries, dict):
            raise ValueError(f'{text!r} is no JSON object; write for example {{"method": "ngram"}}')
        asked = {key: value for key, value in entries.items() if value is not None and value is not False}
        if reason := next((_trouble(key, value) for key, value in asked.items() if _trouble(key, value)), ""):
            raise ValueError(reason)
        _check_method(asked)
        method = asked.get("method")
        names = ("model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        values = {name: asked.get(name) for name in names}
        return cls(**values, is_mtp=method in _MTP, is_planes=method == _PLANES, is_eagle3=method == _EAGLE3)

    def engine_values(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        found = {
            "draft_model": self.model,
            "max_guesses": self.num_speculative_tokens,
            "prompt_lookup_min": self.prompt_lookup_min,
            "prompt_lookup_max": self.prompt_lookup_max,
            "mtp": "on" if self.is_mtp else None,
            "draft_with_planes": True if self.is_planes else None,
            "draft_with_eagle3": True if self.is_eagle3 else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _trouble(key: str, value: object) -> str:
    """Why an entry can't be honoured, and what to do; empty if it can."""
    if key in _REFUSED:
        return f"{key}: {_REFUSED[key]}"
    if key == "method":
        known = value in (*_METHODS, *_MTP)
        return "" if known else f"method {value!r} is not one of Penstock's: take {', '.join(_METHODS)}"
    if key == "model":
        return "" if isinstance(value, str) and value else f"model is {value!r}; name a folder or repository"
    if key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
        fits = type(value) is int and value >= 1
        return "" if fits else f"{key} is {value!r}; it must be a whole number, at least 1"
    if key == "draft_tensor_parallel_size":
        return "" if value == 1 else f"{key} is {value!r}; it can be 1: a draft model is on one processor"
    if key == "rejection_sample_method":
        return "" if value == "standard" else f"{key} is {value!r}; leave it out: answers never change"
    return f"{key} is no key of vLLM's that Penstock knows: leave it out"


def _check_method(asked: dict[str, Any]) -> None:
    """Raises ValueError for a method without its model, and for a model without its method."""
    method = asked.get("method") or ("draft_model" if "model" in asked else None)
    if method is None:
        raise ValueError(f"no method: write one of {', '.join(_METHODS)}")
    if method in _WITH_MODEL and "model" not in asked:
        raise ValueError(f'method {method} needs its model: add "model": a folder or a hub repository')
    if method in _MTP and "model" in asked:
        raise ValueError(f"method {method} is for what came with the model: leave the draft model out")
    if method in _TEXT and "model" in asked:
        raise ValueError(f"method {method} guesses without a model: leave the model out, or the method")
    least, most = (asked.get(f"prompt_lookup_{end}") for end in ("min", "max"))
    if least and (most or EngineConfig.prompt_lookup_max) < least:
        raise ValueError(f"prompt_lookup_min is {least}, and prompt_lookup_max is less; give a larger one")
