"""What --fit and --bits ask for."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.weights.conversion.fitted_formats import BitBudget
from penstock_server.settings.settings import Settings


def budget_of(settings: Settings, num_bytes: int | None, bits: float | None) -> BitBudget | None:
    """None where neither is given. Raises ConfigError for both together, or beside a chosen format."""
    if num_bytes is None and bits is None:
        return None
    if (settings.weights, settings.group_size) != ("int8", None) or None not in (num_bytes, bits):
        raise ConfigError(
            "--fit and --bits choose the formats of matrices themselves: give one of the two, without "
            "--weights and --group-size"
        )
    return BitBudget(num_bytes, bits)
