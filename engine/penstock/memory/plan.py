"""What lies where: pure arithmetic on plain numbers, no device, no clock, no file."""

from __future__ import annotations


def resident_layers(num_layers: int, num_resident: int | None) -> frozenset[int]:
    """Which layers stay in memory, None meaning all: the streamed ones are spread evenly among them, so
    that reading the next streamed layer has the computing of the layers before it to hide behind."""
    if num_resident is None or num_resident >= num_layers:
        return frozenset(range(num_layers))
    num_streamed = num_layers - num_resident
    streamed = {(i * num_layers + num_layers - 1) // num_streamed for i in range(num_streamed)}
    return frozenset(range(num_layers)) - streamed


def num_kv_blocks(kv_cache_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    """Blocks that a budget holds."""
    return kv_cache_bytes // (kv_bytes_per_token * block_size)


def default_kv_cache_bytes(
    kv_bytes_per_token: int, block_size: int, max_num_seqs: int, context_len: int, free_bytes: int
) -> int:
    """Room for `max_num_seqs` sequences of 2048 tokens (or the context, if that is shorter) or one
    sequence of full context, whichever is more; at most a quarter of `free_bytes`."""
    per_seq = min(context_len, 2048)
    tokens = max(max_num_seqs * per_seq, context_len)
    blocks = -(-tokens // block_size)
    return min(blocks * block_size * kv_bytes_per_token, free_bytes // 4)
