"""Keys of blocks, against one hash of everything before them."""

from __future__ import annotations

import hashlib
import random
import struct

from penstock.generation.blocks.block_keys import full_key, tail_key
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence

SIZE = 16


def sequence(prompt: list[int], salt: str = "", rope_length: int = 0) -> Sequence:
    request = GenerationRequest(prompt, SamplingParams(), cache_salt=salt)
    made = Sequence(0, request, len(prompt) + 100)
    made.follow_length(rope_length)
    return made


def plain_key(salt: str, rope_length: int, token_ids: list[int]) -> bytes:
    """The chain, block after block."""
    key = hashlib.sha256(salt.encode()).digest()
    pieces = [[rope_length]] if rope_length else []
    pieces += [token_ids[start : start + SIZE] for start in range(0, len(token_ids), SIZE)]
    for piece in pieces:
        key = hashlib.sha256(key + struct.pack(f"<{len(piece)}q", *piece)).digest()
    return key


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_block() -> None:
    tokens = [random.Random(0).randrange(1000) for _ in range(40)]
    for salt, rope_length in (("", 0), ("a", 0), ("", 30)):
        seq = sequence(tokens, salt, rope_length)
        assert tail_key(seq, SIZE) == plain_key(salt, rope_length, tokens)
        for index in (1, 0):
            whole = tokens[: (index + 1) * SIZE]
            assert full_key(seq, index, seq.token_ids, SIZE) == plain_key(salt, rope_length, whole)


def test_tokens_that_are_not_appended_yet_have_keys_as_well() -> None:
    seq = sequence(list(range(20)))
    for token_id in (5, 6):
        seq.append(token_id)
    token_ids = [*seq.token_ids, *range(50, 60)]
    assert full_key(seq, 1, token_ids, SIZE) == plain_key("", 0, token_ids[:32])


def test_a_prompt_shorter_than_a_block_has_a_key() -> None:
    assert tail_key(sequence([1, 2]), SIZE) == plain_key("", 0, [1, 2])
