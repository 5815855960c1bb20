"""PretendedCard: an NVIDIA card for a torch that knows no CUDA, for as long as pretend() lasts.

What the engine calls is there: torch's operators (on tensors that say they are on cuda:0), torch.cuda's
streams and events, libcuda through ctypes with the emulated kernels behind it. Not pretended: time, NVRTC
(test_nvrtc.py has the real one), and how memory is cut to pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import emulated_cuda
import torch
from compiled import compiled
from torch import Tensor
from torch.cuda import _sanitizer

from penstock.memory.cuda_inlet import _Half
from penstock.memory.direct_io import DirectReader
from penstock.weights.tiers.arrivals import Arrivals
from pretended_card.driver import Driver
from pretended_card.memory import CardMemory
from pretended_card.races import Race, Races
from pretended_card.streams import CurrentDevice, CurrentStream, Event, Stream
from pretended_card.tensors import CardTensor, blank

GIB = 1 << 30
NAME = "Pretended GTX 1060"
#: The name of the cards that are somebody else's.
OTHER_NAME = "Pretended GTX 1080"
#: The handle of streams on which the pretended driver launches nothing.
NO_LAUNCHES = 0x1000
#: The race detector keeps a stack trace of each access, which takes as long as all the rest of it.
NO_TRACES = SimpleNamespace(
    walk_stack=lambda frame: (), StackSummary=SimpleNamespace(extract=lambda frames, lookup_lines: [])
)


class PretendedCard:
    """One of `num_cards` cards. The others have names, and whoever uses one of them meets an error."""

    def __init__(
        self, capability: tuple[int, int], total_bytes: int, number: int = 0, num_cards: int = 1
    ) -> None:
        self.device = torch.device("cuda", number)
        self.num_cards = num_cards
        self.current_device = CurrentDevice()
        #: Uses of other cards, in case whoever met the error swallowed it.
        self.strayed: list[str] = []
        self.capability = capability
        self.memory = CardMemory(total_bytes)
        self.races = Races()
        self.driver = Driver(emulated_cuda.library(), self)
        self.default_stream = Stream(self.races, self.driver.fake_stream(), self.device, is_default=True)
        self.current_stream = CurrentStream(self)
        self._streams = [self.default_stream]
        #: How much of a stream comes up to its last function of the host.
        self._functions: dict[Stream, int] = {}
        #: Copies out of the host's memory: first address, the one after the last, the stream, and how much of
        #: the stream has run after the copy.
        self._copied_from: list[tuple[int, int, Stream, int]] = []
        #: Why the host waited for the card, each time.
        self.host_waits: list[str] = []
        #: A machine without a driver, or a container without the card, has none.
        self.is_there = True

    def wrap(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.memory.add(value.untyped_storage()):
            self.races.on_allocation(value.untyped_storage(), self.current_stream.of_card().stream_id)
        self.driver.fake_use_of_torch()
        return CardTensor(value, self)

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.driver.is_registered(tensor.data_ptr(), tensor.nbytes)

    def enqueue_copy(self, source: Tensor, target: CardTensor) -> None:
        """From the host."""
        stream = self.current_stream.of_card()
        if stream.is_default:
            self.races.on_use([target.data_ptr()], stream.stream_id, "a small copy")
        else:
            self.races.on_copy(target, stream.stream_id)
            if self.is_pinned(source):
                self._on_host_read(source, stream)
        stream.enqueue(lambda: target.inner.copy_(source))

    def enqueue_copy_to_host(self, source: CardTensor, target: Tensor) -> Tensor:
        """On a stream beside the one that computes: what computes has to come before it."""
        stream = self.current_stream.of_card()
        assert stream.all_before().get(self.default_stream, -1) == self.default_stream.num_queued, (
            "the copy to the host does not wait for what computes"
        )
        stream.enqueue(lambda: target.copy_(source.inner))
        if not self.is_pinned(target):
            self.host_waits.append("a copy to memory that is not pinned")
            stream.synchronize()
        return target

    def launch_on_host(self, handle: int, function: Callable[[], None]) -> int:
        """cuLaunchHostFunc: as late as allowed."""
        stream = self._stream_of(handle)
        stream.enqueue(functools.partial(self._call_on_host, function))
        self._functions[stream] = stream.num_queued
        return 0

    def go_on(self) -> None:
        """A thread of the host waits for memory, which a function of the host may give back. A stream comes
        to its functions even if nobody waits for the stream."""
        for stream, until in list(self._functions.items()):
            if not stream.has_run(until):
                run = torch.inference_mode()(stream.run)  # as the thread that has queued it
                threading.Thread(target=run, args=(until,), daemon=True).start()

    def enqueue_wait(self, handle: int, address: int, value: int) -> int:
        """cuStreamWaitValue32 with a stream that does not compute. Whoever writes the value needs no lock."""
        self._stream_of(handle).enqueue(lambda: self.wait_for_value(address, value))
        return 0

    def wait_for_value(self, address: int, value: int) -> None:
        self.driver.fake_late_write()
        written = ctypes.c_uint32.from_address(address)
        while ctypes.c_int32(written.value - value).value < 0:
            time.sleep(0)

    def _stream_of(self, handle: int) -> Stream:
        return next(each for each in self._streams if each.cuda_stream == handle)

    def _call_on_host(self, function: Callable[[], None]) -> None:
        """On a thread that may need what others hold, who may need the card meanwhile."""
        changed, ended = self.races.changed, threading.Event()
        failures = list[BaseException]()

        def call() -> None:
            try:
                function()
            except BaseException as error:
                failures.append(error)
            with changed:
                ended.set()
                changed.notify_all()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        changed.wait_for(ended.is_set)
        thread.join()  # which has the function, and what belongs to it
        for failure in failures:
            raise failure

    def _on_host_read(self, source: Tensor, stream: Stream) -> None:
        begin = source.data_ptr()
        with self.races.lock:
            self._copied_from.append((begin, begin + source.nbytes, stream, stream.num_queued + 1))

    def on_fetch(self, begin: int, num_bytes: int) -> None:
        """A kernel that was just queued reads memory that may be the host's."""
        stream = self.current_stream.of_card()
        with self.races.lock:
            if self.driver.is_registered(begin, num_bytes):
                self._copied_from.append((begin, begin + num_bytes, stream, stream.num_queued))

    def on_host_write(self, begin: int, num_bytes: int) -> None:
        """The host writes to its own memory, which a copy may still read. Only a wait of the host puts the
        two in order, however late either of them comes."""
        with self.races.lock:
            self._copied_from = [copy for copy in self._copied_from if copy[2].num_known < copy[3]]
            for first, end, _, _ in self._copied_from:
                if first < begin + num_bytes and begin < end:
                    self.races.found.append(Race("the host does not wait for a copy out of its memory"))

    def on_use(self, addresses: Iterable[int], name: str) -> None:
        """A kernel or operation begins."""
        stream = self.current_stream.of_card()
        stream.num_queued += stream.is_default
        assert stream.is_default, f"{name}: only copies to the card are modelled on other streams"
        self.races.on_use(addresses, stream.stream_id, name)

    def wait_for_host(self, reason: str) -> None:
        self.host_waits.append(reason)
        self.current_stream.of_card().synchronize()

    def number_of(self, device: object) -> int:
        """As torch understands it: without a number, the thread's current device."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index  # type: ignore[call-overload]
        return self.current_device.number if index is None else int(index)

    def check_own(self, device: object, what: str) -> None:
        """Raises AssertionError for a use of another card."""
        if (number := self.number_of(device)) != self.device.index:
            self.strayed.append(f"{what} on cuda:{number} in place of {self.device}")
            raise AssertionError(self.strayed[-1])

    def make_stream(self, device: object = None) -> Stream:
        self.check_own(device, "a stream")
        self.driver.fake_use_of_torch()
        self._streams.append(Stream(self.races, NO_LAUNCHES + len(self._streams), self.device))
        return self._streams[-1]

    def synchronize(self, device: object = None) -> None:
        self.check_own(device, "a wait")
        for stream in self._streams:
            stream.synchronize()

    def empty(
        self, size: list[int], *, dtype: torch.dtype | None = None, device: object = None, **_: Any
    ) -> Tensor:
        self.check_own(device, "an allocation")
        wrapped: Tensor = self.wrap(blank(torch.empty(size, dtype=dtype, device="cpu")))
        return wrapped

    def empty_strided(
        self,
        size: list[int],
        stride: list[int],
        *,
        dtype: torch.dtype | None = None,
        device: object = None,
        **_: Any,
    ) -> Tensor:
        self.check_own(device, "an allocation")
        wrapped: Tensor = self.wrap(blank(torch.empty_strided(size, stride, dtype=dtype, device="cpu")))
        return wrapped

    def arange(
        self, end: int, *, dtype: torch.dtype | None = None, device: object = None, **_: Any
    ) -> Tensor:
        """torch's own makes a tensor without elements, which then grows where nobody sees it."""
        self.check_own(device, "an allocation")
        wrapped: Tensor = self.wrap(torch.arange(end, dtype=dtype, device="cpu"))
        return wrapped

    def torch_cuda(self) -> dict[str, Any]:
        """What stands in torch.cuda instead."""
        memory = self.memory
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: self.is_there,
            "device_count": lambda: self.num_cards if self.is_there else 0,
            "device": self.current_device.set,
            "get_device_name": lambda device=None: self._properties(device).name,
            "get_device_capability": lambda device=None: self._capability(device),
            "get_device_properties": self._properties,
            "Stream": self.make_stream,
            "Event": functools.partial(Event, self.races),
            "stream": self.current_stream.set,
            "current_stream": self.current_stream.get,
            "default_stream": self._own("a stream", lambda: self.default_stream),
            "synchronize": self.synchronize,
            "mem_get_info": self._own("a question", lambda: (memory.free_bytes, memory.total_bytes)),
            "memory_reserved": self._own("a question", lambda: memory.reserved_bytes),
            "max_memory_reserved": self._own("a question", lambda: memory.peak_bytes),
            "memory_allocated": self._own("a question", lambda: memory.used_bytes),
            "reset_peak_memory_stats": self._own("a change", memory.reset_peak),
            "empty_cache": memory.empty_cache,
            "set_per_process_memory_fraction": self._limit,
        }

    def _own(self, what: str, answer: Callable[[], Any]) -> Callable[..., Any]:
        """A function of torch.cuda that takes a device and touches it."""

        def function(device: object = None) -> Any:
            self.check_own(device, what)
            return answer()

        return function

    def _properties(self, device: object = None) -> SimpleNamespace:
        """Of any card: nothing is touched by asking for them."""
        number = self.number_of(device)
        assert 0 <= number < self.num_cards, f"Invalid device id: {number}"
        is_own, (major, minor) = number == self.device.index, self.capability
        return SimpleNamespace(
            name=NAME if is_own else OTHER_NAME,
            uuid=f"GPU-{number}",
            major=major,
            minor=minor if is_own else 9,
            multi_processor_count=10 if is_own else 99,
            total_memory=self.memory.total_bytes,
        )

    def _capability(self, device: object) -> tuple[int, int]:
        properties = self._properties(device)
        return properties.major, properties.minor

    def _limit(self, fraction: float, device: object = None) -> None:
        self.check_own(device, "a limit")
        self.memory.limit_bytes = int(fraction * self.memory.total_bytes)


