"""Guesses for models with recurrent states, which have no way back: right guesses are replayed, and no bit of
an answer depends on them. The drafters are those of drafters.py; requests and configs are those of
test_drafts.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Dice, Forest, Oracle
from eagle3_folders import LAYERS, save_sglangs
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CHAIN, CONFIGS, oracle, random_request
from test_engine import PARAMS, PROMPTS, exact
from test_warm_up import peak_bytes
from tiny_models import RECURRENT, build

from conftest import save_byte_tokenizer
from penstock.config import EngineConfig
from penstock.drafters.draft_model import NUM_STATES, DraftModel
from penstock.engine import Completion, Engine
from penstock.errors import CorruptFile, StepFailed
from penstock.generation.beam_search import BeamParams
from penstock.generation.blocks.guess_rows import GuessRows
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.state_layout import GuessRoom

#: A short convolution, Mamba-2, Gated DeltaNet.
QUICK = ("LFM2", "Granite 4", "Qwen3-Next")
LONGEST = 192
UNDRAFTED = EngineConfig(enable_prefix_caching=False, speculation="off")


class Asked:
    """A model, and its answers without guesses."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.plain = build(name, folder, vocab_size=278)
        save_byte_tokenizer(folder)
        with Engine.load(folder, UNDRAFTED) as engine:
            self.state_bytes = engine.spec.state_bytes
            self.undrafted = engine.generate(ASKED_PROMPTS, ASKED_PARAMS)

    def drafter(self, kind: str) -> Oracle | Dice:
        known = oracle(self.undrafted)
        makers: dict[str, Callable[[], Oracle | Dice]] = {
            "right": lambda: known,
            "wrong": lambda: oracle(self.undrafted, num_right=0),
            "half right": lambda: oracle(self.undrafted, num_right=3),
            "random": lambda: Dice(known),
            "tree": lambda: Forest(known),
        }
        return makers[kind]()

    def config(self, case: str) -> EngineConfig:
        if case == "preemptions":
            return EngineConfig(num_kv_tokens=14 * 16, max_model_len=LONGEST)
        if case == "few states":  # copies of states give way to others
            return EngineConfig(state_bytes=5 * self.state_bytes)
        return EngineConfig(**CONFIGS[case])  # type: ignore[arg-type]

    def load(self, config: EngineConfig, drafter: Oracle | Dice) -> Engine:
        return Engine.load(self.folder, config, drafter=drafter)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Asked]:
    return cache(lambda name: Asked(name, tmp_path_factory.mktemp("model")))


def check_all_is_free(engine: Engine) -> None:
    manager = engine.scheduler.block_manager
    assert manager.pool.num_free == manager.num_blocks and not engine.has_work
    num_rows, num_paths = engine.plan.guess_room
    assert manager.states.guesses.within(1000) == num_rows
    assert all(manager.states.guesses.begin_path() for _ in range(num_paths))
    manager.states.guesses.end_step()


@pytest.mark.inner
@pytest.mark.parametrize(
    ("name", "case", "kind"),
    [
        ("LFM2", "streamed", "tree"), ("LFM2", "two at a time", "half right"),
        ("Granite 4", "preemptions", "half right"),
        ("Qwen3-Next", "few states", "tree"), ("Qwen3-Next", "chunked prompts beside", "random"),
        *(
            pytest.param(name, case, kind, marks=pytest.mark.slow)
            for name in QUICK for case in (*CONFIGS, "few states")
            for kind in ("right", "wrong", "half right", "random", "tree")
        ),
    ],
)  # fmt: skip
def test_answers_are_those_without_drafts(
    name: str, case: str, kind: str, asked: Callable[[str], Asked]
) -> None:
    """Also the second time, when prompts begin with copies of states that replays left."""
    model = asked(name)
    drafter, expected = model.drafter(kind), exact(model.undrafted)
    with model.load(model.config(case), drafter) as engine:
        for _ in range(2):
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == expected
            check_all_is_free(engine)
        assert (engine.metrics.num_preemptions > 0) == (case == "preemptions")
        assert (engine.metrics.accepted_tokens > 0) == (kind != "wrong")
        assert not isinstance(drafter, Forest) or drafter.num_branches


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", RECURRENT)
def test_random_requests_get_what_they_get_without_drafts(
    name: str, number: int, asked: Callable[[str], Asked]
) -> None:
    """Twenty requests with three drafters, each in a config of its own: 2,520 answers over all families."""
    model, dice = asked(name), random.Random(number)
    requests = [random_request(dice) for _ in range(20)]
    prompts, params = (list(column) for column in zip(*requests, strict=True))
    with Engine.load(model.folder, UNDRAFTED) as engine:
        expected = engine.generate(prompts, params)
    answers = {
        (each.seed, *prompt): done.token_ids for (prompt, each), done in zip(requests, expected, strict=True)
    }
    for maker, case in zip((Forest, Forest, Dice), dice.sample([*CONFIGS, "few states"], 3), strict=True):
        drafter = maker(Oracle(answers, CHAIN))
        drafter.dice.seed(number)
        with model.load(model.config(case), drafter) as engine:
            assert exact(engine.generate(prompts, params)) == exact(expected)
            assert engine.metrics.accepted_tokens
            check_all_is_free(engine)


