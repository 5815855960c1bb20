"""Figures as people read them: 23.3 s in place of 23337.9 ms, 41,476 in place of 41475.77."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Three digits and a unit: 1.15 ms, 93.4 ms, 9.34 s, 23.3 s, 12.4 min, 3.1 h."""
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three_digits(seconds)} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rate(per_second: float) -> str:
    """Three digits, or all that stand before the point: 0.62, 57.9, 1,240."""
    return _three_digits(per_second)


def gigabytes(num_bytes: float) -> str:
    """In units of 1000, as the hub has them."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _three_digits(number: float) -> str:
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{decimals}f}"
