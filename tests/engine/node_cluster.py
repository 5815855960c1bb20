"""Several machines in one process: a leader's engine, and workers on threads, over TCP of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_convert import Ids

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.nodes.worker import Worker
from penstock.nodes_config import NodesConfig

SECRET = "a secret of the tests"
CONFIG = EngineConfig(
    max_model_len=160, max_num_batched_tokens=48, num_kv_tokens=512, num_threads=1, device="cpu"
)
OWN = EngineConfig(num_threads=1, device="cpu")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Cluster:
    """Workers that wait for a leader at `port`."""

    def __init__(self, num_nodes: int = 2, own: EngineConfig = OWN, **changes: Any) -> None:
        """changes: of the workers' and the leader's NodesConfig."""
        self.port = free_port()
        self.nodes = replace(
            NodesConfig(SECRET, num_nodes, 0, "127.0.0.1", self.port, timeout_s=10, return_s=60), **changes
        )
        self._own = own
        self.workers: list[Worker] = []
        self.faults: list[Exception] = []
        self._threads: list[threading.Thread] = []
        for rank in range(1, num_nodes):
            self.begin(rank)

    def begin(self, rank: int, model: str = "", **changes: Any) -> Worker:
        """One more worker, or another one in the place of one that was stopped."""
        nodes = replace(self.nodes, rank=rank, certificate=None, key=None, **changes)
        worker = Worker(nodes, self._own, model=model)
        thread = threading.Thread(target=self._run, args=(worker,))
        self.workers.append(worker)
        self._threads.append(thread)
        thread.start()
        return worker

    def engine(self, model: Path, config: EngineConfig = CONFIG, **arguments: Any) -> Engine:
        return Engine.load(model, config, tokenizer=Ids(), nodes=self.nodes, **arguments)

    def stop(self, workers: Sequence[Worker] | None = None) -> None:
        for worker in self.workers if workers is None else workers:
            worker.stop()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker does not end"

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except Exception as error:
            self.faults.append(error)


@contextlib.contextmanager
def cluster(num_nodes: int = 2, own: EngineConfig = OWN, **changes: Any) -> Iterator[Cluster]:
    made = Cluster(num_nodes, own, **changes)
    try:
        yield made
    finally:
        made.stop()
        made.join()
