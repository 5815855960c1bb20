"""StateSaves: at which ends of blocks the recurrent states of sequences are copied, so that later prompts can
begin there. Numbers only.

Keys and values are there for each token, but a state only where it was copied. A sequence has copies at three
places:

- At the last block of its prompt. The same prompt, and the prompt with which a conversation goes on, begin
  there.
- Where it has left the text of another prompt: their blocks are the same up to there, and no copy was found.
  Prompts that begin alike (with one system prompt) begin there from the third one on.
- At the last block that was computed. The copy moves on with the sequence. There the sequence goes on when it
  was preempted, and a conversation with its whole answer.

Copies at the first two places are offered to the disk when their step was computed, the last one when the
sequence lets go of its state.
"""

from __future__ import annotations

from penstock.generation.blocks.block_keys import full_key
from penstock.generation.blocks.kept_states import KeptStates
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.sequence import Sequence


class StateSaves:
    """Chooses and finds copies of states."""

    def __init__(self, states: StatePool, block_size: int, kept: KeptStates | None = None) -> None:
        """`kept`: the states on disk, if there are some."""
        self._states = states
        self._size = block_size
        self._kept = kept
        #: Copies of the step that is being computed, and how many tokens each stands for.
        self._lasting: list[tuple[bytes, int]] = []

    @property
    def is_needed(self) -> bool:
        """Whether the model has recurrent states."""
        return self._states.is_needed

    def reach(self, sequence: Sequence, found: list[int]) -> list[int]:
        """The first of the `found` blocks, up to the last one after which there is a copy of the state. The
        `found` blocks begin with that of the first pending token. The last token is in none of them, since
        its logits are wanted."""
        if not self._states.is_needed:
            return found
        first = sequence.num_computed_tokens // self._size
        end = first + len(found)
        sequence.num_shared_tokens = max(sequence.num_shared_tokens, end * self._size)
        for index in range(min(end, (sequence.num_tokens - 1) // self._size), first, -1):
            if self._key(sequence, index) in self._states:
                return found[: index - first]
        return []

    def reach_on_disk(self, sequence: Sequence, num_found: int) -> tuple[int, bytes | None]:
        """How many of `num_found` blocks from that of the first pending token on can be used, if blocks and
        states may come from disk. With the key of the state if it lies there; None: it is in memory."""
        first = sequence.num_computed_tokens // self._size
        end = first + num_found
        sequence.num_shared_tokens = max(sequence.num_shared_tokens, end * self._size)
        for index in range(min(end, (sequence.num_tokens - 1) // self._size), first, -1):
            key = self._key(sequence, index)
            if key in self._states:
                return index - first, None
            if self._kept is not None and self._kept.has(key):
                return index - first, key
        return 0, None

    def adopt(self, sequence: Sequence, num_blocks: int) -> None:
        """Let a sequence go on after its first blocks, with the copy of the state there."""
        if self._states.is_needed:
            self._states.adopt(sequence, self._key(sequence, num_blocks))

    def plan(self, sequence: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """ScheduledSequence.saves for a step that computes the sequence's tokens up to `end`, after right
        guesses that it replays."""
        if not self._states.is_needed:
            return ()
        num_computed, size = sequence.num_computed_tokens, self._size
        start = num_computed - len(sequence.guess_rows)
        # The last token of a prompt is computed again by those who begin with the whole prompt.
        last = (end - (end - num_computed > 1)) // size
        lasting = {sequence.num_shared_tokens // size, (sequence.num_prompt_tokens - 1) // size}
        saves = []
        for index in sorted({last, *lasting}):
            if not start < index * size <= end:
                continue
            key = self._key(sequence, index)
            if key not in self._states:
                slot = self._save(sequence, key, index * size, index in lasting)
                saves += [] if slot is None else [(index * size, slot)]
        return tuple(saves)

    def end_step(self, is_computed: bool) -> None:
        """The step's copies can be found from now on, if the step was computed."""
        self._states.end_step(is_computed)
        if self._kept is not None and is_computed:
            for key, num_tokens in self._lasting:
                self._kept.offer(key, num_tokens)
        self._lasting.clear()

    def leave(self, sequence: Sequence) -> None:
        """The sequence lets go of its state. Beams do so all the time: theirs are not kept on disk."""
        key = sequence.moving_state_key
        if self._kept is not None and key is not None and sequence.group is None:
            self._kept.offer(key, sequence.num_computed_tokens // self._size * self._size)

    def _save(self, sequence: Sequence, key: bytes, num_tokens: int, is_lasting: bool) -> int | None:
        if is_lasting:
            self._lasting.append((key, num_tokens))
        else:
            if sequence.moving_state_key is not None:
                self._states.drop(sequence.moving_state_key)
            sequence.moving_state_key = key
        return self._states.save(key)

    def _key(self, sequence: Sequence, num_blocks: int) -> bytes:
        """The key of the last of a sequence's first blocks."""
        return full_key(sequence, num_blocks - 1, sequence.token_ids, self._size)
