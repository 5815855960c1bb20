"""CudaLauncher: the compiled kernels of the .cu files in a GPU, launched through the driver by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError

#: Rows of a block of attention, for few rows and for many, by the most dimensions per head that the
#: block has room for.
HEIGHTS = {64: (8, 32), 128: (8, 32), 256: (4, 8)}
#: Threads of a block of most kernels.
THREADS = 256

#: The kernels' parameters: a letter for the type of each, Pointer, Number (64 bits), Int (32 bits) or Float.
_LINEAR = "PPIIPPPPIIP"
_GROUPED = "PPPIIPPPPPPIIIIIIIIPIIP"
_ATTENTION = "PNPPIIIIIPIPPPIFFIIPPIIPPPPI"
SIGNATURES: dict[str, str] = {
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
    "combine_1": "PIIPIPPIP",
    "combine_2": "PIIPIPPIP",
    "merge_splits": "PIIIPPPIIIPP",
    "attention_latent": "PNPIIIIPIPPPIFFIIPPPII",
    **{
        f"attention_{width}_{height}{form}": _ATTENTION
        for width, heights in HEIGHTS.items()
        for height in heights
        for form in ("", "_int8")
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
_C_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "P": ctypes.c_void_p,
    "N": ctypes.c_int64,
    "I": ctypes.c_int,
    "F": ctypes.c_float,
}


def ceil_div(number: int, unit: int) -> int:
    """How many blocks of `unit` cover `number`."""
    return -(-number // unit)


class Launcher(Protocol):
    """The compiled kernels on a device."""

    num_multiprocessors: int
    #: Tensor cores for INT8, which torch's product uses.
    has_tensor_cores: bool

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        """Queue a kernel. `values` are tensors, None or numbers, in the order of SIGNATURES."""


def pack(
    name: str, values: Sequence[object]
) -> tuple[list[ctypes._SimpleCData[Any]], ctypes.Array[ctypes.c_void_p]]:
    """A kernel's arguments as C values, and the array of pointers to them that cuLaunchKernel takes. The
    pointers are valid as long as the values live."""
    kinds = SIGNATURES[name]
    assert len(values) == len(kinds), name
    plain = (value.data_ptr() if isinstance(value, Tensor) else value for value in values)
    cells = [_C_TYPES[kind](value) for kind, value in zip(kinds, plain, strict=True)]
    return cells, (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))


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
        self._context = ctypes.c_void_p()
        self._functions = {name: ctypes.c_void_p() for name in SIGNATURES}
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
        cells, pointers = pack(name, values)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        self._call("cuCtxSetCurrent", self._context)  # each thread has a current context of its own
        self._call(
            "cuLaunchKernel", self._functions[name], x, y, z, num_threads, 1, 1, 0, stream, pointers, None
        )
        del cells  # needed until here: the driver has copied the values

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA: {name} failed: {(text.value or b'?').decode()} (error {code})")
