"""LoadedAdapters: the adapters that requests may have, by their names, within a budget."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError, WrongTensor
from penstock.kernels import LowRank, LowRankPart
from penstock.memory.direct_io import aligned_buffer
from penstock.weights.adapters.targets import Target, Targets

if TYPE_CHECKING:
    from penstock.weights.adapters.adapter import Adapter
    from penstock.weights.adapters.adapter_folder import AdapterFolder

logger = logging.getLogger(__name__)

#: The shares of each layer's matrices, by stack and number of the layer.
Layers = dict[tuple[str, int], dict[str, LowRank]]
#: A module's B of some outputs, with the place of the module's ranks among those of the matrix.
_Piece = tuple[torch.Tensor, int, Target]


def with_adapter_bytes(config: EngineConfig) -> EngineConfig:
    """The config with the bytes of its adapters, if it leaves them open. Raises kinds of CheckpointError, and
    CapacityError if the adapters don't fit into the bytes that it says."""
    if not config.adapters:
        return replace(config, adapter_bytes=config.adapter_bytes or 0)
    from penstock.weights.adapters.adapter_folder import AdapterFolder

    folders = (AdapterFolder.open(Path(folder)) for _, folder in config.adapters)
    needed = sum(folder.num_bytes for folder in folders)
    if config.adapter_bytes is not None and needed > config.adapter_bytes:
        raise CapacityError(
            f"the adapters take {needed} bytes, and --lora-memory has {config.adapter_bytes}: raise it"
        )
    return replace(config, adapter_bytes=needed if config.adapter_bytes is None else config.adapter_bytes)


class LoadedAdapters:
    """Any thread may call. The bytes of an adapter that was unloaded are free when the last request that has
    it has ended."""

    def __init__(self, find_targets: Callable[[], Targets], budget_bytes: int) -> None:
        """find_targets() may take a while, and is called for the first adapter."""
        self._find_targets = find_targets
        self._targets: Targets | None = None
        self.budget_bytes = budget_bytes
        #: Bytes of all adapters in memory.
        self.used_bytes = 0
        self._adapters: Mapping[str, Adapter] = {}
        self._loading = threading.Lock()
        self._counting = threading.Lock()

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        """The adapters that new requests may have, in the order in which they were loaded."""
        return self._adapters

    def load(self, name: str, folder: str | Path, *, replaces: bool = False) -> Adapter:
        """Read a folder, which takes about as long as its file takes to be read. `replaces`: the name may be
        that of an adapter, which no new request gets then. Raises ConfigError for a name that is taken,
        CapacityError if the budget has no room, and kinds of CheckpointError."""
        from penstock.weights.adapters.adapter import Adapter
        from penstock.weights.adapters.adapter_folder import AdapterFolder

        with self._loading:
            if not name or (name in self._adapters and not replaces):
                raise ConfigError(f"there is an adapter {name!r} already; unload it, or take another name")
            opened = AdapterFolder.open(Path(folder))
            self._require_room(opened)
            if self._targets is None:
                self._targets = self._find_targets()
            adapter = Adapter(name, str(folder), _layers(opened, self._targets))
            digest = adapter.digest  # takes a while, and the engine's thread shall not wait for it
            self._count(adapter.num_bytes)
            weakref.finalize(adapter, self._count, -adapter.num_bytes)
            self._adapters = {**self._adapters, name: adapter}
        logger.info("adapter %s: %d bytes of %s (%s)", name, adapter.num_bytes, folder, digest.hex()[:12])
        return adapter

    def unload(self, name: str) -> Adapter:
        """No new request gets the adapter; those that have it go on. Raises ConfigError."""
        with self._loading:
            if name not in self._adapters:
                raise ConfigError(f"there is no adapter {name!r}")
            adapter = self._adapters[name]
            self._adapters = {other: each for other, each in self._adapters.items() if other != name}
        return adapter

    def _require_room(self, opened: AdapterFolder) -> None:
        if self.used_bytes + opened.num_bytes > self.budget_bytes:
            raise CapacityError(
                f"the adapter of {opened.folder} takes {opened.num_bytes} bytes, and adapters have "
                f"{self.used_bytes} of {self.budget_bytes} bytes: unload one (the bytes are free when its "
                "last request has ended), or raise --lora-memory"
            )

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.used_bytes += num_bytes


def _layers(opened: AdapterFolder, targets: Targets) -> Layers:
    """The shares of each layer. Raises kinds of CheckpointError."""
    factors: dict[tuple[str, int, str], list[torch.Tensor]] = defaultdict(list)
    scales: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    pieces: dict[tuple[str, int, str], list[_Piece]] = defaultdict(list)
    for module in opened.modules:
        found = targets.find(module)
        _check_shapes(opened, module, found)
        a, b = opened.read(module)
        rows = dict(zip(found, torch.split(b, [target.num_outputs for target in found]), strict=True))
        for key in dict.fromkeys(target[:3] for target in found):
            first_rank = len(scales[key])
            factors[key].append(a)
            scales[key] += [opened.config.scale_of(module)] * len(a)
            pieces[key] += [(rows[target], first_rank, target) for target in found if target[:3] == key]
    layers: Layers = defaultdict(dict)
    for (stack, layer, matrix), own in pieces.items():
        key = stack, layer, matrix
        parts = tuple(LowRankPart.of(b, first_rank, target.first_output) for b, first_rank, target in own)
        share = LowRank.of(torch.cat(factors[key]), torch.tensor(scales[key]), parts)
        layers[stack, layer][matrix] = share
    return side_by_side(layers)


def side_by_side(layers: Layers) -> Layers:
    """The same shares in one buffer, in the order in which a step reads them: with huge pages, a step waits
    for fewer look-ups of addresses."""
    from penstock.weights.adapters.adapter_folder import ALIGNMENT

    sizes = [
        tensor.nbytes for layer in layers.values() for share in layer.values() for tensor in share.arrays
    ]
    buffer = aligned_buffer(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    end = 0

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal end
        start, end = end, end + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return {
        place: {name: share.map(moved) for name, share in layer.items()} for place, layer in layers.items()
    }


def _check_shapes(opened: AdapterFolder, module: str, found: list[Target]) -> None:
    """Raises WrongTensor."""
    factors = opened.modules[module]
    inputs, outputs = factors.a.shape[1], factors.b.shape[0]
    expected = found[0].num_inputs, sum(target.num_outputs for target in found)
    if (inputs, outputs) != expected:
        raise WrongTensor(
            f"{opened.folder}: the adapter of {module} has {inputs} inputs and {outputs} outputs, and this "
            f"model's module has {expected[0]} and {expected[1]}: the adapter belongs to another model"
        )
