"""interface draft (being written): see dataclasses"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.generation.sequence import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """What a request gained in one step."""

    request_id: str
    #: New text, never half a character; may be empty while a character or a possible stop string
    #: is incomplete. All texts of a request concatenate to its answer.
    text: str
    token_ids: tuple[int, ...]
    #: One entry per new token, if asked for.
    logprobs: tuple[TokenLogprobs, ...]
    num_prompt_tokens: int
    #: Of the whole answer so far.
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
