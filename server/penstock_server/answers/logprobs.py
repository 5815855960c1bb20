"""Log-probabilities as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock import Tokenizer, TokenLogprobs
from penstock_server.protocol.answer_bodies import (
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)


class LogprobWriter:
    """One request's way to name tokens: by their text or, where texts are ambiguous, as token_id:7."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def chat(self, tokens: Sequence[TokenLogprobs]) -> list[ChatTokenLogprob]:
        return [
            ChatTokenLogprob(
                **self._token(token.token_id, token.logprob),
                top_logprobs=[TopLogprob(**self._token(*pair)) for pair in token.top],
            )
            for token in tokens
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def completion(
        self,
        token_ids: Sequence[int],
        tokens: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
        num_top: int,
    ) -> CompletionLogprobs:
        """None is a token that nothing comes before. `num_top`: likeliest tokens of each to tell."""
        return CompletionLogprobs(
            tokens=[self.name(token_id) for token_id in token_ids],
            token_logprobs=[token.logprob if token else None for token in tokens],
            top_logprobs=[self._likeliest(token, num_top) if token else None for token in tokens],
            text_offset=list(offsets),
        )

    def _likeliest(self, token: TokenLogprobs, num_top: int) -> dict[str, float]:
        """By text. Tokens may share one (pieces of characters): there the chosen token comes first, then
        the likelier."""
        found: dict[str, float] = {}
        for token_id, logprob in [(token.token_id, token.logprob), *token.top[:num_top]]:
            found.setdefault(self.name(token_id), logprob)
        return found

    def prompt(
        self, tokens: Sequence[TokenLogprobs | None], num_top: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """vLLM's: by token id, the prompt's own token first."""
        return [self._ranked(token, num_top) if token else None for token in tokens]

    def _ranked(self, token: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
        found = {token.token_id: self._prompt_token(token.token_id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], 1):
            found.setdefault(token_id, self._prompt_token(token_id, logprob, rank))
        return found

    def _prompt_token(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = self._tokenizer.token_text(token_id)
        return PromptLogprob(logprob=logprob, rank=rank, decoded_token=text)


def answer_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], start: int) -> Iterator[int]:
    """Where each token begins and, last, where they all end, in characters, if they begin at `start`. A
    character that is spread over tokens begins with the first of them."""
    for token_id in token_ids:
        piece = b"" if not tokenizer.decode([token_id]) else tokenizer.token_bytes(token_id)
        yield start - _begins_within(piece)
        start += _num_characters(piece)
    yield start


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    Tokens are found in the text as they come: the special tokens that a tokenizer puts around a prompt are
    not in it, and the space that sentencepiece puts in front is not either.
    """
    data, position, start, offsets = text.encode(), 0, 0, []
    for token_id in token_ids:
        piece = tokenizer.token_bytes(token_id)
        if not data.startswith(piece, position):
            piece = _spelled_otherwise(tokenizer, token_id, piece, data, position)
        offsets.append(start - _begins_within(piece))
        start += _num_characters(piece)
        position += len(piece)
    return offsets


def _spelled_otherwise(
    tokenizer: Tokenizer, token_id: int, piece: bytes, data: bytes, position: int
) -> bytes:
    """The bytes of a text at `position` that belong to a token which reads `piece`, as far as one knows."""
    if not tokenizer.decode([token_id]):
        return b""
    if piece.startswith(b" ") and data.startswith(piece[1:], position):
        return piece[1:]
    return data[position : position + len(piece)]  # normalized, as by lower case


def _num_characters(piece: bytes) -> int:
    """Characters that begin in it: bytes of UTF-8 that continue one are 10xxxxxx."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def _begins_within(piece: bytes) -> bool:
    """Whether its first byte continues the character before."""
    return bool(piece) and piece[0] & 0xC0 == 0x80
