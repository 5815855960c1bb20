"""The family of an architecture's name, and a folder opened as a model."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import CODE_GROUP_SIZES, ModelImpl, WeightBits
from penstock.errors import MALFORMED, CheckpointError, InvalidConfig, UnsupportedModel
from penstock.goes_with import Feature, check_together
from penstock.model.config_values import refuse
from penstock.model.family import Family
from penstock.model.known_families import (
    ENCODERS,
    FAMILIES,
    NEAREST,
    THROUGH_TRANSFORMERS,
    family_at,
    is_dflash,
    is_eagle3,
    known_family,
)
from penstock.model.pooling.find_pooling import (
    BARE,
    NO_WISH,
    SCORER,
    PoolingWish,
    find_pooling,
)
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.model.spec_check import check_sizes, check_spec
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint, check_finished
from penstock.weights.checkpoints.formats import open_checkpoint, read_config
from penstock.weights.checkpoints.own_head import TIED_HEAD, has_own_head
from penstock.weights.checkpoints.quantized.quantization_config import activation_note, kv_note
from penstock.weights.store import WeightStore

if TYPE_CHECKING:
    from penstock.model.pooling.pooled_family import PooledFamily

logger = logging.getLogger(__name__)

#: By model_type: well-known models that are not computed, and what to take in their place.
_OTHER_MODELS = {
    "cpmbee": "CPM-Bee is not supported. Two things are missing: a bias of attention for each pair of the "
    "segments that its prompts consist of (the kernels know two segments, soft prompt and text), and "
    "embeddings that are turned by a token's number, by which it writes unknown characters and numbered "
    "blanks. Of its line, Penstock computes CPM-Ant (openbmb/cpm-ant-10b) and MiniCPM (openbmb/MiniCPM4-8B)",
}


def find_family(config: dict[str, Any]) -> type[Family]:
    """Our own family of a config.json. Raises UnsupportedModel, which names families that come near."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        refuse("architectures", architectures, "a list of names")
    if (family := known_family(architectures)) is not None:
        return family
    kind = str(config.get("model_type")).lower()
    if kind in _OTHER_MODELS:
        raise UnsupportedModel(_OTHER_MODELS[kind])
    names = ", ".join(architectures) or "(none named in config.json)"
    near = ", ".join(difflib.get_close_matches(names, sorted(FAMILIES), n=3))
    hint = f"; what comes near by name: {near}" if near else ""
    raise UnsupportedModel(
        f"architecture {names} is not supported (`penstock plan --architectures` lists all){hint}"
    )


def read_spec(
    config: dict[str, Any], model_impl: ModelImpl = "auto", names: Collection[str] | None = None
) -> tuple[type[Family], ModelSpec]:
    """The family of a config.json, and its numbers. `names` are those of the tensors in the files, if there
    are files. Raises UnsupportedModel and InvalidConfig."""
    _check_is_whole(config)
    if model_impl == "transformers":
        return checked_spec(family_at(THROUGH_TRANSFORMERS), config, names)
    try:
        return checked_spec(find_family(config), config, names)
    except UnsupportedModel as own:
        if model_impl == "penstock" or not config.get("model_type"):
            raise
        try:
            return checked_spec(family_at(THROUGH_TRANSFORMERS), config, names)
        except UnsupportedModel as error:
            near = NEAREST.get(str(config["model_type"]))
            instead = f". What comes nearest and works: {near}" if near else ""
            raise UnsupportedModel(
                f"{own}. Nor can transformers' modules serve it: {error}{instead}"
            ) from error


def _check_is_whole(config: dict[str, Any]) -> None:
    """Raises UnsupportedModel for a config.json of a head that guesses for a model."""
    if is_eagle3(config) or is_dflash(config):
        kind = "a DFlash" if is_dflash(config) else "an EAGLE-3"
        raise UnsupportedModel(
            f"this is {kind} head, which guesses for another model: give it as --draft-model beside the "
            "model that it was trained for"
        )


