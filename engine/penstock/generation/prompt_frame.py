"""PromptFrame: what a model makes of a prompt before it computes anything. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.generation.requests.generation_request import GenerationRequest
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.spec import ModelSpec


@dataclass(frozen=True)
class PromptFrame:
    """The tokens around the prompts of one model, and which tokens see which."""

    #: The model encodes the prompt, and its text begins with these tokens. (): the text begins with the
    #: prompt.
    decoder_start: tuple[int, ...] = ()
    #: Rows of the embedding in front of the prompt.
    soft_prompt: tuple[int, ...] = ()
    #: Every token of the prompt sees the whole prompt.
    is_whole: bool = False
    #: What is made of the prompt's hidden states. None: text.
    pooling: PoolingSpec | None = None
    #: ModelSpec.second_text_ids
    second_text_ids: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, pooling: PoolingSpec | None = None) -> PromptFrame:
        is_whole, second = spec.sees_prompt_both_ways, spec.second_text_ids
        return cls(spec.decoder_start, spec.soft_prompt, is_whole, pooling, second)

    def first_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What a text begins with that the model goes on with."""
        return self.decoder_start or (*self.soft_prompt, *prompt)

    def placed(self, request: GenerationRequest) -> tuple[int, ...]:
        """A token for each position of a prompt: -1 - i where vector i of the caller's stands, and ids of
        their own in a pair's second text."""
        token_ids, second = request.prompt_token_ids, request.pooling.second_from if request.pooling else 0
        num_in_front = request.num_prompt_tokens - len(token_ids)
        if second and self.second_text_ids:
            behind = (token_id + self.second_text_ids for token_id in token_ids[second:])
            return (*token_ids[:second], *behind)
        return (*range(-1, -1 - num_in_front, -1), *token_ids)
