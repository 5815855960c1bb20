"""The quantized types of GGUF files: how many inputs lie in a block, in how many bytes, and how a block is
decoded. ggml's code is the definition of the formats (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.weights.checkpoints.gguf_files import (
    coded_blocks,
    float_blocks,
    grid_blocks,
    integer_blocks,
    ternary_blocks,
)
from penstock.weights.checkpoints.int4_form import Int4Form

#: Inputs that share a scale in most blocks that are INT8, and should share one where a block becomes INT8.
#: Blocks of Q6_K have 16 with a scale.
GROUP = 32


@dataclass(frozen=True)
class BlockType:
    """One type. Blocks are given as uint8 [num_blocks, num_bytes]."""

    name: str
    #: Inputs of a block.
    num_inputs: int
    num_bytes: int
    #: Makes float32 [num_blocks, num_inputs], where a type is neither 4-bit codes nor INT8.
    floats: Callable[[Tensor], Tensor] | None = None
    #: Makes integers (int8 [num_blocks, num_inputs]) and scales [num_blocks, groups of a block]; None where a
    #: block has minima, and for Q6_K.
    integers: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    #: Makes the arrays of Int4Tensor, each [num_blocks, its elements of a block].
    arrays: Callable[[Tensor], dict[str, Tensor]] | None = None
    form: Int4Form | None = None
    #: Inputs that share a scale where the type is INT8, or becomes so.
    group_size: int = GROUP

    def decode(self, blocks: Tensor) -> Tensor:
        """Blocks of a type that is no 4-bit codes as float32 [num_blocks, num_inputs]."""
        if self.floats is not None:
            return self.floats(blocks)
        assert self.integers is not None
        integers, scales = self.integers(blocks)
        grouped = integers.view(*scales.shape, -1).float() * scales.float()[..., None]
        return grouped.flatten(1)


#: For each 32 inputs a scale in float16, with or without a minimum.
_PLAIN = Int4Form(32, "F16")
_WITH_MINIMA = Int4Form(32, "F16", minima="numbers", codebook="unsigned")
#: For each 256 inputs a scale in float16, and for each 32 an integer that multiplies the scale.
_K = Int4Form(32, "F16", block_groups=8, minima="numbers", codebook="unsigned")
_XS = Int4Form(32, "F16", block_groups=8, codebook="iq4_nl")
#: The same where the block's scale is a part of the file's.
_IQ1 = Int4Form(32, "F32", block_groups=8, codebook="iq1")
_IQ2 = Int4Form(32, "F32", block_groups=8, codebook="iq2")
_IQ3 = Int4Form(32, "F32", block_groups=8, codebook="iq3_xxs")
#: The same for each 16 inputs.
_Q2_K = Int4Form(16, "F16", block_groups=16, minima="numbers", codebook="unsigned")
_Q3_K = Int4Form(16, "F16", block_groups=16)
_FINE_IQ1 = Int4Form(16, "F32", block_groups=16, codebook="iq1")
_FINE_IQ2 = Int4Form(16, "F32", block_groups=16, codebook="iq2")
#: Blocks of one scale.
_ONE = Int4Form(ternary_blocks.GROUP_OF_256, "F16")

#: By the number in the file.
BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, arrays=coded_blocks.q4_0, form=_PLAIN),
    3: BlockType("Q4_1", 32, 20, arrays=coded_blocks.q4_1, form=_WITH_MINIMA),
    6: BlockType("Q5_0", 32, 22, integers=integer_blocks.q5_0),
    7: BlockType("Q5_1", 32, 24, float_blocks.q5_1),
    8: BlockType("Q8_0", 32, 34, integers=integer_blocks.q8_0),
    10: BlockType("Q2_K", 256, 84, arrays=coded_blocks.q2_k, form=_Q2_K),
    11: BlockType("Q3_K", 256, 110, arrays=coded_blocks.q3_k, form=_Q3_K),
    12: BlockType("Q4_K", 256, 144, arrays=coded_blocks.q4_k, form=_K),
    13: BlockType("Q5_K", 256, 176, float_blocks.q5_k),
    14: BlockType("Q6_K", 256, 210, float_blocks.q6_k),
    16: BlockType("IQ2_XXS", 256, 66, arrays=grid_blocks.iq2_xxs, form=_IQ2),
    17: BlockType("IQ2_XS", 256, 74, arrays=grid_blocks.iq2_xs, form=_FINE_IQ2),
    18: BlockType("IQ3_XXS", 256, 98, arrays=grid_blocks.iq3_xxs, form=_IQ3),
    19: BlockType("IQ1_S", 256, 50, arrays=grid_blocks.iq1_s, form=_IQ1),
    20: BlockType("IQ4_NL", 32, 18, arrays=coded_blocks.q4_0, form=Int4Form(32, "F16", codebook="iq4_nl")),
    21: BlockType("IQ3_S", 256, 110, arrays=grid_blocks.iq3_s, form=Int4Form(32, "F16", 8, codebook="iq3_s")),
    22: BlockType("IQ2_S", 256, 82, arrays=grid_blocks.iq2_s, form=_FINE_IQ2),
    23: BlockType("IQ4_XS", 256, 136, arrays=coded_blocks.iq4_xs, form=_XS),
    29: BlockType("IQ1_M", 256, 56, arrays=grid_blocks.iq1_m, form=_FINE_IQ1),
    34: BlockType("TQ1_0", 256, 54, arrays=ternary_blocks.tq1_0, form=_ONE),
    35: BlockType("TQ2_0", 256, 66, arrays=ternary_blocks.tq2_0, form=_ONE),
    39: BlockType("MXFP4", 32, 17, arrays=coded_blocks.mxfp4, form=Int4Form(32, "BF16", codebook="mxfp4")),
    40: BlockType("NVFP4", 64, 36, arrays=coded_blocks.nvfp4, form=Int4Form(16, "F16", codebook="mxfp4")),
    41: BlockType("Q1_0", 128, 18, arrays=ternary_blocks.q1_0, form=Int4Form(128, "F16")),
    42: BlockType("Q2_0", 64, 18, arrays=ternary_blocks.q2_0, form=Int4Form(64, "F16")),
}
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
#: Types that are not in files of models, or not of weights.
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64"}
