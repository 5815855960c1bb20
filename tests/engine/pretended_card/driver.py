"""Driver: libcuda.so.1 of the pretended card. Its functions are those of fake_cuda_driver.h; it looks at what
is launched before that is."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretended_card.card import PretendedCard

OUT_OF_MEMORY = 2
#: What C calls where another stream than the one that computes is to wait for a value.
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)


class Driver:
    """Attributes that are not here are the C functions themselves."""

    def __init__(self, library: ctypes.CDLL, card: PretendedCard) -> None:
        library.fake_stream.restype = ctypes.c_void_p
        for name in ("fake_kernel_name", "fake_kernel_kinds"):
            getattr(library, name).restype = ctypes.c_char_p
        library.fake_reset(card.device.index, card.num_cards)
        self._wait = _WAIT(card.enqueue_wait)
        library.fake_waits_elsewhere(self._wait)
        self._library = library
        self._card = card
        self.refuses_to_pin = False
        self.num_launches: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> int:
        name: str = self._library.fake_kernel_name(function).decode()
        kinds: str = self._library.fake_kernel_kinds(function).decode()
        pointers = arguments[8]
        assert len(pointers) == len(kinds), name
        given = {
            n: ctypes.c_void_p.from_address(pointers[n]).value for n, kind in enumerate(kinds) if kind == "P"
        }
        addresses = {n: address for n, address in given.items() if address}
        for n, address in addresses.items():
            is_there = self._card.memory.holds(address) or self.is_registered(address, 4)
            assert is_there, f"argument {n} of {name} is where the card does not see it"
        self._card.on_use(addresses.values(), name)
        if name == "fetch":
            num_bytes = 4 * ctypes.c_int.from_address(pointers[1]).value
            self._card.on_fetch(addresses[0], num_bytes)
        self.num_launches[name] = self.num_launches.get(name, 0) + 1
        return int(self._library.cuLaunchKernel(function, *arguments))

    def cuLaunchHostFunc(self, stream: ctypes.c_void_p, function: Any, data: ctypes.c_void_p) -> int:
        assert stream.value is not None
        return self._card.launch_on_host(stream.value, lambda: function(data.value))

    def cuMemHostRegister_v2(self, *arguments: Any) -> int:
        self._card.check_own(None, "pinning")  # in the current context
        return OUT_OF_MEMORY if self.refuses_to_pin else int(self._library.cuMemHostRegister_v2(*arguments))

    def is_registered(self, address: int, num_bytes: int) -> bool:
        return bool(self._library.fake_is_registered(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)))

    @property
    def num_registered(self) -> int:
        return int(self._library.fake_num_registered())