def chain_of(prompt: list[int], params: SamplingParams, done: Completion, length: int = CHAIN) -> Oracle:
    return Oracle({(params.seed, *prompt): done.token_ids}, length)


def test_a_conversation_goes_on_from_a_state_that_was_replayed(asked: Callable[[str], Asked]) -> None:
    """A prompt of 17 tokens: the end of the second block lies among guesses. The copy of the state is made
    when they are replayed, and the next prompt begins with it."""
    model, prompt = asked("Qwen3-Next"), ASKED_PROMPTS[2]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert len(prompt) == 17
    with Engine.load(model.folder, UNDRAFTED) as engine:
        (done,) = engine.generate([prompt], params)
        follow_up = [*prompt, *done.token_ids, 5]
        (expected,) = engine.generate([follow_up], params)
    # Tokens behind steps with 9 guesses: 17 + 1, 28, 38, 41.
    with model.load(EngineConfig(), chain_of(prompt, params, done, 9)) as engine:
        assert engine.generate([prompt], params) == [done]
        before = engine.metrics.prefix_cache_hits
        assert exact(engine.generate([follow_up], params)) == exact([expected])
        assert engine.metrics.prefix_cache_hits - before == 32


def test_a_restarted_engine_begins_with_a_state_that_was_replayed(
    asked: Callable[[str], Asked], tmp_path: Path
) -> None:
    model, prompt = asked("LFM2"), ASKED_PROMPTS[2]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)
    with Engine.load(model.folder, UNDRAFTED) as engine:
        (done,) = engine.generate([prompt], params)
        follow_up = [*prompt, *done.token_ids, 5]
        expected = exact(engine.generate([follow_up], params))
    config = EngineConfig(kv_disk=str(tmp_path / "kv"))
    with model.load(config, chain_of(prompt, params, done, 9)) as engine:
        assert engine.generate([prompt], params) == [done]
    with model.load(config, chain_of(prompt, params, done)) as engine:
        assert exact(engine.generate([follow_up], params)) == expected
        assert engine.metrics.kv_disk is not None and engine.metrics.kv_disk.reads.num_tokens == 32


def begin(engine: Engine) -> None:
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(GenerationRequest(prompt, params, str(index)))


def test_a_cancelled_step_would_have_replayed_guesses(asked: Callable[[str], Asked]) -> None:
    """One of its requests is wanted no more; the others are computed again."""
    model = asked("Granite 4")
    with model.load(EngineConfig(), model.drafter("half right")) as engine:
        found = [Completion() for _ in PROMPTS]
        begin(engine)
        for number in range(1000):
            is_cancelled = number == 2
            if is_cancelled:
                assert any(sequence.guess_rows for sequence in engine.scheduler)
            for output in engine.step(aborted=set(map(str, range(len(PROMPTS)))) if is_cancelled else set()):
                found[int(output.request_id)].extend(output)
            if is_cancelled:
                assert not any(sequence.guess_rows for sequence in engine.scheduler)
                engine.abort("0")
            if not engine.has_work:
                break
        assert exact(found[1:]) == exact(model.undrafted[1 : len(PROMPTS)])
        check_all_is_free(engine)


