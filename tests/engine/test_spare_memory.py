"""SpareMemory: what a model left is what the next one gets, and what nobody uses goes back."""

from __future__ import annotations

import numpy as np
import torch

from penstock import Engine, EngineConfig, SamplingParams, SpareMemory
from penstock.memory.host_lane import HostLane
from penstock.memory.pages import PAGE

MIB = 1 << 20


def resident_bytes(address: int, num_bytes: int) -> int:
    """The bytes of this part of the process that lie in memory. The kernel keeps 8 bytes for each page (its
    Documentation/admin-guide/mm/pagemap.rst); bit 63 says that the page is in RAM."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // PAGE * 8)
        entries = np.frombuffer(file.read(num_bytes // PAGE * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE


def test_pages_of_one_who_left_are_lent_again() -> None:
    spare = SpareMemory()
    first, num_ready = spare.take("layers", 8 * MIB)
    address = first.fill_(7).data_ptr()
    assert num_ready == 0 and address % PAGE == 0
    del first
    assert spare.num_bytes == 8 * MIB
    again, num_ready = spare.take("layers", 6 * MIB - 5)
    assert (again.data_ptr(), again.numel(), num_ready) == (address, 6 * MIB, 6 * MIB)
    assert bool((again == 7).all())


def test_what_somebody_looks_at_is_nobody_elses() -> None:
    spare = SpareMemory()
    first = spare.take("layers", MIB).buffer
    view = first[PAGE : 2 * PAGE].view(torch.int8).fill_(3)
    del first
    other = spare.take("layers", MIB).buffer.fill_(9)
    spare.keep(0)
    assert bool((view == 3).all()) and bool((other == 9).all())


def test_a_small_matrix_leaves_the_memory_of_all_layers_alone() -> None:
    spare = SpareMemory()
    first = spare.take("layers", 4 * MIB).buffer.fill_(1)
    del first
    end = spare.take("ends", MIB)
    assert end.num_ready == 0 and end.buffer.numel() == MIB
    assert spare.take("layers", 4 * MIB).num_ready == 3 * MIB  # the other one is the matrix's


def test_a_larger_model_gets_what_is_there_and_the_rest_anew() -> None:
    spare = SpareMemory()
    others = spare.take("ends", MIB).buffer.fill_(8)
    first = spare.take("layers", 2 * MIB).buffer.fill_(1)
    end = spare.take("ends", MIB).buffer.fill_(1)
    del first, end
    larger, num_ready = spare.take("layers", 5 * MIB)
    assert num_ready == 2 * MIB and spare.num_bytes == 0, "fresh memory took the place of the end's"
    assert bool((larger[: 2 * MIB] == 1).all()) and not bool(larger[2 * MIB :].any())
    assert bool((others == 8).all())


def test_what_is_kept_is_no_more_than_was_asked_for() -> None:
    spare = SpareMemory()
    large = spare.take("layers", 64 * MIB).buffer.fill_(1)
    address = large.data_ptr()
    assert resident_bytes(address, 64 * MIB) == 64 * MIB
    del large
    small = spare.take("layers", 16 * MIB).buffer  # the rest of the area stays for the next one
    assert spare.num_bytes == 48 * MIB
    spare.keep(8 * MIB - 1)  # whole pages are given back
    assert spare.num_bytes == 8 * MIB - PAGE
    assert resident_bytes(address, 64 * MIB) <= 24 * MIB - PAGE
    assert bool((small == 1).all())
    del small
    spare.keep(0)
    assert spare.num_bytes == 0 and resident_bytes(address, 64 * MIB) < 8 * MIB  # others may lie there now


def test_fresh_memory_takes_the_place_of_spare_memory() -> None:
    spare = SpareMemory()
    first = spare.take("layers", 8 * MIB).buffer.fill_(1)
    del first
    _end = spare.take("ends", 2 * MIB)
    assert spare.num_bytes == 6 * MIB


def test_keys_and_values_take_the_place_of_spare_memory() -> None:
    spare = SpareMemory()
    first = spare.take("layers", 8 * MIB).buffer.fill_(1)
    del first
    _kv = HostLane(spare).allocate(5 * MIB)
    assert spare.num_bytes == 3 * MIB


def test_nothing_is_lent_for_nothing() -> None:
    assert SpareMemory().take("layers", 0).buffer.numel() == 0


def test_a_model_in_memory_that_another_one_left_says_the_same() -> None:
    spare, config = SpareMemory(), EngineConfig(device="cpu", num_kv_tokens=256)
    answers = []
    for _ in range(2):
        before = spare.num_bytes
        engine = Engine.load("demo", config, spare=spare)
        assert spare.num_bytes < max(1, before), "the second engine has what the first one had"
        prompt = engine.tokenizer.encode("Once upon a time")
        answers.append(engine.generate([prompt], SamplingParams(temperature=0, max_tokens=8))[0].token_ids)
        num_bytes = engine.plan.embedding_bytes
        engine.close()
        del engine
        assert spare.num_bytes > num_bytes
    assert answers[0] == answers[1]
