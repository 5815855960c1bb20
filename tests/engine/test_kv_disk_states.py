"""Recurrent states on disk: what an engine finds again of models with Gated DeltaNet, Mamba-2 and short
convolutions, and that no answer depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_features import disk_of
from test_convert import Ids
from test_kv_disk import BLOCK_SIZE, PARAMS, PLAIN, answers, kept, prompts
from tiny_models import build

from penstock.cache.disk.kv_folder import summaries
from penstock.cache.disk.record import unpack_all
from penstock.cache.disk.shelf import BLOCKS, INDEX, read_extent_bytes
from penstock.cache.disk.state_pieces import StatePieces
from penstock.cache.kv_cache import KVCache
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.generation.requests.generation_request import GenerationRequest
from penstock.memory.pages import PAGE


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    build("LFM2", folder)
    return folder


def num_states_read(engine: Engine) -> int:
    assert engine.metrics.kv_disk is not None
    return engine.metrics.kv_disk.reads.num_states


@pytest.mark.parametrize("name", ["LFM2", "Granite 4", "Qwen3-Next"])
def test_a_new_engine_computes_only_what_is_new(name: str, tmp_path: Path) -> None:
    """Behind a prompt, and behind an answer, which a conversation goes on with."""
    build(name, tmp_path / "model")
    (prompt,) = prompts(name, 76)
    (expected,), _ = answers(tmp_path / "model", PLAIN, [prompt])
    longer = [*prompt, *expected.token_ids, *prompts("more", 20)[0]]
    expected_longer, _ = answers(tmp_path / "model", PLAIN, [longer])
    assert answers(tmp_path / "model", kept(tmp_path), [prompt])[0] == [expected]
    again, engine = answers(tmp_path / "model", kept(tmp_path), [prompt])
    assert again == [expected] and num_states_read(engine) == 1
    num_answered = len(expected.token_ids) - 1  # the last token of an answer is never computed
    assert engine.metrics.step_tokens == 76 - 4 * BLOCK_SIZE + num_answered
    again, engine = answers(tmp_path / "model", kept(tmp_path), [longer])
    assert again == expected_longer and num_states_read(engine) == 1
    num_old = (76 + num_answered) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.metrics.step_tokens == len(longer) - num_old + num_answered
    assert engine.metrics.kv_disk is not None and engine.metrics.kv_disk.reads.num_tokens == num_old
    (summary,) = summaries(tmp_path / "kv")
    num_blocks = (len(longer) + num_answered) // BLOCK_SIZE
    assert summary.num_states == 4, "at the ends of both prompts and of both answers"
    assert summary.num_blocks == num_blocks + 4 * summary.about["state_blocks"]


def test_prompts_that_begin_alike_share_a_state_from_disk(lfm2: Path, tmp_path: Path) -> None:
    """An engine for each prompt. The second one finds blocks and no state, and leaves a state where the texts
    part; the third one begins there."""
    head, *tails = prompts("alike", 50, 20, 20, 20)
    asked = [[*head, *tail] for tail in tails]
    expected, _ = answers(lfm2, PLAIN, asked)
    for number, (prompt, answer) in enumerate(zip(asked, expected, strict=True)):
        again, engine = answers(lfm2, kept(tmp_path, max_num_batched_tokens=128), [prompt])
        assert again == [answer] and num_states_read(engine) == (number == 2)
        num_found = 3 * BLOCK_SIZE if number == 2 else 0
        assert engine.metrics.step_tokens == 70 - num_found + len(answer.token_ids) - 1


def test_what_was_evicted_and_preempted_comes_from_disk(lfm2: Path, tmp_path: Path) -> None:
    """There is room for one sequence, and for the copy of one state."""
    asked = prompts("evicted", 84, 83, 82)
    expected, _ = answers(lfm2, PLAIN, asked)
    with Engine.load(lfm2, PLAIN, tokenizer=Ids()) as engine:
        num_bytes = engine.model.spec.state_bytes
    settings = kept(tmp_path, max_model_len=128, num_kv_tokens=160, state_bytes=2 * num_bytes)
    with Engine.load(lfm2, settings, tokenizer=Ids()) as engine:
        for number in range(2):
            for prompt, answer in zip(asked, expected, strict=True):
                assert engine.generate([prompt], PARAMS) == [answer]
                disk_of(engine).flush()
            assert num_states_read(engine) == 3 * number
        engine.add(GenerationRequest(asked[0], replace(PARAMS, max_tokens=30), "first", priority=1))
        got: dict[str, list[int]] = {"first": [], "second": []}
        while len(got["first"]) < 12:
            for output in engine.step():
                got["first"] += output.token_ids
        disk_of(engine).flush()
        assert num_states_read(engine) == 4
        engine.add(GenerationRequest(asked[1], PARAMS, "second"))  # takes the place of the first
        while engine.has_work:
            for output in engine.step():
                got[output.request_id] += output.token_ids
        assert engine.metrics.num_preemptions == 1 and num_states_read(engine) == 6
        assert got["second"] == expected[1].token_ids and got["first"][:9] == expected[0].token_ids


@pytest.mark.parametrize("is_state", [True, False])
def test_a_flipped_byte_is_found_and_its_tokens_are_computed_again(
    lfm2: Path, tmp_path: Path, is_state: bool
) -> None:
    asked, settings = prompts("flipped", 90), kept(tmp_path, max_num_batched_tokens=128)
    expected, _ = answers(lfm2, settings, asked)
    (blocks,) = (tmp_path / "kv").glob(f"*/{BLOCKS}")
    content = bytearray(blocks.read_bytes())
    content[_place_of(blocks.parent, is_state)] ^= 0x40
    blocks.write_bytes(content)
    again, engine = answers(lfm2, settings, asked)
    stats = engine.metrics.kv_disk
    assert again == expected and stats is not None and stats.corrupt_blocks == 1
    assert engine.metrics.step_tokens == 90 + 8, "nothing can be used"
    assert stats.reads.num_tokens == 0
    again, engine = answers(lfm2, settings, asked)
    assert again == expected and num_states_read(engine) == 1, "the block was written again"


def _place_of(folder: Path, is_state: bool) -> int:
    """Some byte of a block, or of a piece of a state at the end of the prompt."""
    found = [each for each in unpack_all((folder / INDEX).read_bytes()) if each.is_state == is_state]
    extent_bytes = read_extent_bytes(folder)
    assert extent_bytes is not None
    return found[0].slot * extent_bytes + 7


def test_a_state_comes_back_to_any_slot_in_the_same_bits(lfm2: Path) -> None:
    with Engine.load(lfm2, PLAIN, tokenizer=Ids()) as engine:
        cache = engine.model.executor.kv_cache
        assert isinstance(cache, KVCache)
        pieces = StatePieces(cache)
        for parts in (*cache.layers, *cache.states):
            for part in parts:
                part.view(torch.uint8).random_(0, 128)
        before = [[part.clone() for part in parts] for parts in cache.states]
        buffer = torch.full((pieces.block_bytes,), 7, dtype=torch.uint8)
        for number, target in zip(pieces.numbers.of_slot(0), pieces.numbers.of_slot(2), strict=True):
            pieces.read_block(number, buffer)
            pieces.write_block(target, buffer)
        for old, new in zip(before, cache.states, strict=True):
            for left, right in zip(old, new, strict=True):
                assert torch.equal(right[2].view(torch.uint8), left[0].view(torch.uint8))
                assert torch.equal(right[:2].view(torch.uint8), left[:2].view(torch.uint8))
        num_used = engine.model.spec.state_bytes % pieces.block_bytes
        assert not num_used or not buffer[num_used:].any(), "zeros behind the end"


def test_what_can_keep_no_state_is_refused(lfm2: Path, tmp_path: Path) -> None:
    with Engine.load(lfm2, PLAIN, tokenizer=Ids()) as engine:
        num_bytes = engine.model.spec.state_bytes
    with pytest.raises(ConfigError, match="--state-memory"):
        Engine.load(lfm2, kept(tmp_path, state_bytes=num_bytes), tokenizer=Ids())
    with pytest.raises(ConfigError, match="one recurrent state"):
        Engine.load(lfm2, kept(tmp_path, kv_disk_bytes=PAGE), tokenizer=Ids())
