"""A machine that is not here: what `penstock plan` invents in place of this machine's card and processor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.memory.hardware import DeviceProfile, HardwareProfile
from penstock.memory.planning.cards import card_notes, find_card
from penstock.memory.planning.processors import Processor, find_processor, processor_note, with_processor

#: What a plan with an invented card takes from this machine.
HOST_NOTE = "Memory, disk and processor are those of this machine, with its measured rates"


@dataclass(frozen=True)
class OtherMachine:
    """What a plan invents in place of this machine's own parts."""

    card: DeviceProfile | None
    processor: Processor | None

    @staticmethod
    def of(card: str | None, processor: str | None) -> OtherMachine:
        """By their names. Raises ConfigError for unknown ones."""
        return OtherMachine(
            None if card is None else find_card(card),
            None if processor is None else find_processor(processor),
        )

    def in_place_of(self, hardware: HardwareProfile) -> tuple[HardwareProfile, list[str]]:
        """The machine with these parts, and where their figures come from."""
        notes = []
        if self.processor is not None:
            hardware = with_processor(hardware, self.processor)
            notes.append(processor_note(self.processor))
        if self.card is not None:
            hardware = dataclasses.replace(hardware, device=self.card)
            notes += card_notes(self.card) + ([] if self.processor else [HOST_NOTE])
        return hardware, notes
