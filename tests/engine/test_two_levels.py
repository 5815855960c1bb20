"""A small model guesses what the upper planes will say: no answer depends on it, no guess either, and fewer
passes over the planes are made."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eagle3_folders import save_model, save_speculators
from test_draft_model import flat_s, other
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CONFIGS, SOME_CONFIGS, check_all_is_free, undrafted
from test_engine import exact

from conftest import save_byte_tokenizer, save_tiny_llama
from penstock.config import EngineConfig
from penstock.drafters.planes_drafter import PlanesDrafter
from penstock.drafters.two_levels import TwoLevels
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence

__all__ = ["other", "undrafted"]  # fixtures

Level = list[tuple[int, float]]


@contextmanager
def two_levels(
    folder: Path | str, small: Path | str, small_s: float = 0.001, pass_s: float = 0.05, **config: Any
) -> Iterator[tuple[Engine, TwoLevels]]:
    """An engine whose step takes a second, with these prices of its levels."""
    with Engine.load(
        folder, EngineConfig(weights="planes", draft_with_planes=True, draft_model=str(small), **config)
    ) as engine:
        found = engine.draft_model
        assert isinstance(found, TwoLevels)
        found.small.seconds = lambda num_places: small_s  # type: ignore[method-assign]
        found.planes.seconds = lambda num_places: pass_s  # type: ignore[method-assign]
        engine.scheduler._drafter = Speculation(flat_s, found)
        yield engine, found


class Passes:
    """Notes the lines of each pass over the planes."""

    def __init__(self, planes: PlanesDrafter) -> None:
        self.lines: list[list[int]] = []
        self._expand_lines = planes.expand_lines
        planes.expand_lines = self._note  # type: ignore[method-assign]

    def _note(self, lines: List[List[Place]]) -> list[list[Level]]:
        self.lines.append([len(line) for line in lines])
        return self._expand_lines(lines)


@pytest.mark.parametrize(("case", "is_twin"), [*((case, True) for case in SOME_CONFIGS), ("together", False)])
def test_answers_are_those_without_guesses(
    case: str, is_twin: bool, tiny_llama: Path, other: Path, undrafted: list[Completion]
) -> None:
    config = CONFIGS[case]
    if case == "streamed":
        config = {"num_resident_layers": 3}  # the upper planes of all layers, and a lower one
    with two_levels(tiny_llama, tiny_llama if is_twin else other, **config) as (engine, found):
        passes = Passes(found.planes)
        for _ in range(2):  # and from what the cache has
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens
        assert any(max(lines) > 1 for lines in passes.lines), "there was no chain"
        found.small._forget()
        blocks = found.small._blocks
        assert blocks.pool.num_free == blocks.num_blocks, "a sequence has ended, and its blocks are not free"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_says_what_its_places_say_one_by_one(
    temperature: float, tiny_llama: Path, other: Path
) -> None:
    """In shares, too: rows of a pass don't depend on each other's company. Lines begin at the text's end and
    behind earlier lines, and cross the borders of blocks."""
    asked = list[tuple[list[list[Level]], list[list[Level]]]]()
    with two_levels(tiny_llama, other) as (engine, found):
        planes, propose = found.planes, engine.scheduler._drafter.propose

        def at_once(sequence: Sequence) -> list[list[Level]]:
            first = [Place(sequence), *(Place(sequence, node, node - 1, 20 + node) for node in range(20))]
            beside = [
                Place(sequence, 40, 3, 90),
                *(Place(sequence, 41 + n, 40 + n, 91 + n) for n in range(9)),
            ]
            behind = [Place(sequence, 60, 44, 7), Place(sequence, 61, 60, 8)]
            return [each for lines in ([first], [beside, [Place(sequence, 70, 19, 5)]], [behind])
                    for each in planes.expand_lines(lines)]  # fmt: skip

        def one_by_one(sequence: Sequence) -> list[list[Level]]:
            first = [[Place(sequence)], *([Place(sequence, node, node - 1, 20 + node)] for node in range(20))]
            beside = [
                [Place(sequence, 40, 3, 90)],
                *([Place(sequence, 41 + n, 40 + n, 91 + n)] for n in range(9)),
            ]
            behind = [[Place(sequence, 60, 44, 7)], [Place(sequence, 61, 60, 8)]]
            lines = [first, beside, [[Place(sequence, 70, 19, 5)]], behind]
            return [[planes.expand(place)[0] for place in line] for line in lines]

        def ask(sequences: Any, num_tokens: int, room: int) -> Any:
            sequences = list(sequences)
            num_left = sequences[0].max_total_tokens - sequences[0].num_tokens
            told = []
            for way in (at_once, one_by_one):
                if num_left > 30 and planes.start(sequences):
                    told.append(way(sequences[0]))
                    planes.finish()
            asked.extend(zip(told[:1], told[1:], strict=True))
            return propose(sequences, num_tokens, room)

        params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
        engine.generate([[5, 9]], params)
        engine.scheduler._drafter.propose = ask  # type: ignore[method-assign]
        engine.generate([[5, 9, 11]], params)
        check_all_is_free(engine)
    assert asked
    for at_once_said, one_by_one_said in asked:
        assert at_once_said == one_by_one_said
        assert [len(line) for line in at_once_said] == [21, 10, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_longer_guesses_come_from_fewer_passes(temperature: float) -> None:
    """The demo model itself is the small one, so that most of its guesses are what the planes say."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
    answers, per_step, passes_per_step = list[list[int]](), list[float](), list[float]()
    for small_s in (0.001, 100.0):
        with two_levels("demo", "demo", small_s, enable_prefix_caching=False) as (engine, found):
            passes = Passes(found.planes)
            prompts = [engine.tokenizer.encode(text) for text in ("The river", "A turbine is")]
            answers.append(
                [token for prompt in prompts for token in engine.generate([prompt], params)[0].token_ids]
            )
            per_step.append(len(answers[-1]) / engine.metrics.num_steps)
            passes_per_step.append(len(passes.lines) / engine.metrics.num_steps)
            longest = max(max(lines) for lines in passes.lines)
            assert longest > 8 if small_s < 1 else longest == 1
    assert answers[0] == answers[1]
    assert per_step[0] >= per_step[1] > 4
    assert passes_per_step[0] < 0.5 * passes_per_step[1]


