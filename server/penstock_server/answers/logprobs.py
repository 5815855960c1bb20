"""Log-probabilities as clients read them: OpenAI's two shapes, and vLLM's shape for prompts."""

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
    """Writes the log-probabilities of one request. Tokens have their text as name, or, since texts can be
    ambiguous, their id (token_id:7) if the client wants ids."""

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
        """tokens: None stands for the first token of a text, which has no log-probability. num_top: the
        number of likeliest tokens at each position."""
        return CompletionLogprobs(
            tokens=[self.name(token_id) for token_id in token_ids],
            token_logprobs=[token.logprob if token else None for token in tokens],
            top_logprobs=[self._likeliest(token, num_top) if token else None for token in tokens],
            text_offset=list(offsets),
        )

    def _likeliest(self, token: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Log-probabilities by token text. Several tokens may share one text (pieces of a character); then
        the chosen token wins, and after it the likelier token."""
        found: dict[str, float] = {}
        for token_id, logprob in [(token.token_id, token.logprob), *token.top[:num_top]]:
            found.setdefault(self.name(token_id), logprob)
        return found

    def prompt(
        self, tokens: Sequence[TokenLogprobs | None], num_top: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """vLLM's shape: log-probabilities by token id, the prompt's own token first."""
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
    """The offset of each token in characters, and then the offset where the last token ends. `start` is the
    offset of the first token. A character that is spread over several tokens belongs to the first of them."""
    for token_id in token_ids:
        piece = b"" if not tokenizer.decode([token_id]) else tokenizer.token_bytes(token_id)
        yield start - _begins_within(piece)
        start += _num_characters(piece)
    yield start


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """The offset of each token of a prompt in the prompt's text, in characters.

    Tokens are searched in the text one after the other. The text lacks the special tokens that a tokenizer
    puts around a prompt, and the space that sentencepiece puts in front.
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
    """The best guess which bytes of the text at `position` belong to a token whose own bytes are `piece`."""
    if not tokenizer.decode([token_id]):
        return b""
    if piece.startswith(b" ") and data.startswith(piece[1:], position):
        return piece[1:]
    # The tokenizer changed characters one by one, for instance to lower case or to half width.
    num_characters = _num_characters(piece)
    rest = data[position : position + 4 * num_characters].decode(errors="ignore")
    return rest[:num_characters].encode() or data[position : position + len(piece)]


def _num_characters(piece: bytes) -> int:
    """The number of characters that begin in `piece`. UTF-8 bytes that continue a character are 10xxxxxx."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def _begins_within(piece: bytes) -> bool:
    """Whether the first byte of `piece` continues a character."""
    return bool(piece) and piece[0] & 0xC0 == 0x80