def read_pooled_spec(
    config: dict[str, Any], pooling: PoolingSpec, names: Collection[str] | None = None
) -> tuple[type[PooledFamily], ModelSpec]:
    """read_spec() for a model that pools. Raises UnsupportedModel and InvalidConfig."""
    _check_is_whole(config)
    names_here = config.get("architectures") or []
    encoder = known_family(names_here, ENCODERS)
    family = encoder or find_family(config | {"architectures": _generating(names_here)})
    found, spec = checked_spec(family, config, names)
    if spec.has_encoder or spec.soft_prompt:
        raise UnsupportedModel(
            f"{', '.join(names_here)} writes text, and has no vectors or scores here. Models that have are "
            "encoders such as BAAI/bge-m3, and decoders such as Qwen/Qwen3-Embedding-0.6B"
        )
    if config.get("is_causal") is False and not spec.sees_prompt_both_ways:
        if spec.sliding_windows or spec.attention_chunks or spec.states:
            raise UnsupportedModel("is_causal is false, which Penstock computes for full attention alone")
        spec = replace(spec, sees_prompt_both_ways=True)
    # A model without logits needs no matrix for them, wherever the matrix would lie.
    spec = spec if pooling.score_tokens else replace(spec, is_tied=True)
    if encoder is not None:  # PooledFamily.kv_layer
        spec = replace(spec, layers_without_kv=frozenset(range(1, spec.num_layers)))
    from penstock.model.pooling.pooled_family import pooled

    return pooled(found, replace(pooling, num_dimensions=spec.hidden_size)), spec


def _generating(names: list[str]) -> list[str]:
    """The same architectures with a head that makes logits."""
    bare = [name.removesuffix(SCORER if name.endswith(SCORER) else BARE) for name in names]
    return [*names, *(name + ending for name in bare for ending in ("ForCausalLM", "LMHeadModel"))]


def checked_spec(
    family: type[Family], config: dict[str, Any], names: Collection[str] | None
) -> tuple[type[Family], ModelSpec]:
    """read_spec() of a family that is known."""
    check_sizes(config)
    try:
        spec = family.read_spec(config)
        check_spec(spec, config, has_own_norms=spec.implementation == "transformers")
    except MALFORMED as error:
        raise InvalidConfig(
            f"config.json makes no sense for {', '.join(config.get('architectures') or ())} ({error!r}); "
            "download it again"
        ) from error
    return family, spec if names is None else family.named_as(spec, names)


class OpenModel(NamedTuple):
    """A model's folder, opened. Headers were read and checked, weights were not."""

    family: type[Family]
    spec: ModelSpec
    store: WeightStore

    @property
    def pooling(self) -> PoolingSpec | None:
        """How the model pools; None for a model that generates."""
        return self.family.pooling


def open_model(
    folder: Path,
    ignore_unexpected: bool = False,
    group_size: int | None = None,
    allow_pickle: bool = False,
    weights: WeightBits = "int8",
    keeps_planes: bool = True,
    model_impl: ModelImpl = "auto",
    keeps_mtp: bool = False,
    wish: PoolingWish = NO_WISH,
) -> OpenModel:
    """`group_size`, `allow_pickle`, `weights` and `model_impl` are those of EngineConfig; WeightStore() tells
    of `keeps_planes`, and ModelTensors of a head that `keeps_mtp` keeps. Raises a kind of CheckpointError if
    the files are wrong."""
    checkpoint, family, spec, pooling = _read_folder(folder, allow_pickle, model_impl, wish)
    checkpoint = family.separate(checkpoint, spec)
    tensors = family.model_tensors(spec)
    if keeps_mtp and pooling is None:
        size = group_size if weights not in CODE_GROUP_SIZES else None
        head = _open_head(checkpoint, family, spec, size)
        tensors = replace(tensors, mtp=None if head is None else head.store.tensors)
    store = WeightStore(checkpoint, tensors, ignore_unexpected, group_size, weights, keeps_planes)
    _tell_how_it_is_read(store)
    if pooling is not None and pooling.max_length is not None:
        spec = replace(spec, max_position_embeddings=min(pooling.max_length, spec.max_position_embeddings))
    return OpenModel(family, spec, store)


