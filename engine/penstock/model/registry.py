"""Registry of families: the family of an architecture's name, and a folder opened as a model."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import WeightBits
from penstock.errors import InvalidConfig, UnsupportedModel
from penstock.model.config_values import refuse
from penstock.model.families.bart import BART
from penstock.model.families.bloom import Bloom
from penstock.model.families.cpmant import CPMAnt
from penstock.model.families.falcon import Falcon
from penstock.model.families.gemma2 import Gemma2
from penstock.model.families.gpt2 import GPT2
from penstock.model.families.gpt_neox import GPTNeoX
from penstock.model.families.llama import Llama, Mistral, Qwen2, Qwen3
from penstock.model.families.minicpm import MiniCPM
from penstock.model.families.opt import OPT
from penstock.model.families.phi3 import Phi3
from penstock.model.families.t5 import EVA, MT5, T5
from penstock.model.family import Family
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.formats import MALFORMED, open_checkpoint
from penstock.weights.checkpoints.own_head import has_own_head
from penstock.weights.checkpoints.quantized.quantization_config import activation_note
from penstock.weights.conversion.converted_config import TIED_HEAD
from penstock.weights.conversion.manifest import check_finished
from penstock.weights.quantization_error import sample_error
from penstock.weights.store import WeightStore

logger = logging.getLogger(__name__)

FAMILIES: tuple[type[Family], ...] = (
    BART,
    EVA,
    Bloom,
    CPMAnt,
    Falcon,
    Gemma2,
    GPT2,
    GPTNeoX,
    Llama,
    MT5,
    MiniCPM,
    Mistral,
    OPT,
    Phi3,
    Qwen2,
    Qwen3,
    T5,
)

#: By model_type: well-known models that are not computed, and what to take in their place.
_OTHER_MODELS = {
    "cpmbee": "CPM-Bee is not supported. Two things are missing: a bias of attention for each pair of the "
    "segments that its prompts consist of (the kernels know two segments, soft prompt and text), and "
    "embeddings that are turned by a token's number, by which it writes unknown characters and numbered "
    "blanks. Of its line, Penstock computes CPM-Ant (openbmb/cpm-ant-10b) and MiniCPM (openbmb/MiniCPM4-8B)",
}


def find_family(config: dict[str, Any]) -> type[Family]:
    """The family of a config.json. Raises UnsupportedModel, which lists the supported architectures."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        refuse("architectures", architectures, "a list of names")
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    kind = str(config.get("model_type")).lower()
    if kind in _OTHER_MODELS:
        raise UnsupportedModel(_OTHER_MODELS[kind])
    known = sorted(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModel(
        f"architecture {', '.join(architectures) or '(none named in config.json)'} is not supported. "
        f"Supported are: {', '.join(known)}"
    )


def read_spec(config: dict[str, Any]) -> tuple[type[Family], ModelSpec]:
    """The family of a config.json, and its numbers. Raises UnsupportedModel and InvalidConfig."""
    family = find_family(config)
    try:
        spec = family.read_spec(config)
    except MALFORMED as error:
        raise InvalidConfig(
            f"config.json makes no sense for {family.architectures[0]} ({error!r}); download it again"
        ) from error
    _check(spec)
    return family, spec


def _check(spec: ModelSpec) -> None:
    """Raises InvalidConfig if numbers contradict each other."""
    if spec.head_dim < 1:
        refuse("the number of heads", spec.num_heads, f"at most the hidden size, {spec.hidden_size}")
    if spec.num_heads % spec.num_kv_heads:
        expected = f"a divisor of the number of heads, {spec.num_heads}"
        refuse("the number of heads of keys and values", spec.num_kv_heads, expected)
    if spec.rope is None:
        return
    if spec.rope.rotary_dim % 2 or not 2 <= spec.rope.rotary_dim <= spec.head_dim:
        expected = f"even, from 2 to a head's {spec.head_dim}"
        refuse("the dimensions that rope rotates", spec.rope.rotary_dim, expected)
    if not 0 < spec.rope.theta < math.inf:
        refuse("rope_theta", spec.rope.theta, "a number above 0")


class OpenModel(NamedTuple):
    """A model's folder, opened. Headers were read and checked, weights were not."""

    family: type[Family]
    spec: ModelSpec
    store: WeightStore


def open_model(
    folder: Path,
    ignore_unexpected: bool = False,
    group_size: int | None = None,
    allow_pickle: bool = False,
    weights: WeightBits = "int8",
    keeps_planes: bool = True,
) -> OpenModel:
    """`group_size`, `allow_pickle` and `weights` are those of EngineConfig; WeightStore() tells of
    `keeps_planes`. Raises a kind of CheckpointError if the files are wrong."""
    check_finished(folder)
    checkpoint = open_checkpoint(folder, allow_pickle)
    family, spec = read_spec(checkpoint.config)
    if spec.num_layers > len(checkpoint.entries):
        refuse("the number of layers", spec.num_layers, f"at most that of tensors, {len(checkpoint.entries)}")
    if checkpoint.config.get(TIED_HEAD):
        spec = replace(spec, is_tied=True)
    elif spec.is_tied and has_own_head(
        checkpoint, family.embedding_matrix(spec), family.head_matrix(spec), family.optional_prefix
    ):
        # From here on the config agrees with the files, also in a folder that is converted from them.
        checkpoint.config |= {"tie_word_embeddings": False}
        spec = replace(spec, is_tied=False)
    tensors = family.model_tensors(spec)
    store = WeightStore(checkpoint, tensors, ignore_unexpected, group_size, weights, keeps_planes)
    _tell_how_it_is_read(store)
    return OpenModel(family, spec, store)


def _tell_how_it_is_read(store: WeightStore) -> None:
    """Log what a user could not expect: another treatment of activations, or weights quantized again."""
    checkpoint = store.checkpoint
    if note := activation_note(checkpoint.config):
        logger.info("%s was %s", checkpoint.folder, note)
    if checkpoint.requantized and (error := sample_error(store)):
        logger.info(
            "%s has %s: quantized again, which loses %.2g of %s; `penstock report` tells of each tensor",
            checkpoint.folder, checkpoint.requantized, error.relative, error.name,
        )  # fmt: skip
