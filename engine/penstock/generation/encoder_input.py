"""EncoderInput: the prompt of a sequence whose model encodes prompts, and the blocks of its keys and values.
No torch here."""

from __future__ import annotations

from collections.abc import Sequence


class EncoderInput:
    """Encoded once, when the sequence is admitted; the decoder's tokens attend to it. Each layer of the
    decoder has keys and values of its own for it, in the same blocks as those of the decoder's tokens, but
    other ones."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        # The block manager changes these.
        self.block_table: list[int] = []
        #: What the keys of its blocks begin with; b"" until somebody asks for them.
        self.digest = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
