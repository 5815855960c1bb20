"""CudaLauncher: the compiled kernels of the .cu files in a GPU, launched through the driver by ctypes."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor

from penstock.errors import ConfigError

#: Rows of a block of attention, for few rows and for many, by the most dimensions per head that the
#: block has room for.
HEIGHTS = {64: (8, 32), 128: (8, 32), 256: (4, 8)}
#: Threads of a block of most kernels.
THREADS = 256

#: The kernels' parameters: a letter for the type of each, Pointer, Number (64 bits), Int (32 bits) or Float.
_LINEAR = "PPIIPPPPIIPI"
_GROUPED = "PPPIIPPPPPPIIIIIIIIPIIPI"
_ATTENTION = "PNPPIIIIIPIPPPIFFIIPPIIPPPPI"
_SEQUENCES = "PPPPPP"
SIGNATURES: dict[str, str] = {
    "fetch": "PIIPN",
    "rms_norm": "PNIPFFP",
    "layer_norm": "PNIPPFP",
    "activation": "PNIIIP",
    "router_logits": "PNIPPIP",
    "router_scores": "PII",
    "rope": "PNIIIPPI",
    "write_kv": "PNPNPPPIIII",
    "write_kv_int8": "PNPNPPPIII",
    "quantize_1": "PNIIPP",
    "quantize_2": "PNIIPP",
    "combine_1": "PIIPIPPIPI",
    "combine_2": "PIIPIPPIPI",
    "merge_splits": "PIIIPPPIIIPP",
    "attention_latent": "PNPIIIIPIPPPIFFIIPPPII",
    **{
        f"attention_{width}_{height}{form}": _ATTENTION
        for width, heights in HEIGHTS.items()
        for height in heights
        for form in ("", "_int8")
    },
    "short_conv": "PNIPPIPP" + _SEQUENCES,
    **{
        f"recurrence_{dim}": "PNPNPNPPPPIIII" + _SEQUENCES
        for dim in (64, 128, 256, "any", "channels_128", "channels_any")
    },
    "join_planes": "PPIIP",
    **{f"gemv_{tokens}_{parts}": _LINEAR for tokens in (1, 2, 4, 8, "any") for parts in (1, 2)},
    **{f"{form}_quantize_{parts}": "PNPIIIPPP" for form in ("codes", "groups") for parts in (1, 2)},
    **{
        f"{form}_{kind}_{parts}": _GROUPED
        for form in ("codes", "groups", "plane_groups")
        for kind in ("gemv_1", "gemv_2", "gemv_4", "tiled")
        for parts in (1, 2)
    },
    **{f"tiled_{height}_{parts}": _LINEAR for height in (4, 8, "any") for parts in (1, 2)},
    **{
        f"planes_{kind}_{parts}": _LINEAR
        for kind in ("gemv_1", "gemv_2", "gemv_4", "gemv_8", "tiled_4", "tiled_8")
        for parts in (1, 2)
    },
}
#: The same types for struct.
_FORMATS = {"P": "P", "N": "q", "I": "i", "F": "f"}
_TYPES = {"P": ctypes.c_void_p, "N": ctypes.c_int64, "I": ctypes.c_int, "F": ctypes.c_float}
_NUMBERS = frozenset((int, float, bool))


class Open:
    """Stands for an argument that each launch of a prepared kernel gives anew."""


OPEN = Open()
#: A prepared launch; its arguments are those that were left open: tensors, None or numbers.
Prepared = Callable[..., None]


def ceil_div(number: int, unit: int) -> int:
    """How many blocks of `unit` cover `number`."""
    return -(-number // unit)


class Launcher(Protocol):
    """The compiled kernels on a device."""

    num_multiprocessors: int
    #: Tensor cores for INT8, which torch's product uses.
    has_tensor_cores: bool

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        """Queue a kernel. `values` are tensors, None or numbers, in the order of SIGNATURES. A number in
        place of a tensor is an address."""

    def prepare(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> Prepared:
        """launch() for a kernel that is queued again and again with the same values but for those that are
        OPEN. What is prepared keeps the tensors among `values`."""


class Arguments:
    """A kernel's arguments as C values side by side, in memory that every launch of the kernel uses anew."""

    def __init__(self, kinds: str) -> None:
        """`kinds`: the types, as in SIGNATURES."""
        self._kinds = kinds
        formats = [_FORMATS[kind] for kind in kinds]
        packed = struct.Struct("@" + "".join(formats))
        self._values = ctypes.create_string_buffer(packed.size)
        begin = ctypes.addressof(self._values)
        ends = (struct.calcsize("@" + "".join(formats[: n + 1])) for n in range(len(formats)))
        self._addresses = [
            begin + end - struct.calcsize(each) for each, end in zip(formats, ends, strict=True)
        ]
        #: The array of pointers to the values that cuLaunchKernel takes.
        self.pointers = (ctypes.c_void_p * len(formats))(*self._addresses)
        self._pack = partial(packed.pack_into, self._values, 0)

    def fill(self, values: Sequence[Any]) -> None:
        """`values` are tensors, None or numbers. Raises struct.error if they are not those of the types."""
        # As _number(), without a call for each.
        self._pack(
            *[
                value if value.__class__ in _NUMBERS else 0 if value is None else value.data_ptr()
                for value in values
            ]
        )

    def place(self, index: int) -> Any:
        """One of the values, as a C value that may be changed."""
        return _TYPES[self._kinds[index]].from_address(self._addresses[index])


