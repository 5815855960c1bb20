"""`penstock plan --table`: well-known models on some ordinary machines, as a table in Markdown. The table is
arithmetic on data sheets: this machine has no part in it, so that everybody gets the same table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.step_work import StepLoad
from penstock.model.known_shapes import REPOSITORIES, SHAPES
from penstock.spec import ModelFootprint
from penstock.weights.conversion.unit_files import unit_files
from penstock_server.commands.planning.footprints import footprint_of, tensors_of
from penstock_server.facade.needs import estimated_plan
from penstock_server.settings.settings import Settings

GB, GIB = 10**9, 1 << 30
#: Tokens of keys and values that each plan has room for, and the numbers of sequences in a step.
KV_TOKENS, NUM_SEQS = 2048, (1, 8)
#: What stands in a cell if the model does not fit.
NO_ROOM = "–"


@dataclass(frozen=True)
class Machine:
    name: str
    hardware: HardwareProfile


def _machine(name: str, ram_gib: int, free_gib: int, disk_gbps: float, card: str | None = None) -> Machine:
    """A desktop with four cores of AVX2 and two channels of DDR4: 25 GB/s and 500 GOPS of INT8 products. The
    rest of the RAM is for the system and other programs."""
    disk = DiskProfile(disk_gbps, 4 << 20, 4, True)
    hardware = HardwareProfile(4, ram_gib * GIB, free_gib * GIB, 25.0, 500.0, disk)
    return Machine(name, replace(hardware, device=find_card(card)) if card else hardware)


MACHINES = (
    _machine("no card, 8 GB", 8, 6, 2.0),
    _machine("GTX 1060, 16 GB", 16, 13, 2.0, "GTX 1060"),
    _machine("RTX 3060, 32 GB", 32, 28, 3.5, "RTX 3060"),
)


def run_table(settings: Settings) -> int:
    """Prints the table."""
    print("\n".join(model_table(settings.engine_config())))
    return 0


def model_table(config: EngineConfig) -> list[str]:
    """The lines of the table."""
    config = with_defaults(config)
    heads = ["repository", "shape", "disk", "RAM", *(machine.name for machine in MACHINES)]
    return [_line(heads), _line(["---"] * len(heads)), *(_line(_cells(name, config)) for name in SHAPES)]


def with_defaults(config: EngineConfig) -> EngineConfig:
    """Compiled kernels, which the plan of a machine without a compiler would not have, and room for few
    tokens."""
    sizes = (config.kv_cache_bytes, config.num_kv_tokens, config.kv_cache_share)
    if all(size is None for size in sizes):
        config = replace(config, num_kv_tokens=KV_TOKENS)
    return replace(config, kernels="native") if config.kernels == "auto" else config


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(name: str, config: EngineConfig) -> list[str]:
    size = footprint_of(SHAPES[name], config)
    disk = sum(file.num_bytes for file in unit_files(tensors_of(SHAPES[name], config)[1]))
    rates = [_rates(size, machine.hardware, config) for machine in MACHINES]
    return [REPOSITORIES.get(name, "–"), name, f"{disk / GB:.1f} GB", _least_ram(size, config), *rates]


def _least_ram(size: ModelFootprint, config: EngineConfig) -> str:
    """The least --host-memory without a card for which there is a plan, in tenths of a GiB."""
    endless = HardwareProfile(4, 1 << 50, 1 << 50, 0.0, 0.0)

    def serves(tenths: int) -> bool:
        try:
            estimated_plan(size, endless, replace(config, host_memory_bytes=tenths * GIB // 10))
        except CapacityError:
            return False
        return True

    least, most = 0, 1
    while not serves(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if serves(middle) else (middle, most)
    return f"{most / 10:.1f} GiB"


def _rates(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> str:
    """Tokens per second of decoding steps, for each number of sequences, or for as many as have room for
    their recurrent states."""
    try:
        plan = estimated_plan(size, hardware, config)
    except CapacityError:
        return NO_ROOM
    most = plan.num_state_sequences or max(NUM_SEQS)
    counts = (min(num, most) for num in NUM_SEQS)
    steps = (predict_step(plan, size, hardware, config, StepLoad.decode(num)) for num in counts)
    return " / ".join(_rounded(step.num_tokens / step.seconds) for step in steps)


def _rounded(rate: float) -> str:
    """Two digits that count; a prediction has no more."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"