def missing() -> str | None:
    """Why no card can be pretended here."""
    if emulated_cuda.COMPILER is None:
        return "no C++ compiler to run the CUDA sources with"
    return "this torch has CUDA" if torch.version.cuda else None


@contextlib.contextmanager
def pretend(
    capability: tuple[int, int] = (6, 1), total_bytes: int = 6 * GIB, number: int = 0, num_cards: int = 1
) -> Iterator[PretendedCard]:
    """One at a time, with the number `number` of `num_cards`."""
    _build_guard()
    card = PretendedCard(capability, total_bytes, number, num_cards)
    factories = torch.library.Library("aten", "IMPL")
    try:
        factories.impl("empty.memory_format", card.empty, "CUDA")
        factories.impl("empty_strided", card.empty_strided, "CUDA")
        factories.impl("arange", card.arange, "CUDA")
        with contextlib.ExitStack() as patches:
            patches.enter_context(patch.multiple(torch.cuda, **card.torch_cuda()))
            patches.enter_context(patch.object(_sanitizer, "traceback", NO_TRACES))
            patches.enter_context(patch.object(torch.version, "cuda", "12.6"))
            patches.enter_context(patch.object(torch, "tensor", _tensor(torch.tensor)))
            patches.enter_context(patch.object(Tensor, "new_tensor", _new_tensor))
            patches.enter_context(patch.object(ctypes, "CDLL", _with_driver(card.driver, ctypes.CDLL)))
            patches.enter_context(patch.object(DirectReader, "submit", _told(card, DirectReader.submit)))
            patches.enter_context(patch.object(_Half, "write", _told_of_half(card, _Half.write)))
            patches.enter_context(patch.object(Arrivals, "wait", _going_on(card, Arrivals.wait)))
            yield card
    finally:
        factories._destroy()


