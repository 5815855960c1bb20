"""Block keys: the names by which KV blocks are found. Numbers only.

A key is SHA-256 of a block's tokens and of the key before it. A key therefore stands for all tokens from the
sequence's beginning, and no sequence finds what another prompt wrote. The first key of a chain is made of the
request's cache_salt, of its adapter, of the vectors that stand in place of tokens, and of the length that
rope's frequencies belong to, because other frequencies turn K otherwise. A prompt that is seen both ways has
all its tokens in the first key.
"""

from __future__ import annotations

import hashlib
from array import array

from penstock.generation.sequence import Sequence


def full_key(sequence: Sequence, index: int, token_ids: list[int], block_size: int) -> bytes:
    """The key of the sequence's block `index`, which is full. `token_ids` are the sequence's tokens, and
    perhaps tokens that will be appended next. The sequence keeps the keys of its full blocks."""
    keys = sequence.block_keys
    while len(keys) <= index:
        start = len(keys) * block_size
        before = keys[-1] if keys else _first_key(sequence)
        keys.append(_chain(before, token_ids[start : start + block_size]))
    return keys[index]


def tail_key(sequence: Sequence, block_size: int) -> bytes:
    """The key of the prompt's last block, which is not full."""
    return partial_key(sequence, sequence.num_prompt_tokens, block_size)


def partial_key(sequence: Sequence, num_tokens: int, block_size: int) -> bytes:
    """The key of the block in which the first `num_tokens` tokens of a sequence end, for its part of these
    tokens."""
    token_ids = sequence.token_ids
    index, length = divmod(num_tokens, block_size)
    before = full_key(sequence, index - 1, token_ids, block_size) if index else _first_key(sequence)
    start = index * block_size
    return _chain(before, token_ids[start : start + length])


def encoder_keys(sequence: Sequence, num_blocks: int) -> list[bytes]:
    """The keys of the blocks of an encoded input. Each stands for the whole input, since every token of an
    encoder sees all others."""
    digest = _encoder_digest(sequence)
    return [_chain(digest, [index]) for index in range(num_blocks)]


def _encoder_digest(sequence: Sequence) -> bytes:
    encoder = sequence.encoder
    assert encoder is not None
    if not encoder.digest:
        encoder.digest = _chain(b"encoder" + _salt(sequence), encoder.token_ids)
    return encoder.digest


def _first_key(sequence: Sequence) -> bytes:
    """What the chain of a sequence's keys begins with: a decoder's K and V depend on the encoded input
    too, and those of a prompt that is seen both ways on the whole prompt."""
    first = _salt(sequence) if sequence.encoder is None else _encoder_digest(sequence)
    if sequence.prefix_len:
        first = _chain(b"prefix" + first, sequence.token_ids[: sequence.prefix_len])
    return _chain(first, [sequence.rope_length]) if sequence.rope_length else first


def _salt(sequence: Sequence) -> bytes:
    """Stands for what the ids of the tokens do not say: the request's salt, its adapter and its vectors."""
    request = sequence.request
    salt = hashlib.sha256(request.cache_salt.encode("utf-8", "surrogatepass")).digest()
    if request.adapter is not None:
        salt = hashlib.sha256(b"adapter" + salt + request.adapter.digest).digest()
    if request.prompt_embeds is None:
        return salt
    return hashlib.sha256(b"vectors" + salt + request.prompt_embeds.digest).digest()


def _chain(before: bytes, token_ids: list[int]) -> bytes:
    return hashlib.sha256(before + array("q", token_ids).tobytes()).digest()
