"""Keys and values that have no room on a card lie in RAM: answers are those of a cache that is large enough,
to the last bit. On a pretended card, and with the processor in the place of a card, whose blocks take the
same turns."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafters import Forest, Oracle
from engine_features import stores_of
from pretended_card import PretendedCard, engines, missing
from pretended_card.streams import Stream
from pretended_card.tensors import CardTensor
from test_convert import Ids
from test_encoder_decoder import build as build_encoder_decoder
from tiny_models import VOCAB_SIZE, build
from torch import Tensor

from penstock import goes_with
from penstock.cache.spill.link_turns import LinkTurns
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.goes_with import REFUSALS, Feature
from penstock.weights.layer_weights import LayerWeights

on_a_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MIB = 1 << 20
#: Ten blocks.
PLAIN = EngineConfig(
    max_model_len=112,
    max_num_batched_tokens=40,
    max_num_seqs=4,
    num_kv_tokens=160,
    num_threads=1,
)
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_a_card)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device that computes. On the pretended card, everything is given back in the end, and no copy races
    with another."""
    if request.param == "cpu":
        rest = {
            pair: each for pair, each in REFUSALS.items() if pair != (Feature.KV_SPILL_MEMORY, Feature.NO_GPU)
        }
        monkeypatch.setattr(goes_with, "REFUSALS", rest)
        yield "cpu"
        return
    with engines.card_with_kernels() as card:
        yield "cuda"
        check_nothing_is_left(card)


