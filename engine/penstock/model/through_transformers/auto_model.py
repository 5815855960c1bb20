"""transformers' own classes: which class computes a config.json, and its model without weights. No code of a
checkpoint is run (no `trust_remote_code`). transformers is imported late, since the import takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import InvalidConfig, UnsupportedModel
from penstock.weights.checkpoints.own_head import TIED_HEAD

#: Keys of config.json that tell how weights are stored, which our own readers know.
_STORAGE_KEYS = ("quantization_config", "quantization")
#: What integer buffers hold until transformers has filled them.
_UNKNOWN_INTEGER = -(2**30)


def causal_class(config: dict[str, Any]) -> Any:
    """The class that transformers' AutoModelForCausalLM takes for a config.json. Raises UnsupportedModel."""
    import transformers

    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        remote = " Its own code (auto_map) is never run." if config.get("auto_map") else ""
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no model of type {kind!r} either.{remote}"
        )
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config_class = transformers.CONFIG_MAPPING[kind]
    if config_class not in mapping:
        raise UnsupportedModel(f"transformers computes {kind!r}, but not as a causal language model")
    found = mapping[config_class]
    return found[0] if isinstance(found, tuple) else found


def auto_config(config: dict[str, Any]) -> Any:
    """config.json as transformers' configuration. Raises UnsupportedModel and InvalidConfig."""
    from transformers import CONFIG_MAPPING

    causal_class(config)
    known = {name: value for name, value in config.items() if name not in _STORAGE_KEYS}
    if config.get(TIED_HEAD):
        known["tie_word_embeddings"] = True
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(known)
    except Exception as error:  # the checks of some 200 classes, which raise what they like
        raise InvalidConfig(
            f"transformers can't read config.json as {config['model_type']!r} ({error!r}); download it again"
        ) from error


def on_meta(
    config: Any,
    attention: str,
    experts: str = "eager",
    stored: Callable[[str], Tensor | None] = lambda name: None,
) -> Any:
    """transformers' model in float32: parameters have shapes and no storage, buffers (such as rope's
    frequencies) have values. `attention` and `experts` are names of implementations. `stored`
    gives the buffers that a checkpoint holds. Raises UnsupportedModel."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    make: Any = AutoModelForCausalLM.from_config if is_known else _named_class(config)._from_config
    with torch.device("meta"):
        model = make(
            config,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation=experts,
        )
    _fill_buffers(model, stored)
    return model.eval()


def _named_class(config: Any) -> Any:
    """The class of a text part, which transformers may have without a place in AutoModelForCausalLM."""
    import transformers

    names = config.architectures or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        raise UnsupportedModel(
            f"transformers has no class {' or '.join(names)} of text models alone, which the unquantized "
            "model is computed with: `penstock report` tells the rounding error of each tensor without it"
        )
    return found


def _fill_buffers(model: Any, stored: Callable[[str], Tensor | None]) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.full_like(buffer, _unknown(buffer.dtype), device="cpu"))
    model.initialize_weights()  # fills buffers; on parameters without storage it does nothing
    for name in _empty_buffers(model):
        value, buffer = stored(name), model.get_buffer(name)
        value = _constant(model, name) if value is None else value
        if value is not None:
            buffer.copy_(value.reshape(buffer.shape))
    if empty := _empty_buffers(model):
        raise UnsupportedModel(
            f"this version of transformers leaves {', '.join(empty)} of {type(model).__name__} empty"
        )


def _constant(model: nn.Module, name: str) -> Tensor | None:
    """What a buffer holds in every module of its class, if such a module is made without arguments, as
    activations are."""
    path, _, own = name.rpartition(".")
    try:
        made = type(model.get_submodule(path))()
    except TypeError:
        return None
    return made.get_buffer(own)


def _empty_buffers(model: nn.Module) -> list[str]:
    return [
        name
        for name, buffer in model.named_buffers()
        if bool(buffer.isnan().any() or (buffer == _UNKNOWN_INTEGER).any())
    ]


def _unknown(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return torch.nan
    return _UNKNOWN_INTEGER if dtype in (torch.int32, torch.int64) else 0


def list_of_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder layers: the outermost list of `num_layers` modules. Raises UnsupportedModel."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModel(f"transformers' {type(model).__name__} has no list of {num_layers} layers")