def test_a_failed_step_would_have_replayed_guesses(
    asked: Callable[[str], Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = asked("Granite 4")
    with model.load(EngineConfig(), model.drafter("half right")) as engine:

        def fail(*arguments: object) -> None:
            raise CorruptFile("a layer could not be read")

        begin(engine)
        engine.step()
        engine.step()
        assert any(sequence.guess_rows for sequence in engine.scheduler)
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.executor.kv_cache, "copy_states", fail)
            with pytest.raises(StepFailed):
                engine.step()
        check_all_is_free(engine)
        assert exact(engine.generate(PROMPTS, PARAMS)) == exact(model.undrafted[: len(PROMPTS)])


def test_beams_beside_sequences_with_guesses(asked: Callable[[str], Asked]) -> None:
    model = asked("Granite 4")
    beams = SamplingParams(temperature=0, max_tokens=12, beams=BeamParams(3))
    prompts, params = [*PROMPTS, PROMPTS[2]], [*PARAMS, beams]
    with Engine.load(model.folder, UNDRAFTED) as engine:
        expected = engine.generate([PROMPTS[2]], beams)
    with model.load(EngineConfig(), model.drafter("half right")) as engine:
        found = engine.generate(prompts, params)
        assert exact(found) == exact([*model.undrafted[: len(PROMPTS)], *expected])
        check_all_is_free(engine)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Granite 4"])
def test_guesses_take_no_memory_that_was_not_measured(name: str, asked: Callable[[str], Asked]) -> None:
    model = asked(name)
    config = EngineConfig(max_num_batched_tokens=128, max_num_seqs=4, num_kv_tokens=1024, num_threads=1)
    params = replace(PARAMS[1], prompt_logprobs=None)
    prompts = [[3 + number] * 100 for number in range(4)]
    with Engine.load(model.folder, config) as engine:
        done = engine.generate(prompts, params)
    answers = {(params.seed, *prompt): each.token_ids for prompt, each in zip(prompts, done, strict=True)}
    with model.load(config, Oracle(answers, CHAIN)) as engine:
        with torch.profiler.profile(profile_memory=True) as profiler:
            assert engine.generate(prompts, params) == done
        assert engine.metrics.accepted_tokens and engine.plan.is_workspace_measured
        assert peak_bytes(profiler) <= 1.05 * engine.plan.workspace_bytes


def test_rows_of_guesses_have_one_owner() -> None:
    first, second = (Sequence(index, GenerationRequest([1], SamplingParams()), 9) for index in range(2))
    rows = GuessRows(GuessRoom(num_rows=5, num_paths=2))
    assert rows.within(9) == 5 and rows.begin_path() and rows.begin_path() and not rows.begin_path()
    mine, other = rows.take(3), rows.take(2)
    assert sorted(mine + other) == list(range(5)) and rows.within(9) == 0
    rows.accept(first, mine[:2])
    rows.accept(second, ())
    rows.end_step()
    assert rows.within(9) == 3 and rows.begin_path()
    assert rows.replay(first) == mine[:2] and rows.replay(first) == () and rows.within(9) == 5
    rows.accept(second, rows.take(1))
    rows.forget(second)  # preempted
    assert rows.replay(second) == () and rows.within(9) == 5


def test_models_without_states_have_room_for_all_guesses() -> None:
    rows = GuessRows(None)
    assert rows.within(99) == 99 and rows.begin_path() and rows.take(9) == ()


def flat_s(num_tokens: int) -> float:
    """A step that waits for its layers takes as long with guesses as without."""
    return 1.0


@pytest.mark.parametrize(
    "kind", ["text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("draft model", "EAGLE-3"))]
)
def test_what_guesses_for_others_guesses_for_models_with_states(
    kind: str, asked: Callable[[str], Asked], tiny_llama: Path, tmp_path: Path
) -> None:
    model, config = asked("Qwen3-Next"), EngineConfig()
    if kind == "draft model":
        config = EngineConfig(draft_model=str(tiny_llama))
    if kind == "EAGLE-3":
        save_sglangs(tmp_path / "head", model.plain)
        told = tmp_path / "head" / "config.json"  # the model has three layers
        told.write_text(told.read_text().replace(json.dumps(list(LAYERS)), "[0, 1, 2]"))
        config = EngineConfig(
            draft_model=str(tmp_path / "head"), draft_with_eagle3=True, allow_pickle=True, device="cpu"
        )
    with Engine.load(model.folder, config) as engine:
        assert (engine.draft_model is None) == (kind == "text")
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        for _ in range(2):  # and the second time what followed the first time
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(model.undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens > 100


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("LFM2", "together"),
        *(
            pytest.param(name, case, marks=pytest.mark.slow)
            for name in QUICK
            for case in ("chunked prompts beside", "preemptions", "few states")
        ),
    ],
)
def test_a_draft_model_with_states_guesses(
    name: str, case: str, asked: Callable[[str], Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its branches and what it goes on with have the logits of texts that are computed as a whole."""
    model = asked(name)
    draft_model = DraftModel.load(model.folder, EngineConfig())
    candidates, heard = draft_model._sampler.candidates, dict[tuple[int, ...], torch.Tensor]()

    def record(logits: Iterable[torch.Tensor], batch: Batch, count: int) -> Any:
        rows = torch.cat(list(logits))
        heard.update(
            (tuple(item.sequence.token_ids), row) for item, row in zip(batch.scheduled, rows, strict=True)
        )
        return candidates(iter([rows]), batch, count)

    monkeypatch.setattr(draft_model._sampler, "candidates", record)
    with Engine.load(model.folder, model.config(case), drafter=Speculation(flat_s, draft_model)) as engine:
        assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(model.undrafted)
        check_all_is_free(engine)
        assert engine.metrics.accepted_tokens
    draft_model._forget()
    assert draft_model._blocks.pool.num_free == draft_model._blocks.num_blocks
    assert draft_model._states._pool.num_free == NUM_STATES
    texts = random.Random(0).sample(sorted(heard), 60)
    assert len({text[:20] for text in texts}) > 5
    for text in texts:
        sequence = Sequence(0, GenerationRequest(list(text), SamplingParams()), LONGEST)
        assert draft_model._blocks.grow(sequence)
        (row,) = draft_model._forward((ScheduledSequence.of(sequence, len(text)),))[1]
        draft_model._blocks.release(sequence)
        assert torch.equal(row[0], heard[text])
    draft_model.close()
