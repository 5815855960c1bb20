"""Every causal architecture that the installed transformers knows, and who computes it here: a family of our
own, transformers' modules, or nobody. Each that is not our own is tried with the configuration that its class
has by default, made narrow, or as it is where the narrow one makes no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from penstock.errors import CheckpointError
from penstock.kernels import Kernels
from penstock.model.registry import find_family
from penstock.model.through_transformers.family import ThroughTransformers
from penstock.spec import FLOAT16
from penstock.weights.checkpoints.text_part import is_multimodal, text_config

#: Enough layers for every form that a default configuration has, as a rule.
NUM_LAYERS = 4
#: Rows are whole vectors of the processor, as those of real models.
_NARROW: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
    "moe_intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1, "head_dim": 64,
}  # fmt: skip


class Served(NamedTuple):
    """One architecture."""

    model_type: str
    architecture: str
    path: Literal["own", "transformers", "refused"]
    #: A request gets the same bits in any company.
    is_invariant: bool = False
    #: Why the architecture is refused, or what of it is served.
    reason: str = ""


def architectures(
    kernels: Kernels,
    model_types: tuple[str, ...] = (),
    report_progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Served]:
    """All architectures, or those of some model types, in the order of their names. report_progress(number
    done, number of all, model type) is called before each."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logging.getLogger("transformers").setLevel(logging.ERROR)
    every = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    wanted = [each for each in every if each[0] in model_types or not model_types]
    for number, (model_type, name) in enumerate(wanted):
        if report_progress is not None:
            report_progress(number, len(wanted), model_type)
        yield _served(model_type, name if isinstance(name, str) else name[0], kernels)


def _served(model_type: str, architecture: str, kernels: Kernels) -> Served:
    named = {"model_type": model_type, "architectures": [architecture]}
    whole: dict[str, Any] = named | {"text_config": {}}
    try:
        find_family(text_config(whole))
    except CheckpointError:
        return _through_transformers(model_type, architecture, kernels)
    reason = "its text part, given text alone" if is_multimodal(whole) else ""
    return Served(model_type, architecture, "own", True, reason)


def _through_transformers(model_type: str, architecture: str, kernels: Kernels) -> Served:
    reason = ""
    for config in configs(model_type, architecture):
        try:
            spec = ThroughTransformers.read_spec(config)
            family = ThroughTransformers(spec, kernels, spec.max_position_embeddings)
            is_invariant = family.is_invariant(family.model_tensors(spec), FLOAT16)
        except CheckpointError as error:
            reason = reason or str(error)
        else:
            return Served(model_type, architecture, "transformers", is_invariant)
    return Served(model_type, architecture, "refused", reason=reason or "its class makes no configuration")


def configs(model_type: str, architecture: str) -> Iterator[dict[str, Any]]:
    """Configurations of a model type, as config.json has them."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    few = {"num_hidden_layers": NUM_LAYERS}
    for sizes in (few | _NARROW, few, {}):
        try:
            usual = kind()
            known = {name: value for name, value in sizes.items() if hasattr(usual, name)}
            if hasattr(usual, "qk_rope_head_dim"):  # its heads have two parts, with sizes of their own
                known.pop("head_dim", None)
            made = kind(**known, **({"is_decoder": True} if hasattr(usual, "is_decoder") else {}))
        except Exception:  # the checks of some 200 classes, which raise what they like
            continue
        yield made.to_dict() | {"architectures": [architecture]}
