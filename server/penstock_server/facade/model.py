"""ServedModel: the facts about a loaded model that are needed to read requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock import FormedPrompt, Grammar, PromptForms, Tokenizer

if TYPE_CHECKING:
    from penstock import Adapter, PoolingSpec, PromptEmbeds


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
    #: What the server was started with, by names.
    soft_prompts: Mapping[str, PromptEmbeds] = field(default_factory=dict)
    #: The name in answers.
    name: str = ""
    #: What changes the model for a request that named it; None: the model as it is.
    adapter: Adapter | None = None
    #: The model predicts the tokens of a prompt. Models that see a prompt both ways, or encode it, do not.
    predicts_prompt: bool = True
    #: Tokens with which the decoder of an encoder-decoder begins every answer. They count as tokens of the
    #: context.
    num_start_tokens: int = 0
    #: The name of the architecture in config.json, and the numbers of a token's vector.
    architecture: str = ""
    hidden_size: int = 0
    #: Whose code computes the layers: "penstock" or "transformers".
    model_impl: str = "penstock"
    #: A request gets the same bits in any company.
    is_batch_invariant: bool = True
    #: How the model makes vectors or scores; None for a model that writes.
    pooling: PoolingSpec | None = None

    @property
    def task(self) -> str:
        """What the model is for: "generate", "embed" or "score"."""
        return task_of(self.pooling)

    def room(self, form: FormedPrompt | None = None) -> int:
        """The most tokens of a prompt and its answer together, if the prompt has this form."""
        num_start = self.num_start_tokens + (len(form.answer_start) if form is not None else 0)
        return self.max_model_len - num_start


def task_of(pooling: PoolingSpec | None) -> str:
    """What a model is for that makes vectors or scores so; None: it writes."""
    if pooling is None:
        return "generate"
    return "score" if pooling.is_score else "embed"
