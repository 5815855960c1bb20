"""Outline: transformers' model with a place where each layer was. Running the model's forward over the places
shows what the forward passes to each layer (position embeddings, masks), and computes what comes before the
first layer and after the last one. The layers themselves are computed one by one, each as a function.

forward() could also drive the layers itself, in a thread of its own. More models would fit, those that
compute something between layers. But sweeps that end early (cancelled ones, warm-ups) would have to unwind
the thread, and a layer would no longer be a function of weights, hidden states and keys. So layers that get
more than hidden states and positions are refused (probe.py finds them)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers.auto_model import list_of_layers
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.stand_ins import Product, is_product

#: The name of the hidden states where forward() passes them by name.
_HIDDEN = "hidden_states"


class Passed(NamedTuple):
    """What forward() passes to a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """[1, num_tokens, hidden_size]"""
        found = self.kwargs[_HIDDEN] if _HIDDEN in self.kwargs else (self.args or (None,))[0]
        if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[0] != 1:
            raise UnsupportedModel("its layers don't take hidden states [1, tokens, hidden size]")
        return found

    def with_hidden(self, hidden: Tensor) -> Passed:
        """The same with other hidden states."""
        if _HIDDEN in self.kwargs:
            return Passed(self.args, self.kwargs | {_HIDDEN: hidden})
        return Passed((hidden, *self.args[1:]), self.kwargs)


#: (layer's number, what it gets) -> what it returns.
Visit = Callable[[int, Passed], Any]


class _Place(nn.Module):
    """Stands where a layer was. What forward() asks a layer for, such as its kind, the layer answers."""

    def __init__(self, outline: Outline, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # hidden from torch: the layer's parameters are not the outline's
        self.__dict__["outline"] = outline
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.outline.visit(self.index, Passed(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class _Embedding(nn.Module):
    """Gives the embedding's rows, which were looked up before, as transformers' module gives them: some
    modules scale the rows."""

    def __init__(self, outline: Outline, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module
        self.__dict__["outline"] = outline

    def forward(self, input_ids: Tensor) -> Tensor:
        outline: Any = self.outline
        given: Given = outline.given
        number = torch.arange(given.rows.shape[0], device=given.rows.device).view(1, -1)
        vectors: Tensor = functional_call(self.module, {"weight": given.rows}, (number,))
        return vectors if given.replace is None else given.replace(vectors)


@dataclass
class Given:
    """The tokens of a step."""

    rows: Tensor  # float32 [num_tokens, width]: the embedding's rows
    positions: Tensor  # int64 [num_tokens]
    input_ids: Tensor | None = None
    #: Puts a caller's vectors in the places of some tokens' ones.
    replace: Callable[[Tensor], Tensor] | None = None


class _LastLayerReached(Exception):
    """Ends forward(): what comes after the last layer is not wanted."""


class Outline:
    """See the file's docstring."""

    def __init__(self, model: Any, desk: Desk, num_layers: int) -> None:
        """Takes model apart. Raises UnsupportedModel."""
        self.model, self.desk = model, desk
        self._name = type(model).__name__
        places = list_of_layers(model, num_layers)
        self.layers: list[nn.Module] = list(places)
        self.layers_name = next(name for name, module in model.named_modules() if module is places)
        for index, layer in enumerate(self.layers):
            places[index] = _Place(self, index, layer)
        self.embedding, self.head = self._take_embedding(), self._take_head()
        self.given = Given(torch.empty(0, 0), torch.empty(0, dtype=torch.int64))
        self.visit: Visit = lambda index, passed: passed.hidden
        #: Layers that return a tuple, whose first element is the hidden states, have its length here.
        self.num_returned: int | None = None

    def _take_embedding(self) -> nn.Module:
        module = self.model.get_input_embeddings()
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModel(f"{self._name} has no plain embedding")
        module.padding_idx = None  # torch compares it with the number of rows, which is that of tokens here
        self.model.set_input_embeddings(_Embedding(self, module))
        return module

    def _take_head(self) -> nn.Module:
        module: nn.Module | None = self.model.get_output_embeddings()
        if module is None or not is_product(module):
            raise UnsupportedModel(f"{self._name} has no plain linear head")
        self.model.set_output_embeddings(Product(self.desk, "head"))
        return module

    def before(self, given: Given, tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Passed]]:
        """Hidden states [num_tokens, hidden_size] for the first layer, and what forward() passes to each
        layer. `tensors` are those outside of layers, by their names."""
        calls: list[Passed] = []

        def visit(index: int, passed: Passed) -> Any:
            calls.append(passed)
            if len(calls) == len(self.layers):
                raise _LastLayerReached
            return self.returned(passed.hidden)

        with contextlib.suppress(_LastLayerReached):
            self.run(given, tensors, visit)
        return calls[0].hidden[0], calls

    def after(self, given: Given, hidden: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size] after the last layer. Only
        the number of `given` tokens counts."""
        result = self.run(given, tensors, lambda index, passed: self.returned(hidden.unsqueeze(0)))
        logits: Tensor = result.logits
        return logits[0]

    def run(self, given: Given, tensors: Mapping[str, Tensor], visit: Visit) -> Any:
        """One forward pass, in which `visit` stands for the layers."""
        self.given, self.visit = given, visit
        ids = given.input_ids if given.input_ids is not None else torch.zeros_like(given.positions)
        asked = {
            "input_ids": ids.view(1, -1),
            "position_ids": given.positions.view(1, -1),
            "use_cache": False,
        }
        with self.desk.functions:
            return functional_call(self.model, dict(tensors), (), asked)

    def returned(self, hidden: Tensor) -> Any:
        """Hidden states in the form in which a layer returns them."""
        return hidden if self.num_returned is None else (hidden, *(None,) * (self.num_returned - 1))