def test_a_small_model_that_knows_nothing_is_left_out(tiny_llama: Path, other: Path) -> None:
    """And the planes guess alone."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with two_levels(tiny_llama, other, small_s=0.02) as (engine, found):
        passes = Passes(found.planes)
        engine.generate([[5, 9, 20]], params)
        num_chains = [max(lines) > 1 for lines in passes.lines]
        assert any(num_chains[:10]) and sum(num_chains[-10:]) <= 1
        assert engine.metrics.accepted_tokens > 50


def test_long_prompts_of_short_answers_are_not_read_by_the_small_model(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_levels(tiny_llama, tiny_llama) as (engine, found):
        calls, expand = list[int](), found.small.expand
        monkeypatch.setattr(found.small, "backlog_s", lambda sequences: 1.0)
        monkeypatch.setattr(found.small, "expand", lambda places: (calls.append(1), expand(places))[1])
        for max_tokens, is_read in ((5, False), (150, True)):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.generate([[5, 9, 20] * 3], params)
            assert bool(calls) == is_read
        assert engine.metrics.accepted_tokens > 50


def test_a_step_that_is_cancelled_behind_guesses_leaves_exact_keys(tiny_llama: Path) -> None:
    """Two requests share the blocks of a prompt, and one computes its last token again, in the same block."""
    prompt, params = [7] * 32, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with Engine.load(tiny_llama) as engine:
        expected = exact(engine.generate([[*prompt, 5, 6]], params))
    with two_levels(tiny_llama, tiny_llama) as (engine, _):
        engine.add(GenerationRequest([*prompt, 5], params, "first"))
        engine.step()
        for _ in range(3):
            engine.add(GenerationRequest(prompt, params, "second"))
            assert engine.step(aborted={"first", "second"}) == []
            engine.abort("second")
        engine.abort("first")
        assert exact(engine.generate([[*prompt, 5, 6]], params)) == expected
        check_all_is_free(engine)


def test_memory_is_that_of_both(tiny_llama: Path, other: Path) -> None:
    """The small model has its memory first, and what is left has to keep all upper planes."""
    config = EngineConfig(weights="planes", draft_with_planes=True, num_kv_tokens=64, max_model_len=64)
    both = replace(config, draft_model=str(other))
    with Engine.load(tiny_llama, replace(both, host_memory_bytes=1 << 28)) as engine:
        found = engine.draft_model
        assert isinstance(found, TwoLevels)
        small_bytes = found.num_bytes
        assert small_bytes == found.small.plan.host_used_bytes > 0
        assert engine.plan.host_budget_bytes == (1 << 28) - small_bytes
    with Engine.load(tiny_llama, replace(config, num_resident_layers=3)) as engine:
        enough = engine.plan.host_used_bytes  # for all upper planes
    Engine.load(tiny_llama, replace(both, host_memory_bytes=enough + small_bytes)).close()
    with pytest.raises(CapacityError, match=r"--host-memory"):
        Engine.load(tiny_llama, replace(both, host_memory_bytes=enough))


def test_what_can_not_be_had_is_refused(tiny_llama: Path, other: Path, tmp_path: Path) -> None:
    both = EngineConfig(weights="planes", draft_with_planes=True, draft_model=str(other))
    with pytest.raises(ConfigError, match="--weights planes"):
        Engine.load(tiny_llama, replace(both, weights="int8"))
    with pytest.raises(CapacityError, match="some are streamed.*smaller draft model"):
        Engine.load(tiny_llama, replace(both, num_resident_layers=1))
    changes: list[dict[str, Any]] = [{"mtp": "on"}, {"speculation": "off"}, {"draft_with_eagle3": True}]
    for changed in changes:
        with pytest.raises(ConfigError, match="leave"):
            replace(both, **changed)
    save_tiny_llama(tmp_path, vocab_size=300)
    save_byte_tokenizer(tmp_path, num_merges=5)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"\\u4e2d":').replace('"a b"', '"\\u4e2d b"'))
    with pytest.raises(ConfigError, match="another vocabulary: token"):
        Engine.load(tiny_llama, replace(both, draft_model=str(tmp_path)))


def test_an_eagle3_head_is_no_small_model(tiny_llama: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    save_speculators(head, save_model(tmp_path))
    config = EngineConfig(weights="planes", draft_with_planes=True, draft_model=str(head))
    with pytest.raises(ConfigError, match="EAGLE-3 head"):
        Engine.load(tiny_llama, config)
