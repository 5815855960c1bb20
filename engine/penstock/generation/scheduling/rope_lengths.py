"""RopeLengths: which of rope's frequencies turn a sequence's keys. Numbers only."""

from __future__ import annotations

from penstock.generation.sequence import Sequence
from penstock.spec import RopeSpec


class RopeLengths:
    """Follows the lengths of sequences, which decide about frequencies (RopeSpec.frequency_length)."""

    def __init__(self, rope: RopeSpec | None) -> None:
        #: None where no sequence's length changes anything.
        self.rope = rope if rope is not None and rope.short_length else None

    def follow(self, sequence: Sequence) -> bool:
        """Note which frequencies a sequence's length asks for. True if the frequencies have changed: the keys
        that were computed are of no use then, and other blocks hold the sequence's tokens. A waiting sequence
        does not grow, so the scheduler follows a sequence when it begins to wait and before each step that
        the sequence may have a part in."""
        if self.rope is None or self.keeps(sequence):
            return False
        length = self.rope.frequency_length(sequence.num_prompt_tokens, sequence.num_tokens)
        sequence.follow_length(length)
        return True

    def keeps(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Whether a sequence has the same frequencies once so many drafts were accepted."""
        if self.rope is None:
            return True
        num_tokens = sequence.num_tokens + num_drafts
        return self.rope.frequency_length(sequence.num_prompt_tokens, num_tokens) == sequence.rope_length
