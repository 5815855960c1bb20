"""AWQ (arXiv 2306.00978) with 4 bits in the layout that AutoAWQ calls GEMM: [in_features, out_features] in
int32 words of eight outputs each, in an order that suits its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.nibbles import words_form
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.word_module import WordModule, module_entries
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Where each of eight outputs is among the codes of a word: those at even places first, counted from the
#: lowest bits, then those at odd places.
PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
#: The codes at even places of a word.
EVEN = 0x0F0F0F0F


def awq_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` in place of each module's words and scales. Raises
    MissingTensor and WrongTensor."""

    def matrix(module: WordModule) -> TensorEntry:
        num_inputs, num_outputs = module.qweight.shape[0], 8 * module.qweight.shape[1]
        size = module.checked_size(num_inputs, num_outputs, has_zero_points=True)
        if module.g_idx is not None:
            raise WrongTensor(
                f"tensor {module.g_idx.name} in {module.g_idx.file} says in which group each input is, which "
                "AWQ does not know. The model's config may name the wrong method: GPTQ has such tensors"
            )
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
        words = checkpoint.read_columns(self.module.qweight, first, last).view(torch.int32)
        codes = _in_pairs(words[0::2], words[1::2])[start % 8 :][: stop - start]
        zeros = _in_pairs(self.module.zero_bytes(checkpoint, start, stop).view(torch.int32), None)
        repeats = 2 * codes.shape[1] // self.form.group_size // self.module.num_groups
        return {
            "codes": codes,
            "scale": self.module.scale_rows(checkpoint, start, stop).repeat_interleave(repeats, 1),
            "sub_minimum": zeros[start % 8 :][: stop - start].repeat_interleave(repeats, 1),
        }


def _in_pairs(even: Tensor, odd: Tensor | None) -> Tensor:
    """Words (int32 [rows, words]) of even rows and of odd rows -> uint8 [8 * words, rows]: each output's
    codes, that of an odd row in the high half of a byte. None: the high halves are 0."""
    low, high = even & EVEN, (even >> 4) & EVEN
    if odd is not None:
        low, high = low | (odd & EVEN) << 4, high | odd & ~EVEN
    # torch.stack() copies. A single row would count as contiguous, and torch would not view it as bytes.
    places = torch.stack((low.t(), high.t())).view(torch.uint8)
    by_place = places.view(2, low.shape[1], -1, 4).permute(1, 0, 3, 2).flatten(1, 2)
    return by_place[:, PLACES].flatten(0, 1)
