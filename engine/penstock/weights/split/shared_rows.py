"""SharedRows: which rows of what lies in RAM come over the link in this step, and the matrices of a layer
whose rows lie in three places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from torch import Tensor

from penstock.kernels import Matrix, SplitMatrix
from penstock.memory.planning.product_split import part_rows
from penstock.spec import UnitKey
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.split.row_split import Piece, rest_pieces
from penstock.weights.tensors import Unit


class SharedRows:
    """The share changes from step to step. The link reads ahead, so that a layer may come with the share of
    the step before: whoever computes asks what came."""

    def __init__(self, units: Mapping[UnitKey, Unit], share_of: Callable[[int], float]) -> None:
        """`units` are those that split_rows() makes; `share_of` tells the share for a number of tokens."""
        self._units = units
        self._share_of = share_of
        self._share = share_of(1)
        #: By rests: the share that the link was last told to bring. Written by the link's thread before the
        #: copy is queued, read by others after it has arrived.
        self._brought: dict[UnitKey, float] = {}
        self._pieces = cache(self._find_pieces)

    def begin_step(self, num_tokens: int) -> None:
        """What is asked for from now on is for a step of so many tokens."""
        self._share = self._share_of(num_tokens)

    def pieces(self, key: UnitKey) -> list[Piece] | None:
        """What the link copies of a unit now; None: all of it."""
        if key.plane != "rest":
            return None
        share = self._share  # begin_step() may change it on another thread
        self._brought[key] = share
        return self._pieces(key, share)

    def brought(self, key: UnitKey) -> float:
        """The share of a rest that lies where the card computes."""
        return self._brought[key]

    def weights(
        self, kept: LayerWeights, rest: LayerWeights, rest_in_ram: LayerWeights, share: float
    ) -> LayerWeights:
        """A layer's weights. `rest` are views of the card's memory, of which a share of the rows is valid."""
        names = dict.fromkeys(
            name for name, each in (*kept.items(), *rest.items()) if not isinstance(each, Tensor)
        )
        matrices = {
            name: _matrix(kept.matrix(name) if name in kept else None, rest, rest_in_ram, name, share)
            for name in names
        }
        vectors = {name: each for name, each in kept.items() if isinstance(each, Tensor)}
        return LayerWeights(vectors | matrices)

    def _find_pieces(self, key: UnitKey, share: float) -> list[Piece]:
        return list(rest_pieces(self._units[key].layout, share))


def _matrix(
    kept: Matrix | None, rest: LayerWeights, rest_in_ram: LayerWeights, name: str, share: float
) -> Matrix:
    on_card = [] if kept is None else [kept]
    in_ram = None
    if name in rest:
        streamed, source = rest.matrix(name), rest_in_ram.matrix(name)
        border = part_rows(streamed.out_features, share)
        on_card += [streamed.rows(0, border)] if border else []
        in_ram = source.rows(border, source.out_features) if border < source.out_features else None
    return SplitMatrix(tuple(on_card), in_ram)
