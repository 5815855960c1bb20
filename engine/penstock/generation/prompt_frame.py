"""PromptFrame: what a model makes of a prompt before it computes anything. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.generation.requests.generation_request import GenerationRequest
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

    @classmethod
    def of(cls, spec: ModelSpec) -> PromptFrame:
        return cls(spec.decoder_start, spec.soft_prompt, spec.sees_prompt_both_ways)

    def first_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What a text begins with that the model goes on with."""
        return self.decoder_start or (*self.soft_prompt, *prompt)


def placed_prompt(request: GenerationRequest) -> tuple[int, ...]:
    """A token for each position of a prompt: -1 - i where vector i of the caller's stands."""
    num_in_front = request.num_prompt_tokens - len(request.prompt_token_ids)
    return (*range(-1, -1 - num_in_front, -1), *request.prompt_token_ids)
