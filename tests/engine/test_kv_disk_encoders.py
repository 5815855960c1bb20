"""Encoded inputs on disk: the keys and values that a decoder reads of them, and prompts that are seen both
ways. A restarted engine encodes nothing that was encoded before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import test_cpmant
import test_encoder_decoder
from engine_features import disk_of
from test_convert import Ids
from test_kv_disk import BLOCK_SIZE, PARAMS, PLAIN, answers, kept, num_read, prompts

from penstock.cache.disk.shelf import BLOCKS
from penstock.engine import Engine
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler

#: Tokens of inputs; none ends with a block.
LENGTHS = (70, 20)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each input that a step encodes."""
    found, schedule = list[int](), Scheduler.schedule

    def listen(self: Scheduler) -> Batch:
        batch = schedule(self)
        found.extend(sequence.num_encoder_tokens for sequence in batch.encoded)
        return batch

    monkeypatch.setattr(Scheduler, "schedule", listen)
    return found


@pytest.mark.parametrize("name", ["T5 v1.1", "CPM-2", "EVA 2.0", "BART"])
def test_a_restarted_engine_encodes_only_what_is_new(name: str, tmp_path: Path, encoded: list[int]) -> None:
    test_encoder_decoder.build(name, tmp_path / "model")
    asked = prompts(name, *LENGTHS)
    expected, _ = answers(tmp_path / "model", PLAIN, asked)
    encoded.clear()
    assert answers(tmp_path / "model", kept(tmp_path), asked)[0] == expected
    assert encoded == list(LENGTHS)
    encoded.clear()
    new = prompts("new", 30)
    expected += answers(tmp_path / "model", PLAIN, new)[0]
    again, engine = answers(tmp_path / "model", kept(tmp_path), [*asked, *new])
    assert again == expected and encoded == [30, 30]
    assert num_read(engine) == sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    assert engine.metrics.prefix_cache_hits == sum(LENGTHS)


def test_an_input_with_a_flipped_byte_is_encoded_again(tmp_path: Path, encoded: list[int]) -> None:
    test_encoder_decoder.build("T5 v1.1", tmp_path / "model")
    asked = prompts("flipped", 70)
    expected, _ = answers(tmp_path / "model", kept(tmp_path), asked)
    (blocks,) = (tmp_path / "kv").glob(f"*/{BLOCKS}")
    content = bytearray(blocks.read_bytes())
    content[3 * len(content) // 5 + 7] ^= 0x40  # of the fourth of five blocks
    blocks.write_bytes(content)
    for num_encoded, num_damaged in ((2, 1), (2, 0)):
        again, engine = answers(tmp_path / "model", kept(tmp_path), asked)
        stats = engine.metrics.kv_disk
        assert again == expected and encoded == [70] * num_encoded
        assert stats is not None and stats.corrupt_blocks == num_damaged


def test_an_input_that_was_evicted_comes_from_disk(tmp_path: Path, encoded: list[int]) -> None:
    """In a cache that holds one input and its answer."""
    test_encoder_decoder.build("BART", tmp_path / "model")
    asked = prompts("evicted", 70, 66, 68)
    expected, _ = answers(tmp_path / "model", PLAIN, asked)
    encoded.clear()
    settings = kept(tmp_path, max_model_len=96, num_kv_tokens=112)
    with Engine.load(tmp_path / "model", settings, tokenizer=Ids()) as engine:
        for _ in range(2):
            for prompt, answer in zip(asked, expected, strict=True):
                assert engine.generate([prompt], PARAMS) == [answer]
                disk_of(engine).flush()
    assert encoded == [70, 66, 68] and num_read(engine) == 3 * 5


@pytest.mark.parametrize("name", ["CPM-Ant", "compressed, own head"])
def test_a_prompt_that_is_seen_both_ways_is_found_after_a_restart(name: str, tmp_path: Path) -> None:
    """CPM-Ant: each key and value depends on the whole prompt, so that only the same prompt finds them."""
    test_cpmant.build(name, tmp_path / "model")
    (prompt,) = prompts(name, 70)
    asked, sizes = [prompt, [*prompt, 9]], {"max_model_len": 400, "max_num_batched_tokens": 320}
    expected, _ = answers(tmp_path / "model", replace(PLAIN, **sizes), asked)
    settings = kept(tmp_path, **sizes)
    first, engine = answers(tmp_path / "model", settings, [prompt])
    num_all = engine.metrics.step_tokens
    again, engine = answers(tmp_path / "model", settings, asked[:1])
    assert again == first == expected[:1]
    assert num_read(engine) > 3 and engine.metrics.step_tokens == num_all - num_read(engine) * BLOCK_SIZE
    again, engine = answers(tmp_path / "model", settings, asked[1:])
    assert again == expected[1:] and num_read(engine) == 0
