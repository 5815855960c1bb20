"""The pretended card itself: it refuses what a card refuses, and each seeded fault is caught."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pretended_card import PretendedCard, Race, engines, missing, pretend
from pretended_card.faults import FAULTS, FAULTS_OF_A_SECOND_CARD
from tiny_models import build

from penstock.engine import Completion
from penstock.errors import ConfigError

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    with pretend() as card:
        yield card


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[Completion]]:
    """Folder of four layers, bytes of host memory that hold some of them, and the answers."""
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("model")
    build("Llama", made, num_hidden_layers=4)
    engines.convert_for_streaming(made, folder)
    expected = engines.answer(engines.load(folder, "cpu", kernels="reference"))
    # Two staging slots and three layers that come from disk: a slot is filled again within a sweep.
    return folder, engines.little_host_memory(folder, num_layers=2), expected


def test_a_function_of_the_host_may_need_what_others_hold_who_use_the_card(card: PretendedCard) -> None:
    """As a driver's thread may: arrivals are locked while their reads tell the card of them."""
    stream, lock, has_begun = torch.cuda.Stream(), threading.Lock(), threading.Event()
    order = list[str]()

    def function() -> None:
        has_begun.set()
        with lock:
            order.append("function")

    def use_card() -> None:
        with lock:
            has_begun.wait()
            stream.wait_event(torch.cuda.Event())
            order.append("use")

    card.launch_on_host(stream.cuda_stream, function)
    user, waiting = (threading.Thread(target=each, daemon=True) for each in (use_card, stream.synchronize))
    user.start()
    while not lock.locked():
        time.sleep(0.001)
    waiting.start()
    for thread in (user, waiting):
        thread.join()
    assert order == ["use", "function"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_seeded_faults_are_caught(
    fault: str | None, model: tuple[Path, int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by an error or a wrong answer; and without a fault there is neither."""
    seed, needs_disk = FAULTS[fault] if fault else (lambda _: None, True)
    folder, host_memory_bytes, expected = model
    with engines.card_with_kernels() as card:
        seed(monkeypatch)
        trouble = None
        try:
            engine = engines.load(
                folder, num_resident_layers=1, host_memory_bytes=host_memory_bytes if needs_disk else None
            )
            assert ("disk" in engines.homes(engine)) == needs_disk
            answers = engines.answer(engine)
            assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
            assert card.driver.num_registered == 0
            assert not card.races.found, card.races.found
        except (AssertionError, RuntimeError, ValueError) as error:
            trouble = error
        print(fault, "->", repr(trouble)[:150])
        assert (trouble is not None) == (fault is not None), trouble


@pytest.mark.parametrize("fault", FAULTS_OF_A_SECOND_CARD)
def test_the_first_card_in_place_of_the_second_is_caught(
    fault: str, model: tuple[Path, int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine loads. test_engine_on_a_card.py has the same without a fault."""
    FAULTS_OF_A_SECOND_CARD[fault](monkeypatch)
    named = pytest.raises((AssertionError, ConfigError), match=r"cuda:0 in place of cuda:1|no such device")
    with engines.card_with_kernels(number=1, num_cards=2), named:
        engines.load(model[0], "cuda:1", num_resident_layers=1)


def test_operands_on_two_devices_are_refused(card: PretendedCard) -> None:
    x = torch.ones(3, device="cuda")
    for refused in (lambda: x + torch.ones(3), lambda: torch.ones(3)[torch.tensor([0], device="cuda")]):
        with pytest.raises(RuntimeError, match="two devices"):
            refused()
    assert (x + torch.tensor(1.0))[torch.tensor([0, 2])].tolist() == [2, 2]
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_uses_of_another_card_are_refused() -> None:
    with pretend(number=1, num_cards=2) as card:
        x = torch.ones(3, device="cuda:1")
        context = ctypes.c_void_p()
        for stray in (
            lambda: torch.ones(3, device="cuda"),
            lambda: x.to("cuda:0"),
            lambda: torch.zeros_like(x, device="cuda:0"),
            torch.cuda.Stream,
            torch.cuda.current_stream,
            torch.cuda.synchronize,
            torch.cuda.mem_get_info,
            lambda: torch.cuda.set_per_process_memory_fraction(0.5, 0),
        ):
            with pytest.raises(AssertionError, match=r"on cuda:0 in place of cuda:1"):
                stray()
            assert card.strayed.pop() and not card.strayed
        assert card.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 40)
        with torch.cuda.device(1):
            assert torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info(x.device)[0]
            with ThreadPoolExecutor(1) as thread, pytest.raises(AssertionError, match="in place of"):
                thread.submit(torch.cuda.mem_get_info).result()  # each thread begins with the first card
        assert (x + 1).device == torch.device("cuda:1")


def test_copies_from_pinned_memory_are_as_late_as_allowed(card: PretendedCard) -> None:
    source = torch.zeros(8192, dtype=torch.uint8)
    page = source[-source.data_ptr() % 4096 :][:4096]
    target, link = torch.empty(4096, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    torch.cuda.current_stream().synchronize()

    def copy(value: int) -> int:
        page.fill_(value)
        with torch.cuda.stream(link):
            target.copy_(page, non_blocking=True)
        page.fill_(99)  # too early
        link.synchronize()
        return int(target[0])

    assert copy(1) == 1, "what is not pinned is staged"
    assert card.driver.cuMemHostRegister_v2(ctypes.c_void_p(page.data_ptr()), ctypes.c_size_t(4096), 1) == 0
    assert copy(2) == 99
    with torch.cuda.stream(link):
        target.copy_(page, non_blocking=True)
    with pytest.raises(Race, match="does not wait for a copy"):
        target.add_(1)


def test_threads_pin_at_once(card: PretendedCard) -> None:
    """As an engine does that begins to copy while its last buffers are pinned."""

    def pin(number: int) -> bool:
        card.driver.fake_use_of_torch()
        pages = [ctypes.c_void_p((1000 * number + page) << 13) for page in range(1, 400)]
        pinned = [card.driver.cuMemHostRegister_v2(page, ctypes.c_size_t(64), 1) == 0 for page in pages]
        known = [card.driver.fake_is_registered(page, ctypes.c_size_t(64)) for page in pages]
        return all(pinned + known + [card.driver.cuMemHostUnregister(page) == 0 for page in pages])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(pin, range(1, 9)))
    assert card.driver.num_registered == 0


def test_memory_that_nobody_wrote_looks_like_it(card: PretendedCard) -> None:
    x = torch.zeros(4, device="cuda")
    for made in (torch.empty(4, device="cuda"), x.new_empty(4), torch.empty_like(x)):
        assert made.isnan().all()


def test_what_is_freed_is_reserved_until_the_cache_is_emptied(card: PretendedCard) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free == total
    y = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == free - y.nbytes
    del y
    assert torch.cuda.mem_get_info()[0] == free - (1 << 20) and card.memory.used_bytes == 0
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free
    torch.cuda.set_per_process_memory_fraction(1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")


def test_nothing_is_left_of_a_card() -> None:
    with pretend():
        assert torch.cuda.is_available() and torch.version.cuda
    assert not torch.cuda.is_available() and not torch.version.cuda
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        torch.zeros(1, device="cuda")
