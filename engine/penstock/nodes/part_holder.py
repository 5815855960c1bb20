"""PartHolder: what a worker has of a model, from a leader's first question to its last step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.loader import settle_processor
from penstock.memory.hardware import HardwareProfile
from penstock.nodes.identity import model_digest
from penstock.nodes.orders import SHARED, Order, Planned, Survey
from penstock.nodes.part import Part, open_part, survey
from penstock.nodes.step_frames import read_step, step_bytes
from penstock.nodes.wire.frames import Frame, Kind, WireError
from penstock.nodes.wire.peer import Peer

logger = logging.getLogger(__name__)


class PartHolder:
    """Has one part at a time. It stays loaded while the leader is away."""

    def __init__(
        self,
        config: EngineConfig,
        hardware: Callable[[str], HardwareProfile],
        is_stopping: Callable[[], bool],
        *,
        model: str,
        offline: bool,
        cache_folder: Path | None,
    ) -> None:
        """`model`: where the model lies on this machine; "": as the leader calls it. hardware(model) measures
        the machine. is_stopping() ends loading."""
        self._config, self._measure, self._is_stopping = config, hardware, is_stopping
        self._model, self._offline, self._cache_folder = model, offline, cache_folder
        #: What is planned or loaded.
        self.part: Part | None = None
        #: What the last leader asked, and the answers: of a machine with nothing loaded.
        self._surveyed: tuple[tuple[str, dict[str, Any]], Survey] | None = None
        self._offered: tuple[Order, Planned] | None = None

    def step(self, frame: Frame) -> Frame:
        """The result of a step. Raises PenstockError and WireError."""
        part = self.part
        if part is None or not part.is_loaded:
            raise ConfigError("a step came before the model was loaded")
        cache = part.loaded.model.executor.kv_cache
        number, inputs, hidden, wanted = read_step(frame, cache.num_blocks, cache.block_size)
        if hidden.shape[1] != part.loaded.model.spec.row_size:
            raise WireError("a step's hidden states are of another model")
        began_s = time.perf_counter()
        found = part.compute(inputs, hidden, wanted)
        seconds = time.perf_counter() - began_s
        return Frame(Kind.RESULT, {"number": number, "seconds": seconds}, {"hidden": found})

    def answer(self, ask: dict[str, Any], peer: Peer) -> dict[str, Any]:
        """What a leader asks before the first step. Raises PenstockError."""
        match ask.get("what"):
            case "survey":
                return self._survey(str(ask.get("model", "")), ask.get("settings"))
            case "plan":
                return asdict(self._planned(Order.of(ask)))
            case "load":
                return self._load(Order.of(ask), peer)
        raise ConfigError(f"the leader asks for {str(ask.get('what'))[:40]!r}, which no worker does")

    def _survey(self, name: str, settings: object) -> dict[str, Any]:
        if not isinstance(settings, dict) or settings.keys() - set(SHARED):
            raise ConfigError("the leader's settings make no sense")
        model, asked = self._model or name, (name, settings)
        config = Order(name, "", settings, 0, 1).config(self._config)
        opened = open_part(model, config, self._offline)
        try:
            if not self._is_loaded or self._surveyed is None or self._surveyed[0] != asked:
                self.drop()  # its memory counts as free
                self._surveyed = asked, survey(opened, config, self._measure(model))
            return asdict(replace(self._surveyed[1], digest=model_digest(opened)))
        finally:
            opened.store.close()

    @property
    def _is_loaded(self) -> bool:
        return self.part is not None and self.part.is_loaded

    def _planned(self, order: Order) -> Planned:
        """What is planned for an order, or was before its layers were loaded."""
        if not self._is_loaded or self._offered is None or self._offered[0] != order:
            self._plan(order)
            assert self.part is not None
            self._offered = order, self.part.planned
        return self._offered[1]

    def _plan(self, order: Order) -> None:
        self.drop()
        model = self._model or order.model
        hardware = self._measure(model)
        settle_processor(order.config(self._config), hardware)
        self.part = Part.plan(order, model, self._config, self._offline, hardware, self._cache_folder)

    def _load(self, order: Order, peer: Peer) -> dict[str, Any]:
        if self.part is None or not self.part.serves(order):
            self._plan(order)
            assert self.part is not None
            self.part.load(self._cache_folder)
            self.part.loaded.model.streamer.tiers.wait_until_loaded(self._report(peer))
            logger.info("layers %d to %d are loaded", order.first, order.stop - 1)
        assert self.part is not None
        peer.limit = self.limit
        return asdict(self.part.planned)

    def _report(self, peer: Peer) -> Callable[[int, int], None]:
        def report(num_loaded: int, num_total: int) -> None:
            if self._is_stopping():
                raise ConfigError("this worker was stopped while it was loading")
            peer.send(Frame(Kind.ANSWER, {"loaded": num_loaded, "total": num_total}))

        return report

    @property
    def limit(self) -> int:
        """The most bytes of a step for this part; 0: none is loaded."""
        if self.part is None or not self.part.is_loaded:
            return 0
        model, config = self.part.loaded.model, self.part.loaded.config
        num_blocks = model.executor.kv_cache.num_blocks
        return step_bytes(config.max_num_batched_tokens, config.max_num_seqs, num_blocks, model.spec.row_size)

    def drop(self) -> None:
        """Forget the part; its memory counts as free."""
        if self.part is not None:
            with contextlib.suppress(OSError):
                self.part.close()
            self.part = None
