"""PoolingSpec: what a model makes of its hidden states in place of text: a vector, or a score. Numbers
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: How one row is made of a text's rows: that of the first token, that of the last token, the largest of each
#: number; or a sum over all tokens, divided by their number, by its square root, or weighted by the tokens'
#: positions from 1 on.
PoolingKind = Literal["cls", "last", "max", "mean", "mean_sqrt_len", "weighted_mean"]
#: The keys of sentence-transformers' 1_Pooling/config.json.
SENTENCE_MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class PoolingSpec:
    """How one model pools."""

    kind: PoolingKind
    #: The model gives a score to a pair of texts; otherwise it gives a vector to a text.
    is_score: bool = False
    #: The vector has length 1.
    normalizes: bool = False
    #: A score is the sigmoid of what the model computes.
    has_sigmoid: bool = False
    #: The tokens that say "no" and "yes": the score is the difference of their logits. None: the model has a
    #: layer for scores.
    score_tokens: tuple[int, int] | None = None
    #: The numbers of a whole vector.
    num_dimensions: int = 0
    #: The beginnings of a vector that are vectors as well (arXiv 2205.13147), by their numbers of dimensions.
    #: (): none is.
    dimensions: Sequence[int] = ()
    #: Texts that stand in front of a text, by their names, and the name of the usual one.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    #: The longest text in tokens, if the folder says so.
    max_length: int | None = None
    #: Texts are written in lower case before they are tokenized.
    lowers_case: bool = False

    def allows(self, dimensions: int) -> bool:
        """Whether vectors of so many numbers can be had."""
        return dimensions == self.num_dimensions or dimensions in self.dimensions

    @property
    def allowed_dimensions(self) -> str:
        """In words."""
        if isinstance(self.dimensions, range) and self.dimensions:
            return f"from {self.dimensions[0]} to {self.dimensions[-1]}"
        if self.dimensions:
            return f"one of {', '.join(map(str, self.dimensions))}"
        return (
            f"{self.num_dimensions}, since the model's config.json does not say that a beginning of a vector "
            "is a vector as well (matryoshka_dimensions or is_matryoshka; put "
            '"is_matryoshka": true there if the model was trained so)'
        )

    @property
    def needs_all_rows(self) -> bool:
        return self.kind not in ("cls", "last")

    def rows(self, num_tokens: int) -> range:
        """The tokens whose hidden states are needed, of a text of so many."""
        if self.kind == "cls":
            return range(1)
        return range(0 if self.needs_all_rows else num_tokens - 1, num_tokens)
