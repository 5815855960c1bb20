"""What drafts should bring, for plans: as bodies, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config import EngineConfig
from penstock.generation.drafting.expectation import (
    Assumed,
    Expected,
    assumed_texts,
    expected,
)
from penstock.generation.drafting.state_paths import NO_PATHS, StatePaths
from penstock.memory.planning.plan import gib
from penstock_server.facade.figures import duration, rate
from penstock_server.protocol.engine_bodies import DraftingBody, told

#: The numbers of sequences for which steps are predicted.
NUM_SEQS = (1, 8, 32)


def expected_drafts(
    predict_s: Callable[[int], float],
    config: EngineConfig,
    most: int,
    models: Sequence[Assumed],
    paths: StatePaths = NO_PATHS,
) -> tuple[DraftingBody, ...]:
    """For each drafter and each number of sequences, of which `most` fit. predict_s: seconds of a step by its
    tokens; 0 if nothing is known, and then nothing is expected. paths: of a model with recurrent states."""
    if config.speculation == "off" or predict_s(1) <= 0:
        return ()
    drafters = [*assumed_texts(), *models]
    counts = dict.fromkeys(min(count, most) for count in NUM_SEQS)
    return tuple(
        _body(expected(drafter, count, predict_s, config, paths)) for count in counts for drafter in drafters
    )


def _body(found: Expected) -> DraftingBody:
    return DraftingBody(**told(DraftingBody, found, source=found.name))


def draft_model_line(num_bytes: int, num_device_bytes: int = 0) -> str:
    device = f" and {gib(num_device_bytes)} of the GPU's" if num_device_bytes else ""
    return f"draft model: {gib(num_bytes)} of the host's memory{device}; this plan has the rest"


def drafting_table(found: tuple[DraftingBody, ...]) -> list[str]:
    """A line for each body. [] for nothing."""
    if not found:
        return []
    lines = [
        "guesses of next tokens, if they are right as often as they were on real models (a quotation: only "
        "while the answer repeats a text):"
    ]
    for each in found:
        seqs = f"{each.num_seqs} sequence{'s' if each.num_seqs > 1 else ''}"
        source = each.source.replace("_", " ")
        if not each.num_guesses:
            lines.append(f"{seqs:12} {source:12} none pays: {rate(each.plain_tokens_per_s)} tokens/s")
            continue
        drafting = f", {duration(each.drafting_s)} to guess" if each.drafting_s else ""
        lines.append(
            f"{seqs:12} {source:12} {each.num_guesses:2} each: {each.num_gained:.1f} tokens a step of "
            f"{duration(each.seconds)} (without {duration(each.plain_s)}{drafting}), "
            f"{rate(each.tokens_per_s)} tokens/s in place of {rate(each.plain_tokens_per_s)}"
        )
    return lines
