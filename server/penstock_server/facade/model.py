"""ServedModel: what must be known of a loaded model in order to read requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import Grammar, Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """Nothing of it changes while the engine lives."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    #: The model's own advice (generation_config.json).
    default_sampling: Mapping[str, object]
    #: Raises InvalidParameter for a grammar that the model can't follow. Takes a while, on any thread.
    check_grammar: Callable[[Grammar], None]
