"""Whether a model and its draft model go together, as `penstock plan` can tell before either is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.drafters import dflash_plan, eagle3_plan
from penstock.drafters.vocabularies import check_sizes, check_tokens
from penstock.errors import CheckpointNotFound, ConfigError, UnsupportedModel
from penstock.goes_with import Feature, check_together
from penstock.model.known_shapes import SHAPES, find_shape
from penstock.model.registry import read_spec
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.checkpoints.hub import find_config


def is_shape(name: str) -> bool:
    """Whether a draft model's name is that of a known shape."""
    return name.lower() in SHAPES and not Path(name).exists()


def check_pair(folder: Path | None, shape: str | None, config: EngineConfig, offline: bool) -> None:
    """Raises ConfigError, in the words of serve, for a draft model that can't guess for the model of a folder
    or shape. Tokens are compared if both have tokenizers here, else the sizes of the vocabularies."""
    name = config.draft_model
    if name is None:
        return
    spec = read_spec(_told(folder, shape), config.model_impl)[1]
    if not is_shape(name) and eagle3_plan.names_eagle3(name, config, offline):
        head = eagle3_plan.read_eagle3(read_config(find_config(name, None, offline)))
        return eagle3_plan.check_target(name, head, spec)
    if not is_shape(name) and dflash_plan.names_dflash(name, offline):
        block = dflash_plan.read_dflash(read_config(find_config(name, None, offline)))
        return dflash_plan.check_target(name, block, spec)
    own_folder = None if is_shape(name) else find_config(name, None, offline)
    own = read_spec(_told(own_folder, name))[1]
    check_together({Feature.DRAFTING, *own.features}, own.architecture)
    check_together({Feature.DRAFT_MODEL, *spec.features}, spec.architecture)
    small, large = _tokenizer(own_folder), _tokenizer(folder)
    if small is not None and large is not None:
        check_tokens(small, large, min(own.vocab_size, spec.vocab_size))
    else:
        check_sizes(own.vocab_size, spec.vocab_size)


def _told(folder: Path | None, shape: str | None) -> dict[str, Any]:
    return read_config(folder) if folder else find_shape(shape or "")


def _tokenizer(folder: Path | None) -> Tokenizer | None:
    """None: a plan needs no more of a model than config.json, and there is no tokenizer that can be read."""
    if folder is None:
        return None
    try:
        return Tokenizer.load(folder)
    except (CheckpointNotFound, ConfigError, UnsupportedModel):
        return None
