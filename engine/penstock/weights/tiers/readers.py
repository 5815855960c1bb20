"""What fills a tier: StoreReader brings units from files to the host, LinkReader from there to a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from torch import Tensor

from penstock.errors import ConfigError
from penstock.memory.direct_io import DirectReader, aligned_buffer
from penstock.memory.lane import Link
from penstock.memory.reads.ordered_reads import OrderedRead
from penstock.spec import UnitKey
from penstock.weights.file_range import FileRange
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec, UnitLayout
from penstock.weights.tiers.tier import Tier


class StoreReader:
    """Units that lie in a file as in their buffer are read directly, with several reads in flight. The others
    go through the store, one after the other, which quantizes them."""

    def __init__(
        self,
        store: WeightStore,
        num_threads: int = 1,
        direct: DirectReader | None = None,
        allocate_end: Callable[[int], Tensor] = aligned_buffer,
    ) -> None:
        """`num_threads` threads quantize. `allocate_end`: see Lane."""
        self._store = store
        self._num_threads = num_threads
        self._allocate_end = allocate_end
        self._ranges: dict[UnitKey, FileRange | None] = {
            key: store.contiguous_unit(key) for key in store.units
        }
        self._direct = (direct or DirectReader()) if any(self._ranges.values()) else None
        if self._direct is not None:
            self._direct.expect(store.checkpoint.identities)
        #: The ranges of units of which the file has all bytes.
        self._whole = {
            key: found
            for key, found in self._ranges.items()
            if found is not None and _is_whole(store.units[key].layout)
        }
        if direct is not None and self._direct is None:
            direct.close()
        self._thread = ThreadPoolExecutor(1, "penstock-reader")

    def detours(self, keys: Iterable[UnitKey]) -> list[str]:
        """Reasons, for people, why these units do not come straight from the disk."""
        ranges = {key: self._ranges[key] for key in keys}
        folder, found = self._store.checkpoint.folder, []
        if quantized := {key[:2] for key, at in ranges.items() if at is None}:
            num_layers = len({key[:2] for key in self._ranges})
            found.append(
                f"{len(quantized)} of {num_layers} layers do not fit into memory, and {folder} "
                "is not laid out to be streamed: these layers are made from the files' tensors again in each "
                f"step. {self._remedy()}"
            )
        files = {at.file for at in ranges.values() if at is not None}
        if self._direct is not None and not all(map(self._direct.is_direct, files)):
            found.append(
                f"{folder} is on a file system without direct reads: layers come through the page cache, "
                "slower, and push other files out of the cache. Move the folder to a local file system such "
                "as ext4 or xfs"
            )
        return found

    def _remedy(self) -> str:
        """What people can do for layers that are not laid out to be streamed."""
        from penstock.weights.conversion.converted_config import converted_config  # for few models

        try:
            converted_config(self._store)
        except ConfigError as error:
            return f"Only more memory helps, since {error}"
        return "Convert the model once (penstock convert MODEL OUT, or serve it with --convert-to OUT)"

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        found = self._ranges[key]
        if found is None or self._direct is None:
            return self._thread.submit(self._read, key, buffer)
        return _derived(self._direct.submit(*found, buffer), self._store.units[key].layout, buffer)

    def can_order(self, keys: Iterable[UnitKey]) -> bool:
        if self._direct is None:
            return False
        ranges = [self._whole.get(key) for key in keys]
        files = {found.file for found in ranges if found is not None}
        return None not in ranges and self._direct.can_order(files)

    def submit_ordered(self, key: UnitKey, buffer: Tensor) -> OrderedRead:
        assert self._direct is not None, "can_order() comes first"
        return self._direct.order(*self._whole[key], buffer)

    def begin(self, tensors: tuple[TensorSpec, ...]) -> Callable[[], LayerWeights]:
        """Begin to read embedding or head into memory of its own. The function that is returned waits for the
        weights, and raises CheckpointError kinds."""
        found = self._store.contiguous(tensors)
        if found is None or self._direct is None:
            return self._thread.submit(self._store.read_resident, tensors).result
        layout = UnitLayout.of(tensors)
        buffer = self._allocate_end(layout.num_bytes)
        reading = _derived(self._direct.submit(*found, buffer), layout, buffer)

        def wait() -> LayerWeights:
            reading.result()
            return LayerWeights.views(layout, buffer)

        return wait

    def close(self) -> None:
        self._thread.shutdown()
        if self._direct is not None:
            self._direct.close()

    def _read(self, key: UnitKey, buffer: Tensor) -> int:
        before = self._store.bytes_read
        self._store.read_unit(key, buffer, self._num_threads)
        return self._store.bytes_read - before


def _is_whole(layout: UnitLayout) -> bool:
    """Whether files have all arrays."""
    return layout.num_stored_bytes == layout.num_bytes


def _derived(reading: Future[int], layout: UnitLayout, buffer: Tensor) -> Future[int]:
    """A read that is done when the arrays that are in no file are there as well."""
    if _is_whole(layout):
        return reading
    done: Future[int] = Future()

    def derive(read: Future[int]) -> None:
        try:
            num_bytes = read.result()
            layout.derive(buffer)
        except BaseException as error:  # the waiting thread has to learn of any error
            done.set_exception(error)
        else:
            done.set_result(num_bytes)

    reading.add_done_callback(derive)
    return done


class LinkReader:
    """Queues copies from the tier of the host, in the order in which they are asked for. A read counts as
    done when its copy is queued: from then on the device keeps the order."""

    def __init__(
        self,
        host: Tier,
        link: Link,
        pieces: Callable[[UnitKey], Sequence[tuple[int, int]] | None] = lambda key: None,
    ) -> None:
        """`pieces` says what is copied of a unit; None: all of it."""
        self._host = host
        self._pieces = pieces
        self._link = link
        self._requests: SimpleQueue[tuple[UnitKey, Tensor, Future[int]] | None] = SimpleQueue()
        #: The error of a link that has failed. The link is lost: all who want a unit learn of the error.
        self._failure: BaseException | None = None
        #: A unit whose copy out of its staging slot may be under way.
        self._leaving: tuple[UnitKey, Tensor] | None = None
        self._thread = threading.Thread(target=self._serve, name="penstock-link", daemon=True)
        self._thread.start()

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        future: Future[int] = Future()
        self._requests.put((key, buffer, future))
        return future

    def close(self) -> None:
        self._requests.put(None)
        self._thread.join()
        self._host.close()

    def _serve(self) -> None:
        while (request := self._next_request()) is not None:
            key, buffer, future = request
            try:
                if self._failure is not None:
                    raise self._failure
                num_bytes = self._copy(key, buffer)
            except BaseException as error:  # the waiting thread has to learn of any error
                future.set_exception(error)
            else:
                future.set_result(num_bytes)
        self._let_go()

    def _next_request(self) -> tuple[UnitKey, Tensor, Future[int]] | None:
        try:
            return self._requests.get_nowait()
        except Empty:  # there is time to wait for the last copy, so that its slot can be filled again
            self._let_go()
            return self._requests.get()

    def _copy(self, key: UnitKey, buffer: Tensor) -> int:
        if self._host.num_slots < 2:
            self._let_go()
        arrival = self._host.acquire(key)
        num_bytes, pieces = min(arrival.buffer.numel(), buffer.numel()), self._pieces(key)
        try:
            self._link.copy(arrival.buffer[:num_bytes], buffer[:num_bytes], pieces)
        except BaseException as error:
            self._failure = error
            self._host.release(key)
            raise
        # The link has this copy to do now, so it does not stand still while the last copy is waited for.
        self._let_go()
        if arrival.slot is None:
            self._host.release(key)
        else:
            self._leaving = key, arrival.buffer
        return num_bytes if pieces is None else sum(size for _, size in pieces)

    def _let_go(self) -> None:
        if self._leaving is not None:
            key, buffer = self._leaving
            self._leaving = None
            try:
                self._link.wait_copied(buffer)
            except Exception as error:
                self._failure = error
            self._host.release(key)