def _number(value: Any) -> float:
    """Of a tensor its address. (Asking a tensor's class takes longer than asking a number's.)"""
    if value.__class__ in _NUMBERS:
        return cast(float, value)
    return 0 if value is None else value.data_ptr()


def stream_query() -> Callable[[int], int]:
    """What tells the handle of a device's current stream: torch's short way, which makes no object, where
    this torch has one."""
    long_way: Callable[[int], int] = lambda index: torch.cuda.current_stream(index).cuda_stream  # noqa: E731
    return getattr(torch._C, "_cuda_getCurrentRawStream", long_way)


class CudaLauncher:
    """The kernels in a GPU's primary context, which torch uses too. They run on torch's current stream."""

    def __init__(self, device: torch.device, image: bytes) -> None:
        """`image` is what nvrtc.py compiled for this device. The image stays loaded as long as the process
        lives. Raises ConfigError if the driver refuses the image."""
        self._device = torch.device("cuda", device.index or 0)
        properties = torch.cuda.get_device_properties(self._device)
        self.num_multiprocessors = properties.multi_processor_count
        self.has_tensor_cores = (properties.major, properties.minor) >= (7, 5)
        self._driver = ctypes.CDLL("libcuda.so.1")
        # A step has a thousand launches, and each look-up of an attribute takes its time.
        self._set_context, self._launch = self._driver.cuCtxSetCurrent, self._driver.cuLaunchKernel
        self._index = self._device.index
        self._context = ctypes.c_void_p()
        self._functions = {name: ctypes.c_void_p() for name in SIGNATURES}
        self._arguments = {name: Arguments(kinds) for name, kinds in SIGNATURES.items()}
        #: From filling the arguments until the driver has copied them.
        self._lock = threading.Lock()
        self._current_stream = stream_query()
        self._streams = dict[int, ctypes.c_void_p]()
        try:
            self._load(image)
        except RuntimeError as error:
            raise ConfigError(
                f"{error}: the driver can't run our kernels. Install a newer one, or choose --kernels torch"
            ) from error

    def _load(self, image: bytes) -> None:
        handle, module = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), self._device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        for name, function in self._functions.items():
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        """Raises RuntimeError, as torch does, for every error that the device has had until now."""
        if 0 in grid:
            return
        x, y, z = (*grid, 1, 1)[:3]
        function, arguments = self._functions[name], self._arguments[name]
        stream = self._stream()
        with self._lock:
            arguments.fill(values)
            code = self._set_context(self._context)  # each thread has a current context of its own
            code = code or self._launch(
                function, x, y, z, num_threads, 1, 1, 0, stream, arguments.pointers, None
            )
        if code:
            self._fail(f"the launch of {name}", code)

    def prepare(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> Prepared:
        arguments = Arguments(SIGNATURES[name])
        arguments.fill([None if value is OPEN else value for value in values])
        places = [arguments.place(n) for n, value in enumerate(values) if value is OPEN]
        kept = [value for value in values if isinstance(value, Tensor)]
        queue = partial(self._launch, self._functions[name], *(*grid, 1, 1)[:3], num_threads, 1, 1, 0)
        lock, set_context, context = self._lock, self._set_context, self._context
        stream, pointers, is_empty = self._stream, arguments.pointers, 0 in grid

        def launch(*given: Any, _kept: object = (kept, arguments)) -> None:
            if is_empty:
                return
            with lock:
                for place, value in zip(places, given, strict=True):
                    place.value = _number(value)
                code = set_context(context) or queue(stream(), pointers, None)
            if code:
                self._fail(f"the launch of {name}", code)

        return launch

    def _stream(self) -> ctypes.c_void_p:
        """Torch's current stream, which is nearly always the same."""
        handle = self._current_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = ctypes.c_void_p(handle)
        return stream

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> NoReturn:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {name} failed: {(text.value or b'?').decode()} (error {code})")
