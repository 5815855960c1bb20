"""Eagle3Drafter: an EAGLE-3 head guesses what the model will say that it was trained for."""

from __future__ import annotations

from torch import Tensor

from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.generation.drafting.expectation import Assumed, assumed_eagle3
from penstock.loader import LoadedModel, Model
from penstock.memory.planning.plan import MemoryPlan
from penstock.model.heads.eagle3 import Eagle3


class Eagle3Drafter(MTPDrafter):
    """Rows and guesses are those of MTPDrafter. The states of tokens that stand are made of the hidden states
    of three layers; those of guesses are the head's own."""

    def __init__(self, loaded: LoadedModel, model: Model, plan: MemoryPlan) -> None:
        family = loaded.model.executor.family
        assert isinstance(family, Eagle3)
        self._family, self._embedding = family, loaded.model.executor.ends[0]
        family.check_tokens(loaded.model.executor.ends[1])
        super().__init__(loaded, model, plan)

    @property
    def assumed(self) -> Assumed:
        return assumed_eagle3(self.seconds)

    def _layers(self, num_layers: int) -> tuple[int, ...]:
        return self._family.spec.layers_of(num_layers)

    def _given(self, hidden: Tensor) -> Tensor:
        return self._family.condense(self._embedding, hidden.to("cpu"))
