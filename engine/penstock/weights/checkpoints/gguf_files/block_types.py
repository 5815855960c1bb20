"""The quantized types of GGUF files: how many inputs lie in a block, in how many bytes, and how a block is
decoded. ggml's code is the definition of the formats (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.weights.checkpoints.gguf_files import coded_blocks, float_blocks, integer_blocks
from penstock.weights.checkpoints.int4_form import Int4Form

#: Inputs that share a scale in blocks that are INT8, and should share one where a block becomes INT8. Blocks
#: of Q6_K have 16 with a scale.
GROUP = 32


@dataclass(frozen=True)
class BlockType:
    """One type. Blocks are given as uint8 [num_blocks, num_bytes]."""

    name: str
    #: Inputs of a block.
    num_inputs: int
    num_bytes: int
    #: Makes float32 [num_blocks, num_inputs]; None for types that are 4-bit codes.
    floats: Callable[[Tensor], Tensor] | None = None
    #: Makes integers (int8 [num_blocks, GROUP]) and scales [num_blocks, 1]; None where a block has minima, or
    #: smaller groups.
    integers: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    #: Makes the arrays of Int4Tensor, each [num_blocks, its elements of a block].
    arrays: Callable[[Tensor], dict[str, Tensor]] | None = None
    form: Int4Form | None = None


#: For each 32 inputs a scale in float16, with or without a minimum.
_PLAIN = Int4Form(32, "F16")
_WITH_MINIMA = Int4Form(32, "F16", minima="numbers", codebook="unsigned")
#: For each 256 inputs a scale in float16, and for each 32 an integer that multiplies the scale.
_K = Int4Form(32, "F16", block_groups=8, minima="numbers", codebook="unsigned")
_XS = Int4Form(32, "F16", block_groups=8, codebook="iq4_nl")

#: By the number in the file.
BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, arrays=coded_blocks.q4_0, form=_PLAIN),
    3: BlockType("Q4_1", 32, 20, arrays=coded_blocks.q4_1, form=_WITH_MINIMA),
    6: BlockType("Q5_0", 32, 22, float_blocks.q5_0, integer_blocks.q5_0),
    7: BlockType("Q5_1", 32, 24, float_blocks.q5_1),
    8: BlockType("Q8_0", 32, 34, float_blocks.q8_0, integer_blocks.q8_0),
    12: BlockType("Q4_K", 256, 144, arrays=coded_blocks.q4_k, form=_K),
    13: BlockType("Q5_K", 256, 176, float_blocks.q5_k),
    14: BlockType("Q6_K", 256, 210, float_blocks.q6_k),
    20: BlockType("IQ4_NL", 32, 18, arrays=coded_blocks.q4_0, form=Int4Form(32, "F16", codebook="iq4_nl")),
    23: BlockType("IQ4_XS", 256, 136, arrays=coded_blocks.iq4_xs, form=_XS),
    39: BlockType("MXFP4", 32, 17, arrays=coded_blocks.mxfp4, form=Int4Form(32, "BF16", codebook="mxfp4")),
}
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
#: Types with too few bits for codes of 4, and types that are not in files.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