# These two would fill a tensor in C++, past everything that is in Python.


def _tensor(make: Any) -> Any:
    def tensor(*values: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made: Tensor = make(*values, **kwargs)
        return made if device is None else made.to(device)

    return tensor


def _new_tensor(self: Tensor, value: Any, **kwargs: Any) -> Tensor:
    return torch.tensor(value, **({"dtype": self.dtype, "device": self.device} | kwargs))


def _told(card: PretendedCard, submit: Any) -> Any:
    def told(self: DirectReader, path: Path, offset: int, num_bytes: int, target: Tensor) -> Any:
        card.on_host_write(target.data_ptr(), num_bytes)
        return submit(self, path, offset, num_bytes, target)

    return told


def _told_of_half(card: PretendedCard, write: Any) -> Any:
    def told(self: _Half, tensor: Tensor, offset: int) -> None:
        card.on_host_write(self.address + offset, tensor.nbytes)
        write(self, tensor, offset)

    return told


def _going_on(card: PretendedCard, wait: Any) -> Any:
    def going_on(self: Arrivals) -> None:
        card.go_on()
        wait(self)

    return going_on


def _with_driver(driver: Driver, load: Any) -> Any:
    return lambda name, *rest, **kwargs: driver if name == "libcuda.so.1" else load(name, *rest, **kwargs)


@functools.cache
def _build_guard() -> None:
    """For good: it does nothing where nobody asks for a card."""
    root = Path(torch.__file__).parent
    command = [str(emulated_cuda.COMPILER), "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
    text = Path(__file__).with_name("guard.cpp").read_text()
    # The source comes last, and the linker would leave out a library that nobody has asked for by then.
    command += ["-Wl,--no-as-needed", f"-L{root / 'lib'}", "-lc10"]
    ctypes.CDLL(str(compiled(command, text, ".cpp")))
