"""AWQ (arXiv 2306.00978) with 4 bits in the layout that AutoAWQ calls GEMM: [in_features, out_features] in
int32 words of eight outputs each, in an order that suits its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.nibbles import pack, unpack, words_form
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.word_module import WordModule, module_entries
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Where each of eight outputs lies in a word, counted in codes from the lowest bits.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def awq_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` in place of each module's words and scales. Raises
    MissingTensor and WrongTensor."""

    def matrix(module: WordModule) -> TensorEntry:
        num_inputs, num_outputs = module.qweight.shape[0], 8 * module.qweight.shape[1]
        size = module.checked_size(num_inputs, num_outputs, has_zero_points=True)
        form = words_form(size, module.scales.dtype, has_zero_points=True)
        source = AwqInt4(module, form)
        return int4_entry(f"{module.name}weight", module.qweight, (num_outputs, num_inputs), source)

    return module_entries(checkpoint, matrix)


@dataclass(frozen=True)
class AwqInt4:
    """weight[o, i] = (q[i, o] - zero[g, o]) * scales[g, o] where g = i // group size."""

    module: WordModule
    form: Int4Form

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        first, last = start // 8 * 4, -(-stop // 8) * 4
        codes = _by_output(checkpoint.read_columns(self.module.qweight, first, last), start, stop)
        zeros = _by_output(self.module.zero_bytes(checkpoint, start, stop), start, stop)
        repeats = codes.shape[1] // self.form.group_size // self.module.num_groups
        return {
            "codes": pack(codes),
            "scale": self.module.scale_rows(checkpoint, start, stop).repeat_interleave(repeats, 1),
            "sub_minimum": zeros.repeat_interleave(repeats, 1),
        }


def _by_output(stored: Tensor, start: int, stop: int) -> Tensor:
    """Words (uint8 [rows, 4 * words], the first has output start // 8 * 8) -> uint8 [stop - start, rows]."""
    in_order = unpack(stored).view(len(stored), -1, 8)[:, :, PLACES].flatten(1)
    return in_order.t()[start % 8 :][: stop - start].contiguous()
