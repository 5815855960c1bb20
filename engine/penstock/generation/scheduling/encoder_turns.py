"""EncoderTurns: whose inputs are encoded in the step that is being decided. Numbers only."""

from __future__ import annotations

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.sequence import Sequence


class EncoderTurns:
    """The sequences of a step that come in with an input which nobody has encoded yet."""

    def __init__(self, block_manager: BlockManager, max_num_tokens: int) -> None:
        """max_num_tokens: inputs of so many tokens together are encoded in a step, or one longer input."""
        self._block_manager = block_manager
        self._max_num_tokens = max_num_tokens
        self._encoded: list[Sequence] = []

    def have_room(self, sequence: Sequence) -> bool:
        """Whether the step has room for the sequence's encoded input."""
        if sequence.encoder is None or not self._encoded or self._block_manager.find_encoder(sequence):
            return True
        num_tokens = sum(each.num_input_tokens for each in self._encoded)
        return num_tokens + sequence.num_input_tokens <= self._max_num_tokens

    def enter(self, sequence: Sequence) -> int:
        """The sequence comes in. Its input gets blocks. Returns how many tokens have to be encoded for it."""
        if sequence.encoder is None or not self._block_manager.place_encoder(sequence):
            return 0
        self._encoded.append(sequence)
        return sequence.encoder.num_tokens

    def take(self) -> tuple[Sequence, ...]:
        """The sequences whose inputs have to be encoded in the step."""
        encoded = tuple(self._encoded)
        self._encoded.clear()
        return encoded
