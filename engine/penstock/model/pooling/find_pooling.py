"""Which models pool, and how: by the folder's own files, and by what the user asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, PoolingChoice, Runner
from penstock.errors import ConfigError, UnsupportedModel
from penstock.model.config_values import refuse
from penstock.model.known_families import ENCODERS, FAMILIES
from penstock.model.pooling.pooling_spec import PoolingKind, PoolingSpec
from penstock.model.pooling.sentence_modules import SentenceModules, read_modules

#: The ending of an architecture with a layer for scores, and that of one without a head.
SCORER, BARE = "ForSequenceClassification", "Model"
_NO_MODULES = SentenceModules()
#: The last words of the names that sentence-transformers gives to functions after a score.
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True)
class PoolingWish:
    """What EngineConfig says; see its fields of the same names."""

    runner: Runner = "auto"
    pooling: PoolingChoice = "auto"
    score_tokens: tuple[str, ...] = ()


NO_WISH = PoolingWish()


def wish_of(config: EngineConfig) -> PoolingWish:
    return PoolingWish(config.runner, config.pooling, config.score_tokens)


def find_pooling(folder: Path, config: dict[str, Any], wish: PoolingWish = NO_WISH) -> PoolingSpec | None:
    """How the model of a folder pools; None for a model that generates. Raises UnsupportedModel and
    InvalidConfig."""
    if wish.runner == "generate":
        return None
    names, modules = config.get("architectures") or [], read_modules(folder)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("architectures", names, "a list of names")
    texts = wish.score_tokens or tuple(config.get("classifier_from_token") or ())
    is_encoder = any(name in ENCODERS for name in names) and not config.get("is_decoder")
    is_scorer = any(name.endswith(SCORER) for name in names)
    is_bare = any(
        name.endswith(BARE) and not name.endswith("LMHeadModel") and name not in FAMILIES for name in names
    )
    told: PoolingKind | None = config.get("gguf_pooling")
    asked = wish.runner == "pooling" or wish.pooling != "auto" or bool(texts) or told is not None
    if not (asked or modules is not None or is_encoder or is_scorer or is_bare):
        return None
    modules = modules or _NO_MODULES
    tokens = _ids(folder, texts) if texts else modules.score_tokens
    if is_scorer or tokens is not None:
        return _scores(config, modules, tokens, "cls" if is_encoder else "last")
    usual: PoolingKind = told or ("mean" if is_encoder else "last")
    return PoolingSpec(
        modules.kind or usual if wish.pooling == "auto" else wish.pooling,
        normalizes=modules.normalizes or modules.kind is None,
        dimensions=_dimensions(config),
        prompts=modules.prompts,
        default_prompt=modules.default_prompt,
        max_length=modules.max_length,
        lowers_case=modules.lowers_case,
    )


def _scores(
    config: dict[str, Any], modules: SentenceModules, tokens: tuple[int, int] | None, kind: PoolingKind
) -> PoolingSpec:
    num_labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    if tokens is None and num_labels != 1:
        raise UnsupportedModel(
            f"the model puts texts into {num_labels} classes; Penstock computes models that give one score, "
            "such as BAAI/bge-reranker-v2-m3"
        )
    told = config.get("sentence_transformers")
    named = told.get("activation_fn") if isinstance(told, dict) else None
    named = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    activation = named.rpartition(".")[2].removesuffix("()")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"scores go through {named}; Penstock computes {' and '.join(_ACTIVATIONS)}")
    return PoolingSpec(
        kind,
        is_score=True,
        has_sigmoid=_ACTIVATIONS[activation],
        score_tokens=tokens,
        max_length=modules.max_length,
        lowers_case=modules.lowers_case,
    )


def _ids(folder: Path, texts: Sequence[str]) -> tuple[int, int]:
    """The tokens that the texts "no" and "yes" are. Raises ConfigError for a text that is no token."""
    from penstock.text.tokenizer import Tokenizer  # few models need it here

    vocab = Tokenizer.load(folder, guesses=True).backend.get_vocab()  # no text is split
    if len(texts) != 2 or not all(text in vocab for text in texts):
        raise ConfigError(
            f"{', '.join(texts)} are to say no and yes, and have to be two tokens of the vocabulary "
            "(--score-tokens, or classifier_from_token in config.json)"
        )
    return vocab[texts[0]], vocab[texts[1]]


def _dimensions(config: dict[str, Any]) -> Sequence[int]:
    """The keys are vLLM's."""
    found = config.get("matryoshka_dimensions")
    if isinstance(found, list) and all(isinstance(each, int) for each in found):
        return tuple(found)
    return range(1, int(config.get("hidden_size") or 0) + 1) if config.get("is_matryoshka") else ()
