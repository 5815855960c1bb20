"""What several tests of the engine begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretended_card import PretendedCard, engines


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    """A pretended card on which the kernels run."""
    with engines.card_with_kernels() as card:
        yield card
