"""Budgets: how many bytes of a machine's memories a plan may take. Pure."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.errors import CapacityError, MemoryName
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import gib

#: An "auto" budget leaves this share of the free memory to others, and at least this many bytes.
SPARE_SHARE, MIN_SPARE_BYTES = 0.1, 512 << 20


class Budgets:
    """How much of a machine's memories a plan may take, and what is said where this is too little or too
    much."""

    def __init__(self, hardware: HardwareProfile, config: EngineConfig) -> None:
        self.lane = lane = hardware.lane
        #: Beside the budget: what requests take where that is set.
        self._for_requests = config.request_bytes or 0
        self.host = config.host_memory_bytes or _auto(hardware.free_ram_bytes, self._for_requests)
        #: 0 without a GPU.
        self.device = (config.device_memory_bytes or lane.free_bytes) if lane.has_own_memory else 0
        #: The budget of the memory in which layers are computed.
        self.computing = self.device if lane.has_own_memory else self.host
        self._free_ram_bytes = hardware.free_ram_bytes
        #: Two layers' share of it passes through the GPU.
        self._spill = "" if config.kv_spill_bytes is None else "--kv-spill-memory, "

    def warnings(self) -> list[str]:
        """A budget beyond what is free ends in swapping, or with the process killed."""
        budgets = [("host", self.host, self._free_ram_bytes - self._for_requests)]
        if self.lane.has_own_memory:
            budgets.append(("device", self.device, self.lane.free_bytes))
        return [
            f"the {name} budget of {gib(budget)} is more than what is free there now, {gib(free)}"
            for name, budget, free in budgets
            if budget > free
        ]

    def refusal(self, fixed: int, layers: int) -> CapacityError:
        """For a model whose fixed parts and layers take at least so many bytes where layers are computed."""
        least, budget = fixed + layers, self.computing
        name: MemoryName = "device" if self.lane.has_own_memory else "host"
        return CapacityError(
            f"this model needs at least {gib(least)} ({least} bytes) of {name} memory as it is set up, and "
            f"the budget is {gib(budget)} ({budget} bytes): {gib(fixed)} for embedding, head, activations, "
            "keys and values, recurrent states and adapters, the rest for layers and staging. Raise "
            f"--{name}-memory, or lower --kv-tokens, {self._spill}--max-num-batched-tokens or --max-num-seqs",
            name,
        )

    def host_refusal(self, beside: int, staging: int) -> CapacityError:
        """For a model whose staging for a GPU does not fit into the host beside `beside` bytes."""
        least = beside + staging
        if self.host >= least:
            return CapacityError(
                f"streaming to the GPU needs at least {gib(staging)} ({staging} bytes) of pinned memory, and "
                f"the system lets this process pin {gib(self.lane.pinnable_bytes)}; raise its limit"
            )
        return CapacityError(
            f"this model needs at least {gib(least)} ({least} bytes) of host memory as it is set up, for the "
            "embedding, staging, and keys and values that have left the GPU (--kv-host-memory) or have no "
            "room there (--kv-spill-memory), and the "
            f"budget is {gib(self.host)} ({self.host} bytes). Raise --host-memory",
            "host",
        )


def _auto(free_bytes: int, for_requests: int) -> int:
    """Of what is spare, half may be for requests; more than that is left in addition."""
    spare = max(MIN_SPARE_BYTES, int(SPARE_SHARE * free_bytes))
    return max(0, free_bytes - max(spare, spare // 2 + for_requests))
