"""BenchReport: what `penstock bench` measured, for people and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.memory.hardware import HardwareProfile
from penstock_server.commands.bench_drafts import DraftsMeasurement, drafts_lines
from penstock_server.facade.figures import duration, rate
from penstock_server.facade.inside import hardware_body
from penstock_server.facade.machine import hardware_lines
from penstock_server.facade.plan_table import guess_lines, served_plan_lines
from penstock_server.protocol.engine_bodies import ServedPlanBody


@dataclass(frozen=True)
class Measurement:
    """One kind of step: the median of the measured seconds, the prediction and the floor."""

    name: str
    num_tokens: int
    seconds: float
    predicted_s: float
    floor_s: float
    binding: str
    streamed_bytes: float
    stall_s: float
    #: The share of the asked-for experts that were in memory, measured and predicted; None without experts.
    hit_rate: float | None = None
    predicted_hit_rate: float | None = None

    @property
    def line(self) -> str:
        tokens_per_s, share = rate(self.num_tokens / self.seconds), self.floor_s / self.seconds
        text = f"{self.name:20} {duration(self.seconds):>9}  {tokens_per_s:>8} tokens/s  "
        text += f"{share:4.0%} of the floor ({self.binding}); predicted {duration(self.predicted_s)}"
        if self.streamed_bytes:
            gbps = self.streamed_bytes / self.seconds / 1e9
            text += f"; {gbps:.2f} GB/s streamed, waited {duration(self.stall_s)}"
        if self.hit_rate is not None and self.predicted_hit_rate is not None:
            text += f"; experts {self.hit_rate:.1%} hits (predicted {self.predicted_hit_rate:.1%})"
            text += f", {self.streamed_bytes / self.num_tokens / 2**20:.1f} MiB per token"
        return text


@dataclass(frozen=True)
class BenchReport:
    """All of one run."""

    #: The shape or the model.
    name: str
    #: From the start of loading.
    first_token_s: float
    steps: list[Measurement]
    drafts: list[DraftsMeasurement]
    #: By which experts were drawn, or "own"; and the same in words, None if the routers chose.
    popularity: str
    routing: str | None
    plan: ServedPlanBody
    hardware: HardwareProfile
    #: Of the process.
    peak_rss_bytes: int

    @property
    def lines(self) -> list[str]:
        """For people: the plan and the machine, and what was measured."""
        chosen = [f"experts are chosen by this popularity: {self.routing}"] if self.routing else []
        return [
            *served_plan_lines(self.plan),
            *guess_lines(self.plan),
            "",
            *hardware_lines(self.hardware),
            "",
            *chosen,
            f"first token {self.first_token_s:.2f} s after the start of loading",
            *(step.line for step in self.steps),
            "no step above has guesses",
            *drafts_lines(self.drafts),
            f"peak memory of the process {self.peak_rss_bytes / 2**30:.2f} GiB, Python and torch included",
        ]

    @property
    def data(self) -> dict[str, Any]:
        return {
            "bench": self.name,
            "first_token_s": self.first_token_s,
            "steps": [asdict(step) for step in self.steps],
            "drafts": [asdict(each) for each in self.drafts],
            "expert_popularity": self.popularity if self.routing else None,
            "hardware": hardware_body(self.hardware).model_dump(),
            "host_budget_bytes": self.plan.host_budget_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
        }
