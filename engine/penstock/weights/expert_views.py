"""ExpertViews: the weights of experts as views of the slots in which they lie. Each is made once for a slot
and a form: a dozen views take a tenth of a millisecond, and experts come and go."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.spec import UnitKey
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import Unit
from penstock.weights.tiers.tier import Arrival

#: Names, shapes and formats of an expert's tensors. Experts with the same form have the same views of a
#: buffer.
Form = tuple[object, ...]


class ExpertViews:
    """Of one model's experts."""

    def __init__(self, units: Mapping[UnitKey, Unit]) -> None:
        self._units = units
        #: The form of each expert that was lent. Equal forms are one object.
        self._forms: dict[UnitKey, Form] = {}
        self._known: dict[Form, Form] = {}
        #: By form and slot; the number of slots and forms is small.
        self._views: dict[tuple[int, int], LayerWeights] = {}
        #: The same for slots in RAM, beside a card.
        self._views_in_ram: dict[tuple[int, int], LayerWeights] = {}

    def of(self, key: UnitKey, arrival: Arrival) -> LayerWeights:
        """The weights of an expert where they have arrived."""
        if arrival.views is None:
            place = self._place(key, arrival.buffer)
            views = self._views.get(place)
            if views is None:
                layout = self._units[key].layout
                views = self._views[place] = LayerWeights.views(layout, arrival.buffer)
            arrival.views = views
        return arrival.views

    def in_ram(self, key: UnitKey, arrival: Arrival) -> LayerWeights:
        """What of() gives, for the processor beside a card."""
        place = self._place(key, arrival.buffer)
        if place not in self._views_in_ram:
            views = LayerWeights.views(self._units[key].layout, arrival.buffer)
            self._views_in_ram[place] = views.in_ram()
        return self._views_in_ram[place]

    def clear(self) -> None:
        """Forget the views, which keep buffers."""
        self._views.clear()
        self._views_in_ram.clear()

    def _place(self, key: UnitKey, buffer: Tensor) -> tuple[int, int]:
        return id(self._forms.get(key) or self._form(key)), buffer.data_ptr()

    def _form(self, key: UnitKey) -> Form:
        form: Form = tuple((each.name, each.shape, each.format) for each in self._units[key].tensors)
        self._forms[key] = self._known.setdefault(form, form)
        return self._forms[key]
