"""The pool of blocks: which block is taken next, and which block a key leads to."""

from __future__ import annotations

from penstock.generation.blocks.block_pool import BlockPool


def test_the_least_recently_used_block_is_taken_first_and_one_without_a_key_before_it() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3] and pool.num_free == 0
    for block in (blocks[2], blocks[0]):
        assert pool.set_key(block, bytes([block]), 16)
        pool.disown(block)
    pool.disown(blocks[3])  # nobody can find what it has
    assert [pool.take() for _ in range(3)] == [blocks[3], blocks[2], blocks[0]]
    assert pool.find(bytes([blocks[2]])) is None


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.set_key(block, b"key", 5)
    pool.disown(block)
    assert pool.find(b"key") == block and pool.num_free == 2
    pool.own(block)
    pool.own(block)
    assert pool.num_owners[block] == 2 and pool.num_free == 1 and pool.num_keyed_tokens(block) == 5
    pool.disown(block)
    assert pool.num_free == 1, "one owner is left"
    pool.disown(block)
    assert pool.take() != block, "a block without a key is taken before"
    assert pool.take() == block and pool.find(b"key") is None


def test_a_key_leads_to_one_block_and_a_shared_block_keeps_its_key() -> None:
    pool = BlockPool(3)
    one, other = pool.take(), pool.take()
    assert pool.set_key(one, b"a", 16) and not pool.set_key(other, b"a", 16)
    pool.own(one)
    assert not pool.set_key(one, b"b", 16) and pool.find(b"a") == one
    pool.disown(one)
    assert pool.set_key(one, b"b", 16)
    assert (pool.find(b"a"), pool.find(b"b")) == (None, one)
    pool.drop_key(one)
    assert pool.find(b"b") is None and pool.num_owners[one] == 1
