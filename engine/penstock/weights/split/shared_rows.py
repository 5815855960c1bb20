"""SharedRows: which rows of what lies in RAM come over the link in this step, and the matrices of a layer
whose rows lie in three places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from torch import Tensor

from penstock.kernels import Matrix, PlanesTensor
from penstock.kernels.shared.split_matrix import SplitMatrix
from penstock.memory.planning.product_split import part_rows
from penstock.spec import UnitKey
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.split.row_split import Piece, lower_name, rest_pieces
from penstock.weights.tensors import Unit


class SharedRows:
    """The share changes from step to step. The link reads ahead, so that a layer may come with the share of
    the step before: the product asks what came."""

    def __init__(
        self, units: Mapping[UnitKey, Unit], share_of: Callable[[int], float], keeps_upper: bool = False
    ) -> None:
        """`units` are those that split_rows() makes, with `keeps_upper`; `share_of` tells the share for a
        number of tokens."""
        self._units, self._keeps_upper = units, keeps_upper
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
        if self._keeps_upper:
            kept, rest = _upper_rows(kept, rest)
        kept, rest, rest_in_ram = map(_with_both_planes, (kept, rest, rest_in_ram))
        split = dict[str, SplitMatrix]()
        for name, matrix in rest.items():
            if not isinstance(matrix, Tensor):
                first = kept.matrix(name) if name in kept else None
                split[name] = _split(first, matrix, rest_in_ram.matrix(name), share)
        return kept.with_matrices(split)

    def _find_pieces(self, key: UnitKey, share: float) -> list[Piece]:
        return list(rest_pieces(self._units[key].layout, share, self._keeps_upper))


def _upper_rows(kept: LayerWeights, rest: LayerWeights) -> tuple[LayerWeights, LayerWeights]:
    """The same weights, of which each has the upper planes' rows that belong to its lower ones: the card
    keeps all of them."""
    first, others = dict[str, Matrix](), dict[str, Matrix]()
    for name, upper in kept.items():
        if isinstance(upper, PlanesTensor) and name in rest:
            num_rows = upper.out_features
            border = num_rows - rest.matrix(name).out_features
            first[name], others[name] = upper.rows(0, border), upper.rows(border, num_rows)
    return kept.with_matrices(first), rest.with_matrices(others)


def _with_both_planes(weights: LayerWeights) -> LayerWeights:
    """The same weights, whose upper planes have the lower ones that lie in the same unit."""
    joined = dict[str, Matrix]()
    for name, upper in weights.items():
        if isinstance(upper, PlanesTensor) and lower_name(name) in weights:
            joined[name] = upper.with_lower(weights.vector(lower_name(name)))
    return weights.with_matrices(joined)


def _split(kept: Matrix | None, streamed: Matrix, in_ram: Matrix, share: float) -> SplitMatrix:
    """What is kept of a matrix and its rest, of which a share was streamed."""
    num_rows = in_ram.out_features
    border = part_rows(num_rows, share)
    on_card = [] if kept is None or not kept.out_features else [kept]
    on_card += [streamed.rows(0, border)] if border else []
    return SplitMatrix(tuple(on_card), in_ram.rows(border, num_rows) if border < num_rows else None)