def check_nothing_is_left(card: PretendedCard) -> None:
    engines.forget_orders()
    assert not card.races.found
    assert card.driver.num_registered == 0 and card.memory.used_bytes == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers: both slots are filled again within a sweep."""
    folder = tmp_path_factory.mktemp("model")
    build("Llama", folder / "made", num_hidden_layers=4)
    engines.convert_for_streaming(folder / "made", folder / "converted")
    return folder / "converted"


def prompts(*lengths: int) -> list[list[int]]:
    dice = random.Random("beside")
    return [[dice.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def spilled(
    model: Path, config: EngineConfig = PLAIN, num_kv_tokens: int = 32, num_in_ram: int = 6
) -> EngineConfig:
    """Two blocks where layers are computed, and six in RAM."""
    with Engine.load(model, replace(config, device="cpu"), tokenizer=Ids()) as engine:
        size = engine.model.executor.kv_cache.block_bytes
    return replace(config, num_kv_tokens=num_kv_tokens, kv_spill_bytes=num_in_ram * size)


def load(model: Path, config: EngineConfig, device: str, **kwargs: Any) -> Engine:
    engine = Engine.load(model, replace(config, device=device), tokenizer=Ids(), **kwargs)
    engine.meter.prompt_s = lambda num_tokens, _: 10.0 * num_tokens  # type: ignore[method-assign]
    return engine


def answers(
    model: Path, config: EngineConfig, device: str, asked: list[list[int]], params: SamplingParams = PARAMS
) -> list[Completion]:
    """All prompts together."""
    with load(model, config, device) as engine:
        got = engine.generate(asked, params)
        pool = engine.scheduler.block_manager.pool
        assert not any(pool.num_owners) and pool.num_free == pool.num_blocks
        return got


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {"kv_dtype": "int8"}),
        ("Gemma 2", {"kv_dtype": "float32"}),
        ("DeepSeek V2", {}),
        ("GPT-2", {}),
        ("Llama", {"kernels": "torch"}),
    ],
)
def test_answers_are_those_of_a_larger_cache(
    name: str, more: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """Prompts in chunks, of several sequences that have to wait for each other's blocks; windows, latents,
    and scales beside integers."""
    build(name, tmp_path)
    asked = prompts(70, 45, 10)
    plain = replace(PLAIN, **more)
    expected = answers(tmp_path, plain, device, asked)
    with load(tmp_path, spilled(tmp_path, plain), device) as engine:
        plan = engine.plan
        assert (plan.num_kv_blocks, plan.num_spilled_blocks) == (8, 6)
        assert (
            plan.kv_spill_bytes >= 6 * engine.model.executor.kv_cache.block_bytes > plan.kv_spill_bytes - 4096
        )
        assert engine.generate(asked, PARAMS) == expected
        stats = engine.metrics.kv_spill
        assert stats is not None and stats.read_bytes > 0 and stats.written_bytes > 0
        assert engine.metrics.num_preemptions or engine.generate(asked[:1], PARAMS) == expected[:1]


@pytest.mark.slow
def test_layers_are_streamed_beside_the_blocks(model: Path, device: str) -> None:
    """One layer stays; beams share blocks, and guesses in trees have branches in blocks of their own."""
    asked, params = prompts(70, 30), replace(PARAMS, prompt_logprobs=1)
    config = spilled(model, replace(PLAIN, num_resident_layers=1), num_kv_tokens=16, num_in_ram=8)
    beams = SamplingParams(beams=BeamParams(3, 2), max_tokens=6, ignore_eos=True)
    expected = answers(model, PLAIN, device, asked)
    known = {(1, *prompt): answer.token_ids for prompt, answer in zip(asked, expected, strict=True)}
    drafter = Forest(Oracle(known, 4, vocab_size=VOCAB_SIZE))
    with load(model, config, device, drafter=drafter) as engine:
        assert engine.generate(asked, PARAMS) == expected
        assert engine.metrics.accepted_tokens > 2 and drafter.num_branches > 0
    for each, wanted in ((asked, params), (prompts(40), beams)):
        assert answers(model, config, device, each, wanted) == answers(model, PLAIN, device, each, wanted)


@pytest.mark.slow
def test_a_sequence_that_was_preempted_or_cancelled_comes_back(model: Path, device: str) -> None:
    """Two sequences outgrow the card and RAM. A step is given up between two layers, with blocks on their way
    in both directions."""
    asked, longer = prompts(62, 60), replace(PARAMS, max_tokens=8)
    expected = [answers(model, PLAIN, device, [each], longer)[0] for each in asked]
    with load(model, spilled(model), device) as engine:
        assert engine.generate(asked, longer) == expected and engine.metrics.num_preemptions > 0
        engine.add(GenerationRequest([*asked[0], *prompts(40)[0]], PARAMS, "gone"))
        engine.step()
        aborted = set[str]()
        sweep = engine.streamer.runs

        def leave(stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
            for number, run in enumerate(sweep(stack, most)):
                if number == 2:
                    aborted.add("gone")
                yield run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.streamer, "runs", leave)
            assert engine.step(aborted) == [] and aborted
        engine.abort("gone")
        assert engine.generate(asked, longer) == expected


def test_blocks_in_ram_are_kept_and_found_again(model: Path, device: str, tmp_path: Path) -> None:
    """By the prefix cache, in the tiers on the host (of a card) and on disk, and by a new engine."""
    asked, other = ([each] for each in prompts(90, 100))
    expected = answers(model, PLAIN, device, asked)
    kept = MIB if device == "cuda" else None
    config = replace(spilled(model), kv_host_bytes=kept, kv_disk=str(tmp_path))
    with load(model, config, device) as engine:
        assert engine.generate(asked, PARAMS) == expected == engine.generate(asked, PARAMS)
        assert engine.metrics.prefix_cache_hits >= 80
        for store in stores_of(engine).values():
            store.flush()
        assert engine.generate(other, PARAMS)  # takes the blocks
        assert engine.generate(asked, PARAMS) == expected
        stats = engine.metrics.kv_host if kept else engine.metrics.kv_disk
        assert stats is not None and stats.reads.num_blocks > 2
    with load(model, config, device) as engine:
        assert engine.generate(asked, PARAMS) == expected
        stats = engine.metrics.kv_disk
        assert stats is not None and stats.reads.num_blocks == 5


@on_a_card
def test_a_slot_is_filled_when_its_last_layer_has_been_copied_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretended card copies as late as it may, and a real one may be early. So each copy into a slot has
    to come after all that was launched before the slot was given back."""
    begun = dict[int, int]()
    checked = list[bool]()
    with engines.card_with_kernels() as card:
        end, enqueue = LinkTurns.end, PretendedCard.enqueue_copy

        def ended(self: LinkTurns, layer: int) -> None:
            begun.update(
                {slot.data_ptr(): card.default_stream.num_queued for _, slot in self._regions(layer)}
            )
            end(self, layer)

        def enqueued(self: PretendedCard, source: Tensor, target: CardTensor) -> None:
            stream: Stream = self.current_stream.of_card()
            starts = [start for start in begun if start <= target.data_ptr()]
            if not stream.is_default and starts:
                before = stream.all_before().get(self.default_stream, -1)
                checked.append(before >= begun[max(starts)])
            enqueue(self, source, target)

        monkeypatch.setattr(LinkTurns, "end", ended)
        monkeypatch.setattr(PretendedCard, "enqueue_copy", enqueued)
        config = spilled(model, replace(PLAIN, num_resident_layers=9))
        assert answers(model, config, "cuda", prompts(70))
        assert len(checked) > 20 and all(checked)
        begun.clear()
        monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
        with pytest.raises(AssertionError):  # the copy back, too, has to wait
            answers(model, config, "cuda", prompts(70))
        checked.clear()


