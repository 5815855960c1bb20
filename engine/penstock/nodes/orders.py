"""What the leader asks a worker before any step, and what the worker answers: plain fields, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.nodes.cut import MachineRates

#: Settings that all machines of a model must share. The leader's hold; every other setting is the machine's
#: own.
SHARED = (
    *("activations", "group_size", "weights", "kv_dtype", "block_size", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "model_impl", "ignore_unexpected_tensors"),
)


def _checked(kind: type[Any], values: dict[str, Any]) -> Any:
    """Raises ConfigError for fields that `kind` lacks, or that are missing."""
    try:
        return kind(**{field.name: values[field.name] for field in fields(kind)})
    except KeyError as error:
        raise ConfigError(f"a message lacks {error}") from None


@dataclass(frozen=True)
class Order:
    """Which part of which model a machine computes."""

    #: As the leader was told; a worker that was told a model takes its own.
    model: str
    digest: str
    settings: dict[str, Any]
    first: int
    stop: int
    #: None: as many as the worker's own plan has.
    num_kv_tokens: int | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Order:
        order: Order = _checked(cls, values)
        if not (isinstance(order.settings, dict) and order.settings.keys() <= set(SHARED)):
            raise ConfigError("an order has settings that are none of a leader's")
        if not (type(order.first) is int and type(order.stop) is int and 0 <= order.first < order.stop):
            raise ConfigError(f"layers {order.first} to {order.stop} are no range")
        return order

    def config(self, own: EngineConfig) -> EngineConfig:
        """A worker's config: the leader's settings, and its own. A worker guesses nothing and keeps no blocks
        by itself."""
        return replace(
            own,
            **self.settings,
            num_kv_tokens=self.num_kv_tokens,
            kv_cache_bytes=None,
            kv_cache_share=None,
            enable_prefix_caching=False,
            kv_disk=None,
            kv_disk_bytes=None,
            kv_host_bytes=None,
            kv_spill=None,
            kv_spill_bytes=None,
            speculation="off",
            mtp="off",
            draft_model=None,
            draft_with_eagle3=False,
            draft_with_planes=False,
        )


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHARED}


@dataclass(frozen=True)
class Survey:
    """What a worker is, for the cut."""

    #: Of the model's files on this machine.
    digest: str
    num_bytes: int
    memory_gbps: float
    streaming_gbps: float
    #: The arithmetic (kernels' build, processor): machines that differ in it round differently.
    arithmetic: str

    @classmethod
    def of(cls, values: dict[str, Any]) -> Survey:
        survey: Survey = _checked(cls, values)
        return survey

    @property
    def rates(self) -> MachineRates:
        return MachineRates(self.num_bytes, self.memory_gbps, self.streaming_gbps)


@dataclass(frozen=True)
class Planned:
    """A worker's plan for its layers."""

    num_kv_tokens: int
    num_resident: int
    used_bytes: int
    budget_bytes: int
    #: (tokens of a step, seconds that it should take here), tokens ascending; [] where nothing was measured.
    seconds: list[list[float]]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Planned:
        planned: Planned = _checked(cls, values)
        return planned

    def step_s(self, num_tokens: int) -> float:
        """On the line through the two nearest sizes; beyond the largest in proportion."""
        before: list[float] = []
        for tokens, seconds in self.seconds:
            if num_tokens <= tokens:
                if not before:
                    return seconds
                share = (num_tokens - before[0]) / (tokens - before[0])
                return before[1] + share * (seconds - before[1])
            before = [tokens, seconds]
        return before[1] * num_tokens / before[0] if before else 0.0
