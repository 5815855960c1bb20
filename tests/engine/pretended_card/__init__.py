"""A pretended NVIDIA card: the engine's code for GPUs runs on it unchanged, on a machine that has none."""

from pretended_card.card import PretendedCard, missing, pretend
from pretended_card.races import Race

__all__ = ["PretendedCard", "Race", "missing", "pretend"]
