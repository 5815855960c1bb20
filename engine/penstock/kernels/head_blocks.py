"""HeadBlocks: a matrix in which each head meets its own part of another matrix, as in the absorbed form of
latent attention. Parts of every format are computed by linear() as whole matrices are.

The transpose of a part has scales along its inputs. So the scale of a weight's row goes to the input that
meets the row, and what is left of the weights are integers, whose sums are exact as in any other product. The
price is a transposed copy of the part's integers in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.operands import Matrix, QuantizedTensor
from penstock.kernels.planes_tensor import PlanesTensor

#: (x, weight, bias) -> x W^T + bias, as Kernels.linear().
Linear = Callable[[Tensor, Matrix, Tensor | None], Tensor]


class HeadBlocks(NamedTuple):
    """A block diagonal matrix. `matrix` has equally many rows for each head, of which those from `first` to
    `end` are the head's block, or the transpose of its block."""

    matrix: Matrix
    num_heads: int
    first: int
    end: int
    is_transposed: bool = False

    @property
    def out_features(self) -> int:
        """Of all heads."""
        width = self.matrix.look_up(torch.zeros(1, dtype=torch.int64)).shape[1]
        return self.num_heads * (width if self.is_transposed else self.end - self.first)

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """float32 [num_tokens, num_heads * inputs] -> [num_tokens, out_features], head by head."""
        step, function = (
            self.matrix.out_features // self.num_heads,
            _transposed if self.is_transposed else _plain,
        )
        products = []
        for head, own in enumerate(x.chunk(self.num_heads, dim=1)):
            block = self.matrix.rows(head * step + self.first, head * step + self.end)
            products.append(function(linear, own, block))
        return torch.cat(products, dim=1)

    def rows(self, start: int, stop: int) -> Matrix:
        raise NotImplementedError("blocks of heads are multiplied as a whole")

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        return self.dequantize()[row_ids]

    def map(self, function: Callable[[Tensor], Tensor]) -> HeadBlocks:
        """The matrix with `function` applied to each of its tensors."""
        return self._replace(matrix=self.matrix.map(function))

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features of all heads]."""
        whole = self.matrix.dequantize()
        heads = whole.view(self.num_heads, -1, whole.shape[1])[:, self.first : self.end]
        if self.is_transposed:
            heads = heads.transpose(1, 2)
        count, rows, width = heads.shape
        y = whole.new_zeros(count, rows, count, width)
        for head, block in enumerate(heads):
            y[head, :, head] = block
        return y.view(count * rows, count * width)


def _plain(linear: Linear, x: Tensor, weight: Matrix) -> Tensor:
    return linear(x, weight, None)


def _transposed(linear: Linear, x: Tensor, weight: Matrix) -> Tensor:
    """x W: [num_tokens, out_features] -> [num_tokens, in_features]. Groups of a row's inputs, which have
    scales of their own, are groups of outputs here."""
    integers, scale, minimum, order = _integers(weight)
    size = integers.shape[1] // scale.shape[1]
    outputs = []
    for group, own_scale in enumerate(scale.t()):
        turned = integers[:, group * size : (group + 1) * size].t().contiguous()
        part = linear(x * own_scale, QuantizedTensor(turned, own_scale.new_ones(size)), None)
        if minimum is not None:
            part = part - _sums(linear, x * minimum[:, group])
        outputs.append(part)
    y = torch.cat(outputs, dim=1)
    return y if order is None else y[:, torch.argsort(order)]


def _sums(linear: Linear, x: Tensor) -> Tensor:
    """The sum of each row, [num_tokens, 1], with the exact sums of a product."""
    ones = torch.ones(1, x.shape[1], dtype=torch.int8, device=x.device)
    return linear(x, QuantizedTensor(ones, x.new_ones(1)), None)


def _integers(weight: Matrix) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A matrix as w = scale * integer - minimum: int8 [out_features, in_features], float32 [out_features,
    num_groups] twice, and the order of the inputs."""
    if isinstance(weight, Int4Tensor):
        scale, minimum = weight.group_scales()
        least = None if minimum is None else minimum.float()
        return weight.integers(), scale.float(), least, weight.order
    if isinstance(weight, PlanesTensor):
        weight = weight.joined()
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"no product with the transpose of a {type(weight).__name__}")
    return weight.qweight, weight.scale.view(weight.out_features, -1), None, None