@on_a_card
def test_memory_that_can_not_be_pinned(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Copies are slower, and as right; it is said, or refused."""
    with engines.card_with_kernels() as card:
        expected, config = answers(model, PLAIN, "cuda", prompts(70)), spilled(model)
        card.driver.refuses_to_pin = True
        with load(model, config, "cuda") as engine:
            assert engine.generate(prompts(70), PARAMS) == expected
            assert engine.metrics.unpinned_bytes > engine.plan.kv_spill_bytes > 0
            assert engine.metrics.pinned_bytes == 0
        del engine
        assert "refused to pin" in caplog.text and "--kv-spill-memory" in caplog.text
        with pytest.raises(CapacityError, match="strict-plan.*refused to pin"):
            load(model, replace(config, strict_plan=True), "cuda")
        check_nothing_is_left(card)


@on_a_card
def test_what_can_not_be_spilled_is_refused(model: Path, tmp_path: Path) -> None:
    with engines.card_with_kernels() as card:
        with pytest.raises(CapacityError, match=r"in RAM \(--kv-spill-memory\)"):
            load(model, replace(PLAIN, num_kv_tokens=64), "cuda")
        with pytest.raises(ConfigError, match="pass --kv-spill-memory SIZE"):
            load(model, replace(PLAIN, kv_spill=str(tmp_path)), "cuda")
        for name, reason in (
            ("Gemma 3n", "values of other layers"),
            ("LFM2", "recurrent"),
            ("BART", "encoder"),
        ):
            folder = tmp_path / name
            (build_encoder_decoder if name == "BART" else build)(name, folder)
            with pytest.raises(ConfigError, match=f"--kv-spill-memory .*{reason}"):
                load(folder, replace(PLAIN, kernels="torch", kv_spill_bytes=MIB), "cuda")
        check_nothing_is_left(card)
    with pytest.raises(ConfigError, match="--kv-spill-memory .*--kv-cache-memory, or --kv-spill"):
        load(model, replace(PLAIN, kv_spill_bytes=MIB), "cpu")
    with pytest.raises(ConfigError, match="leave one of the two out"):
        replace(PLAIN, kv_spill="folder", kv_spill_bytes=MIB)
    with pytest.raises(ConfigError, match="method planes"):
        replace(PLAIN, kv_spill_bytes=MIB, draft_with_planes=True)
