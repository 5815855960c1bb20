"""What the compiler says of each kernel (ptxas -v), and how many of its blocks a multiprocessor runs at a
time: the formula of NVIDIA's occupancy calculator."""

from __future__ import annotations

import re
from typing import NamedTuple

REGISTERS = 65536
#: Registers are given to a warp in units of 256, shared memory to a block in units of as many bytes.
UNIT = 256
_KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


class Multiprocessor(NamedTuple):
    num_warps: int
    num_blocks: int
    shared_bytes: int
    #: Of it, what the system takes for each block.
    reserved_bytes: int = 0


#: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide.
MULTIPROCESSORS = {
    61: Multiprocessor(64, 32, 96 << 10),
    70: Multiprocessor(64, 32, 96 << 10),
    75: Multiprocessor(32, 16, 64 << 10),
    80: Multiprocessor(64, 32, 164 << 10, 1 << 10),
    86: Multiprocessor(48, 16, 100 << 10, 1 << 10),
    89: Multiprocessor(48, 24, 100 << 10, 1 << 10),
    90: Multiprocessor(64, 32, 228 << 10, 1 << 10),
}


class KernelReport(NamedTuple):
    num_registers: int
    #: Written to memory and read from it because registers were too few; per thread.
    spill_bytes: int
    shared_bytes: int

    def num_blocks(self, architecture: int, num_threads: int) -> int:
        """At a time on a multiprocessor."""
        multiprocessor, num_warps = MULTIPROCESSORS[architecture], num_threads // 32
        of_a_warp = _whole(32 * self.num_registers)
        of_a_block = _whole(self.shared_bytes + multiprocessor.reserved_bytes)
        return min(
            multiprocessor.num_blocks,
            multiprocessor.num_warps // num_warps,
            REGISTERS // of_a_warp // num_warps,
            multiprocessor.shared_bytes // max(1, of_a_block),
        )


def read_report(log: str) -> dict[str, KernelReport]:
    """By kernel, of what a compiler with --ptxas-options=-v says."""
    found = {}
    for name, stores, loads, registers, rest in _KERNEL.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = KernelReport(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
    return found


def _whole(number: int) -> int:
    return -(-number // UNIT) * UNIT
