"""ServedModel: the facts about a loaded model that are needed to read requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import Grammar, PromptForms, Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The facts about a model. They do not change while the engine lives."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    #: The model's own sampling parameters (generation_config.json).
    default_sampling: Mapping[str, object]
    #: Raises InvalidParameter for a grammar that the model can't follow. May run on any thread; takes up to
    #: seconds.
    check_grammar: Callable[[Grammar], None]
    #: How the model is asked to complete a text and to fill in blanks.
    forms: PromptForms
    #: The model predicts the tokens of a prompt. Models that see a prompt both ways, or encode it, do not.
    predicts_prompt: bool = True
