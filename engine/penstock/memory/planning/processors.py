"""Processors: well-known ones without a card of their own memory, as data, so that one can plan for a machine
that is not here.

Sources: cores, clocks and memory rates are from the vendors' data sheets; of Apple's processors the fast
cores alone count. INT8 rates are arithmetic: cores, times clock, times 32 operations (`sdot`: 16
multiplications and additions) for each of a core's vector units (4 in Apple's fast cores and Neoverse V, 2 in
Cortex-A76, A78 and Neoverse N1). Of both rates a program reaches a part: MEMORY_SHARE and INT8_SHARE. This
project measured none of these processors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cards import GIB, model_and_size

#: The shares of the data sheet's rates that reading and products are assumed to reach. The processors of
#: Apple's Max and Ultra reach less of the rate that they share with their GPUs, and are therefore left out.
MEMORY_SHARE, INT8_SHARE = 0.75, 0.5
#: Operations a clock of one vector unit.
UNIT_OPS = 32
#: What the system and other programs keep of the RAM.
SYSTEM_BYTES = 2 * GIB


@dataclass(frozen=True)
class Processor:
    """Rates are 1e9 bytes or operations a second, of the data sheet."""

    name: str
    num_cores: int
    ram_gib: int
    memory_gbps: float
    int8_gops: float


def _processor(
    name: str, num_cores: int, ghz: float, num_units: int, ram_gib: int, memory_gbps: float
) -> Processor:
    return Processor(name, num_cores, ram_gib, memory_gbps, num_cores * ghz * num_units * UNIT_OPS)


#: The RAM is that of a usual machine; a name may end in another size.
PROCESSORS = tuple(
    _processor(*row)
    for row in (
        ("Apple M1", 4, 3.2, 4, 16, 68.3),
        ("Apple M1 Pro", 8, 3.2, 4, 32, 204.8),
        ("Apple M2", 4, 3.5, 4, 16, 102.4),
        ("Apple M2 Pro", 8, 3.5, 4, 32, 204.8),
        ("Apple M3", 4, 4.05, 4, 16, 102.4),
        ("Apple M3 Pro", 6, 4.05, 4, 36, 153.6),
        ("Apple M4", 4, 4.4, 4, 16, 120.0),
        ("Apple M4 Pro", 10, 4.5, 4, 48, 273.0),
        ("Raspberry Pi 5", 4, 2.4, 2, 8, 17.1),
        ("RK3588", 4, 2.4, 2, 16, 34.1),
        ("Jetson Orin Nano", 6, 1.7, 2, 8, 102.4),
        ("Ampere Altra", 80, 3.0, 2, 128, 204.8),
        ("Graviton3", 64, 2.6, 4, 128, 307.2),
        ("Graviton4", 96, 2.8, 4, 192, 537.6),
    )
)


def find_processor(name: str) -> Processor:
    """A processor by its name in any spelling ("m2 pro", "raspberry-pi-5 16GB"); a size is that of the RAM.
    Raises ConfigError."""
    model, size = model_and_size(name)
    for processor in PROCESSORS:
        own = model_and_size(processor.name)[0]
        if model and model in (own, own.removeprefix("apple")):
            return dataclasses.replace(processor, ram_gib=int(size)) if size else processor
    known = ", ".join(processor.name for processor in PROCESSORS)
    raise ConfigError(f"processor {name!r} is not known; known processors: {known}")


def with_processor(hardware: HardwareProfile, processor: Processor) -> HardwareProfile:
    """A machine with another processor and its RAM. What was measured on the machine's own processor is left
    out; the disk stays."""
    ram_bytes = processor.ram_gib * GIB
    return HardwareProfile(
        processor.num_cores,
        ram_bytes,
        max(ram_bytes - SYSTEM_BYTES, 0),
        processor.memory_gbps * MEMORY_SHARE,
        processor.int8_gops * INT8_SHARE,
        hardware.disk,
        hardware.device,
    )


def processor_note(processor: Processor) -> str:
    """Where the figures of a processor come from."""
    return (
        f"{processor.name}: figures of its data sheet, {processor.memory_gbps:.4g} GB/s of memory and "
        f"{processor.int8_gops:.0f} GOPS in INT8. {MEMORY_SHARE:.0%} and {INT8_SHARE:.0%} count here, "
        f"the shares that programs are assumed to reach. {SYSTEM_BYTES // GIB} GiB of its RAM are left to "
        "the system. The disk is that of this machine"
    )