def open_mtp_head(
    folder: Path,
    group_size: int | None = None,
    allow_pickle: bool = False,
    model_impl: ModelImpl = "auto",
    wish: PoolingWish = NO_WISH,
) -> OpenModel | None:
    """The head of multi-token prediction in a model's folder, as a model of one layer, which shares embedding
    and head with the model. An unquantized head becomes INT8: in 4 bits it guesses far worse. None if there
    is none. Raises what open_model() raises."""
    if model_impl == "transformers" or not may_have_head(folder):
        return None
    checkpoint, family, spec, pooling = _read_folder(folder, allow_pickle, model_impl, wish)
    found = None if pooling is not None else _open_head(checkpoint, family, spec, group_size)
    if found is None:
        checkpoint.close()
    return found


def _open_head(
    checkpoint: Checkpoint, family: type[Family], spec: ModelSpec, group_size: int | None
) -> OpenModel | None:
    """The head of an open checkpoint."""
    own = family.mtp_spec(spec, checkpoint.entries)
    if own is None:
        return None
    checkpoint = family.separate(checkpoint, own)
    # The other tensors are the model's.
    store = WeightStore(checkpoint, family.model_tensors(own), True, group_size, "int8", False)
    return OpenModel(family, own, store)


def may_have_head(folder: Path) -> bool:
    """Whether a model can have a head of multi-token prediction, by config.json alone, since most models have
    none. What is wrong with it, open_model() says."""
    try:
        config = read_config(folder)
        family = find_family(config)
        return family.may_have_mtp(family.read_spec(config))
    except (CheckpointError, *MALFORMED):
        return False


def _read_folder(
    folder: Path, allow_pickle: bool, model_impl: ModelImpl, wish: PoolingWish = NO_WISH
) -> tuple[Checkpoint, type[Family], ModelSpec, PoolingSpec | None]:
    check_finished(folder)
    checkpoint = open_checkpoint(folder, allow_pickle)
    pooling = find_pooling(folder, checkpoint.config, wish)
    if pooling is not None and model_impl == "transformers":
        check_together({Feature.POOLED, Feature.THROUGH_TRANSFORMERS}, error=UnsupportedModel)
    family, spec = (
        read_spec(checkpoint.config, model_impl, checkpoint.entries)
        if pooling is None
        else read_pooled_spec(checkpoint.config, pooling, checkpoint.entries)
    )
    if spec.num_layers > len(checkpoint.entries):
        refuse("the number of layers", spec.num_layers, f"at most that of tensors, {len(checkpoint.entries)}")
    if pooling is not None and pooling.score_tokens is None:
        pass  # there is no head
    elif checkpoint.config.get(TIED_HEAD):
        spec = replace(spec, is_tied=True)
    elif spec.is_tied and has_own_head(
        checkpoint, family.embedding_matrix(spec), family.head_matrix(spec), family.optional_prefix
    ):
        # From here on the config agrees with the files, also in a folder that is converted from them.
        checkpoint.config |= {"tie_word_embeddings": False}
        spec = replace(spec, is_tied=False)
    return checkpoint, family, spec, pooling


def _tell_how_it_is_read(store: WeightStore) -> None:
    """Log what a user could not expect: another treatment of activations, or weights quantized again."""
    checkpoint = store.checkpoint
    if note := activation_note(checkpoint.config):
        logger.info("%s was %s", checkpoint.folder, note)
    if note := kv_note(checkpoint.config):
        logger.info("%s: %s", checkpoint.folder, note)
    if not checkpoint.requantized:
        return
    from penstock.weights.quantization_error import sample_error  # for few models

    error = sample_error(store)
    if error is not None and f"{error.relative:.2g}" != "0":  # that nothing is lost is no news
        logger.info(
            "%s has %s: quantized again, which loses %.2g of %s; `penstock report` tells of each tensor",
            checkpoint.folder, checkpoint.requantized, error.relative, error.name,
        )  # fmt: skip
