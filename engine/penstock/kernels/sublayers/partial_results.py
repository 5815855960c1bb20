"""Scratch memory for partial results of attention, which let threads share a long sequence."""

#: Dimensions per head that cpu.c keeps on its stack.
MAX_HEAD_DIM = 1024
#: Keys of a partial result of attention (SPLIT in attention_rows.h).
SPLIT_KEYS = 1024
#: The most bytes for all partial results of a step: with more of them, there are tokens enough to give every
#: thread work, and no sequence needs to be shared.
MAX_PARTIAL_BYTES = 16 << 20


def partial_bytes(num_rows: int, num_keys: int, head_dim: int, is_most: bool = False) -> int:
    """Bytes of partial results, if threads are to share sequences; otherwise 0. With `is_most`, the most that
    this step or a smaller one takes: where this step's are too many, a smaller step reaches the limit."""
    num_splits = -(-num_keys // SPLIT_KEYS)
    num_bytes = 4 * num_rows * num_splits * (-(-head_dim // 16) * 16 + 16)
    if is_most:
        num_bytes = min(num_bytes, MAX_PARTIAL_BYTES)
    return num_bytes if num_splits > 1 and num_bytes <= MAX_PARTIAL_BYTES else 0
