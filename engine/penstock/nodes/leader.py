"""Leader: the machine that has the embedding, the first layers and the head, schedules all steps, and talks
to each worker itself.

The hidden states travel leader -> worker 1 -> leader -> worker 2 -> leader. A ring would save N - 2 of 2 (N -
1) journeys, and would need trust, addresses and a timeout for each pair of machines; with two machines the
two are the same. The head is the leader's: logits are 30 times as long as a hidden state, and sampling needs
them there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.goes_with import Feature, check_together
from penstock.loader import plan_model
from penstock.memory.hardware import HardwareProfile, capacities
from penstock.memory.lane import Lane
from penstock.memory.planning.cost import UNKNOWN, Predict, StepPrediction
from penstock.memory.planning.step_work import StepLoad
from penstock.model.registry import OpenModel
from penstock.nodes.cut import MachineRates, cut
from penstock.nodes.door import Door
from penstock.nodes.identity import model_digest
from penstock.nodes.layer_range import check_model, layer_costs, layer_range
from penstock.nodes.member import Member, MemberLost, NodeStatus
from penstock.nodes.orders import Order, Planned, Survey, shared_settings
from penstock.nodes.part import own_arithmetic, rates_of
from penstock.nodes.step_frames import step_bytes
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame
from penstock.nodes.wire.handshake import Refused, welcome
from penstock.nodes.wire.peer import Peer
from penstock.nodes_config import NodesConfig

logger = logging.getLogger(__name__)

#: Seconds between two lines of the log while workers are missing.
_TELL_S = 30.0


class Leader:
    """Knows its workers, divides the model among them, and sees who is there."""

    def __init__(
        self,
        nodes: NodesConfig,
        model: str,
        report_progress: Callable[[int, int], None] = lambda loaded, total: None,
    ) -> None:
        """Begins to listen. `model`: its name for workers. report_progress(loaded, total) is called while the
        leader waits, with the layers of all machines; it may raise to end the waiting. Raises ConfigError."""
        self.nodes = nodes
        self._model, self._report_progress = nodes.model or model, report_progress
        #: Of the whole model.
        self._num_layers = 0
        self._changed = threading.Condition()
        #: Gets a member's frames about steps; StepPipe sets it.
        self.on_result: Callable[[Member, Frame], None] = lambda member, frame: None
        #: Is told when a member's state has changed, on any thread.
        self.on_change: Callable[[], None] = lambda: None
        self.members = tuple(
            Member(rank, lambda member, frame: self.on_result(member, frame), self._tell)
            for rank in range(1, nodes.num_nodes)
        )
        #: The leader's own layers, after share().
        self.layers = range(0)
        self._own: Predict | None = None
        self._arithmetic = ""
        self._limit = 0
        self._joining = threading.Lock()
        self._is_closed = False
        self._door = Door(nodes, self._admit)

    @property
    def port(self) -> int:
        """Where workers find the leader."""
        return self._door.port

    @property
    def peers(self) -> tuple[Peer | None, ...]:
        """The connection to each worker that takes steps; None for a worker that can't. Keys and values were
        computed over these connections as long as all of them are the same."""
        return tuple(member.ready for member in self.members)

    @property
    def missing(self) -> list[Member]:
        return [member for member in self.members if member.ready is None]

    def status(self) -> tuple[NodeStatus, ...]:
        """Of the workers, by rank."""
        return tuple(member.status(self._arithmetic) for member in self.members)

    def wait(self, timeout_s: float) -> None:
        """Until a member's state changes."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        self._is_closed = True
        self._door.close()
        for member in self.members:
            if (peer := member.peer) is not None:
                peer.close("the leader ends")

    # ------------------------------------------------------------------ before the first step

    def share(
        self, opened: OpenModel, config: EngineConfig, lane: Lane, hardware: HardwareProfile | None
    ) -> tuple[OpenModel, EngineConfig]:
        """This machine's part of a model (loader.Share): waits for all workers, asks what they have, cuts the
        model, and lets them load. Raises PenstockError, the workers' too."""
        self._num_layers = opened.spec.num_layers
        try:
            check_model(opened)
            check_together({*config.features, Feature.NODES})
            self._arithmetic = own_arithmetic(config)
            while True:
                self._wait_until(lambda member: member.is_connected)
                try:
                    return self._divide(opened, config, lane, lane.describe(hardware or capacities()))
                except MemberLost as error:
                    logger.warning("%s while the model was divided; waiting for it", error)
        except BaseException:
            lane.close()
            raise

    def wait_until_loaded(self) -> None:
        """Raises a worker's error."""
        self._wait_until(lambda member: member.ready is not None)

    def _divide(
        self, opened: OpenModel, config: EngineConfig, lane: Lane, hardware: HardwareProfile
    ) -> tuple[OpenModel, EngineConfig]:
        own, digest = rates_of(opened, config, hardware, has_ends=True), model_digest(opened)
        try:
            ranges = cut(layer_costs(opened, config), [own, *self._survey(digest, config)])
        except ValueError as error:
            raise ConfigError(f"{error}: lower --nodes") from None
        orders = [
            Order(self._model, digest, shared_settings(config), each.start, each.stop, config.num_kv_tokens)
            for each in ranges[1:]
        ]
        planned = [
            Planned.of(member.ask("plan", asdict(order)))
            for member, order in zip(self.members, orders, strict=True)
        ]
        self.layers = ranges[0]
        part = layer_range(opened, ranges[0])
        num_tokens = plan_model(part, config, lane, hardware).plan.num_kv_tokens
        num_tokens = min(num_tokens, *(each.num_kv_tokens for each in planned))
        logger.info(
            "the model's layers: %s; keys and values of %d tokens",
            ", ".join(f"{each.start} to {each.stop - 1} at rank {rank}" for rank, each in enumerate(ranges)),
            num_tokens,
        )
        self._limit = step_bytes(config.max_num_batched_tokens, config.max_num_seqs, 0, opened.spec.row_size)
        for member, order in zip(self.members, orders, strict=True):
            member.order = replace(order, num_kv_tokens=num_tokens)
            self._begin_loading(member)
        return part, replace(config, num_kv_tokens=num_tokens, kv_cache_bytes=None, kv_cache_share=None)

    def _survey(self, digest: str, config: EngineConfig) -> list[MachineRates]:
        """What the workers have. `digest`: of the leader's files."""
        ask = {"model": self._model, "settings": shared_settings(config)}
        surveys = [Survey.of(member.ask("survey", ask)) for member in self.members]
        for member, found in zip(self.members, surveys, strict=True):
            member.arithmetic = found.arithmetic
            if found.digest != digest:
                raise ConfigError(
                    f"rank {member.rank} has another model than the leader: its config.json, tensors or "
                    "norms differ. Bring the same files to all machines"
                )
            if found.arithmetic != self._arithmetic:
                logger.warning(
                    "rank %d has another processor or other kernels than the leader: answers are still the "
                    "same in any company, but may differ from one machine's in the last bits", member.rank,
                )  # fmt: skip
        return [each.rates for each in surveys]

    def _begin_loading(self, member: Member) -> None:
        if (peer := member.peer) is not None:
            peer.limit = self._limit
        threading.Thread(target=member.load, name=f"penstock-load-{member.rank}", daemon=True).start()

    def _wait_until(self, is_there: Callable[[Member], bool]) -> None:
        tell_at = time.monotonic()
        while missing := [member for member in self.members if not is_there(member)]:
            for member in missing:
                if member.state == "failed":
                    raise PenstockError(member.reason)
            if time.monotonic() >= tell_at:
                names = ", ".join(f"rank {member.rank} ({member.reason})" for member in missing)
                logger.info("waiting at port %d for %s", self.port, names)
                tell_at = time.monotonic() + _TELL_S
            num_loaded = len(self.layers) + sum(member.num_loaded for member in self.members)
            self._report_progress(num_loaded, self._num_layers)
            self.wait(0.2)

    # ------------------------------------------------------------------ who comes

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        """A worker that knows the secret. Raises Refused."""
        rank = hello.get("rank")
        if type(rank) is not int or not 1 <= rank < self.nodes.num_nodes:
            raise Refused(f"rank {rank} is none of 1 to {self.nodes.num_nodes - 1}")
        member = self.members[rank - 1]
        with self._joining:
            if self._is_closed:
                raise Refused("the leader ends", is_final=False)
            if member.is_connected:
                raise Refused(f"rank {rank} is taken by another worker", is_final=False)
            welcome(channel)
            member.join(channel, self.nodes.timeout_s)
        logger.info("rank %d has come from %s", rank, channel.address)
        if member.order is not None:
            self._begin_loading(member)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.on_change()

    # ------------------------------------------------------------------ what steps take

    @property
    def own_step_s(self) -> float:
        """Seconds that a step of one token should take on this machine; 0 if that is unknown."""
        return self._own(StepLoad.decode(1)).seconds if self._own is not None else 0.0

    def predict(self, own: Predict) -> Predict:
        """How long a step takes on all machines, one after the other. `own`: on this one."""
        self._own = own

        def predict(load: StepLoad) -> StepPrediction:
            found = own(load)
            if found is UNKNOWN:
                return found
            others = [member.planned.step_s(load.num_tokens) for member in self.members if member.planned]
            return replace(found, seconds=found.seconds + sum(others))

        return predict
