"""StateSlots: how many recurrent states have room. Pure.

A state has as many bytes as some thousand tokens of keys and values (75 MiB with Qwen3-Next), whether the
sequence is long or short. So states decide how many sequences run at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.memory.planning.plan import gib
from penstock.spec import ModelFootprint
from penstock.state_layout import NO_ROOM, GuessRoom

#: States take at most this share of the budget, unless the config says how much.
STATE_SHARE = 0.125
#: What drafts bring to states takes this share of what the states take, between so many rows. So many
#: guesses have a path of their own.
GUESS_SHARE = 0.0625
LEAST_ROWS, MOST_ROWS = 16, 64
ROWS_PER_PATH = 4


@dataclass(frozen=True)
class StateSlots:
    """Slots for states of sequences that run, and for copies that later prompts begin with; and room for
    guesses."""

    state_bytes: int = 0
    num_slots: int = 0
    #: Sequences that run at a time, at most; 0 for a model without states.
    num_sequences: int = 0
    guesses: GuessRoom = NO_ROOM
    guess_bytes: int = 0

    @classmethod
    def of(cls, footprint: ModelFootprint, config: EngineConfig, budget: int) -> StateSlots:
        """For a model in a memory with this budget. With prefix caching, half of the slots are for copies.
        What drafts take is in addition to what the config gives. Raises CapacityError if the config gives
        states too little."""
        size, given = footprint.state_bytes, config.state_bytes
        if not size:
            return cls()
        room = int(STATE_SHARE * budget) if given is None else given
        if given is not None and given < size:
            raise CapacityError(
                f"the recurrent state of one sequence takes {gib(size)} ({size} bytes), and states may take "
                f"{gib(given)}; raise --state-memory"
            )
        most = config.max_num_seqs
        num_slots = min(most * (2 if config.enable_prefix_caching else 1), max(1, room // size))
        num_sequences = min(most, -(-num_slots // 2) if config.enable_prefix_caching else num_slots)
        guesses = _room(num_slots * size, footprint) if config.speculation != "off" else NO_ROOM
        guess_bytes = guesses.num_rows * footprint.guess_bytes + guesses.num_paths * footprint.path_bytes
        return cls(size, num_slots, num_sequences, guesses, guess_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.state_bytes + self.guess_bytes

    def notes(self, config: EngineConfig) -> list[str]:
        """What people have to know."""
        if not self.state_bytes or self.num_sequences == config.max_num_seqs:
            return []
        return [
            f"{self.num_sequences} sequences run at a time instead of {config.max_num_seqs}: the recurrent "
            f"state of each takes {gib(self.state_bytes)}; --state-memory decides otherwise"
        ]


def _room(states_bytes: int, footprint: ModelFootprint) -> GuessRoom:
    """Room for guesses beside states that take so many bytes together. The rows of each layer are whole cache
    lines."""
    wanted = int(GUESS_SHARE * states_bytes) // footprint.guess_bytes
    num_rows = min(MOST_ROWS, max(LEAST_ROWS, wanted // LEAST_ROWS * LEAST_ROWS))
    return GuessRoom(num_rows, num_rows // ROWS_PER_PATH)
