"""KernelTuning: parameters of the native kernels, which are measured on each machine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

#: The values that parameters of a KernelTuning may have.
TUNING_RANGES = {
    "prefetch_bytes": range(0, 65536 + 1, 64),
    "prefetch_bytes_int4": range(0, 65536 + 1, 64),
    "few_rows": range(2, 64 + 1),
    "panel_inputs": range(256, 2048 + 1, 256),
    "lane_rows": range(16, 1024 + 1, 16),
    "read_threads": range(0, 65536 + 1),
}


@dataclass(frozen=True)
class KernelTuning:
    """Parameters of the native kernels for the processor. The parameters decide how fast a product is; no bit
    of a result depends on them. A build that has no such choice ignores the parameter."""

    #: How far ahead of a product with one token its weights are prefetched, in each of four streams.
    prefetch_bytes: int = 2048
    #: The same of 4-bit codes whose scales are steps or powers of two, which are one stream.
    prefetch_bytes_int4: int = 12288
    #: Rows of integers up to which weights with a scale for each channel are always multiplied row by row;
    #: more of them, up to 64, still are where they don't fill tiles of 16. Groups: at most 4.
    few_rows: int = 32
    #: Inputs of weights that are packed at a time.
    panel_inputs: int = 2048
    #: The most rows of integers that lie in lanes, for which weights are used as they lie; with more than
    #: that and than 64, weights with a scale for each channel are packed.
    lane_rows: int = 128
    #: Threads of a product with one token, which waits for memory; 0: all threads.
    read_threads: int = 0

    def __post_init__(self) -> None:
        for name, values in TUNING_RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or value not in values:
                step = f", a multiple of {values.step}" if values.step > 1 else ""
                raise ConfigError(
                    f"kernel_tuning: {name} is {value!r}; it must be {values[0]} to {values[-1]}{step}"
                )

    @classmethod
    def parse(cls, text: str) -> KernelTuning:
        """From a text such as "few_rows=8,prefetch_bytes=1024", or "default". Parameters that the text does
        not name have their defaults. Raises ConfigError."""
        if text.strip() == "default":
            return cls()
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in TUNING_RANGES or not value.isdecimal():
                raise ConfigError(
                    f"kernel_tuning: {part.strip()!r} is no parameter with a number; write default, or for "
                    f"example few_rows=8,prefetch_bytes=1024 (there are: {', '.join(TUNING_RANGES)})"
                )
            found[name] = int(value)
        return cls(**found)

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in TUNING_RANGES)
