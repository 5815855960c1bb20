"""ConversionReport: what a conversion did, and what rounding cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ConversionReport:
    """Filled while the conversion runs."""

    num_files: int = 0
    num_resumed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    #: Seconds of reading and quantizing, of writing (both at the same time), and altogether.
    quantize_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    #: Whether a calibration made up for errors of rounding, which `errors` does not show.
    is_compensated: bool = False
    #: Relative error of each tensor that was quantized, rounded to the nearest.
    errors: dict[str, float] = field(default_factory=dict)
