"""GPTQ (arXiv 2210.17323) with 4 bits, as AutoGPTQ and GPTQModel keep it: int32 words of eight codes along
the inputs of [in_features, out_features], the first in the lowest bits. So the words of an output, one after
the other, are the bytes of its codes. Words of zero points have eight outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.nibbles import column_order, in_groups, unpack, words_form
from penstock.weights.checkpoints.quantized.packed import check_order
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.quantization_config import is_second
from penstock.weights.checkpoints.quantized.word_module import WordModule, module_entries
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: The zero point of symmetric codes.
MIDDLE = 8
#: The largest zero point that words hold.
LARGEST = 15


def gptq_int4_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` in place of each module's words, scales and g_idx. Raises
    MissingTensor and WrongTensor."""
    quantization = checkpoint.config["quantization_config"]
    # The first version of the format stores each zero point minus one.
    is_first, is_symmetric = not is_second(quantization), quantization.get("sym", True)
    is_reordered = bool(quantization.get("desc_act"))

    def matrix(module: WordModule) -> TensorEntry:
        check_order(module.name, module.g_idx, module.num_groups, is_reordered)
        return _matrix(checkpoint, module, is_first, is_symmetric)

    return module_entries(checkpoint, matrix)


def _matrix(checkpoint: Checkpoint, module: WordModule, is_first: bool, is_symmetric: bool) -> TensorEntry:
    num_inputs, num_outputs = 8 * module.qweight.shape[0], module.qweight.shape[1]
    size = module.checked_size(num_inputs, num_outputs, has_zero_points=not is_symmetric)
    g_idx = module.g_idx
    if g_idx is not None and column_order(checkpoint, g_idx, module.num_groups) is None:
        g_idx = None
    form = words_form(size, module.scales.dtype, not is_symmetric, is_permuted=g_idx is not None)
    source = GptqInt4(module, g_idx, is_first, form)
    return int4_entry(f"{module.name}weight", module.qweight, (num_outputs, num_inputs), source)


@dataclass(frozen=True)
class GptqInt4:
    """weight[o, i] = (q[i, o] - zero[g, o]) * scales[g, o] where g = g_idx[i]."""

    module: WordModule
    g_idx: TensorEntry | None  # None: the inputs of a group lie side by side
    is_first: bool
    form: Int4Form

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        words = checkpoint.read_columns(self.module.qweight, 4 * start, 4 * stop).view(torch.int32)
        codes = words.t().contiguous().view(torch.uint8)
        zeros = self._zero_points(checkpoint, start, stop)
        repeats = 2 * codes.shape[1] // self.form.group_size // self.module.num_groups
        scale = self.module.scale_rows(checkpoint, start, stop)
        arrays = {"scale": scale.repeat_interleave(repeats, 1)}
        if self.form.minima == "zero_points":
            arrays["sub_minimum"] = zeros.repeat_interleave(repeats, 1)
        elif bool((zeros != MIDDLE).any()):
            raise WrongTensor(
                f"{self.module.qzeros.name} in {self.module.qzeros.file} holds other zero points than "
                f'{MIDDLE}, though the model\'s config says "sym": true. Set "sym" to false there, and the '
                "zero points count"
            )
        return arrays | in_groups(checkpoint, codes, self.g_idx, self.module.num_groups)

    def _zero_points(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, num_groups]."""
        stored = unpack(self.module.zero_bytes(checkpoint, start, stop))
        zeros = stored.t()[start % 8 :][: stop - start]
        if self.is_first and bool((zeros == LARGEST).any()):
            raise WrongTensor(
                f"{self.module.qzeros.name} in {self.module.qzeros.file} holds the zero point {LARGEST}, "
                "which stands for 16 in some programs and for 0 in others: the first version of the format "
                'stores zero points minus one. Use a model with "checkpoint_format": "gptq_v2"'
            )
        return zeros + 1 if self.is_first else zeros
