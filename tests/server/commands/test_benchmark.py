"""The bench command on a tiny shape: what it writes, measures and says."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from penstock.engine import Engine
from penstock.generation.drafting.trial import Trial
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.model import known_shapes
from penstock_server import cli
from penstock_server.facade import machine

GIB = 1 << 30
MACHINE = HardwareProfile(2, 24 * GIB, 20 * GIB, 40.0, 1500.0, DiskProfile(2.0, 1 << 20, 2, True))
TINY = {
    "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def invented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "measure_hardware", lambda *_: MACHINE)
    monkeypatch.setitem(known_shapes.SHAPES, "tiny", known_shapes.SHAPES["tinyllama-1.1b"] | TINY)
    yield
    gc.unfreeze()  # the command spares the collector, and its process ends


def test_a_shape_is_written_once_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "--shape", "tiny", "--cache-dir", str(tmp_path), "--sequences", "1", "3"]
    flags += ["--resident-layers", "3", "--max-num-seqs", "4"]
    assert cli.main(flags) == 0
    text = capsys.readouterr().out
    data = json.loads(text.splitlines()[-1])
    folder = tmp_path / "shapes" / "tiny"
    written = folder.stat().st_mtime_ns
    layer_bytes = (folder / "model-layer-00000.safetensors").stat().st_size // 4096 * 4096
    steps = {step["name"]: step for step in data["steps"]}
    assert list(steps) == ["decode, 1 sequence", "decode, 3 sequences", "prompt of 126"]
    for step in steps.values():
        # Two of five layers, less the header's page; floor and prediction are the plan's.
        assert step["streamed_bytes"] == pytest.approx(2 * layer_bytes, abs=3 * 4096)
        assert 0 < step["floor_s"] < step["predicted_s"] and step["seconds"] > 0
    assert data["peak_rss_bytes"] > 0 and data["first_token_s"] > 0
    assert "3 layers" in text and "2 layers" in text and "of the floor" in text
    assert cli.main([*flags, "--json", "--no-prompt"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert len(json.loads(line)["steps"]) == 2
    assert folder.stat().st_mtime_ns == written
    copy = tmp_path / "models" / "owner" / "name"  # as `pull --convert` leaves it
    copy.parent.mkdir(parents=True)
    copy.symlink_to(folder)
    assert cli.main(["bench", "owner/name", "--offline", "--no-prompt", *flags[3:]]) == 0


def test_what_guesses_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long the steps of so small a model take does not decide whether guesses are made.
    monkeypatch.setattr(Trial, "may_draft", True)
    monkeypatch.setattr(Trial, "price", 1.0)
    flags = ["bench", "--shape", "tiny", "--cache-dir", str(tmp_path), "--sequences", "1", "2"]
    flags += ["--no-prompt", "--drafts"]
    assert cli.main(flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    one, two = json.loads(last)["drafts"]
    assert (one["num_seqs"], two["num_seqs"]) == (1, 2)
    for each in (one, two):
        assert 0 < each["num_accepted"] < each["num_guesses"]
        # A step whose guesses are all right gains one token more than it has guesses.
        assert 1 < each["tokens_per_sweep"] <= 33
        assert each["accepted_by_depth"] == sorted(each["accepted_by_depth"], reverse=True)
        assert any(f"{each['num_accepted']} of {each['num_guesses']} guesses right" in line for line in lines)
    assert cli.main([*flags, "--speculation", "off"]) == 2
    assert "leave it or --drafts out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequences", "1", "5", "--max-num-seqs", "4"], "1 to 4 sequences.*--max-num-seqs"),
        (["--sequences", "8", "--max-num-batched-tokens", "7"], "1 to 7 sequences.*--max-num-batched-tokens"),
        (["--sequences", "0"], "1 to 64 sequences"),
        # Each takes two blocks of 16 tokens while it is timed.
        (["--sequences", "8", "--kv-tokens", "240"], "8 sequences.*240 tokens.*--kv-tokens"),
        (["--sequences", "1", "--max-model-len", "20"], "20 tokens.*--max-model-len"),
    ],
)
def test_more_sequences_than_there_is_room_for(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("nothing should be loaded")

    monkeypatch.setattr(Engine, "load", load)
    assert cli.main(["bench", "--shape", "tiny", "--cache-dir", str(tmp_path), *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_as_many_sequences_as_there_is_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "--shape", "tiny", "--cache-dir", str(tmp_path), "--no-prompt", "--json"]
    assert cli.main([*flags, "--sequences", "8", "--kv-tokens", "256"]) == 0
    assert cli.main([*flags, "--sequences", "7", "--max-num-batched-tokens", "7", "--max-num-seqs", "7"]) == 0


def test_a_draft_model_is_measured_with_its_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And refused where there is none to compare it with, before weights are written."""
    flags = ["--no-prompt", "--draft-model", "demo", "--sequences", "1", "--json"]
    assert cli.main(["bench", "demo", "--drafts", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"]
    assert cli.main(["bench", "--shape", "tiny", "--cache-dir", str(tmp_path), *flags]) == 2
    assert "weights without a tokenizer" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_repository_is_looked_up_as_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(repository: str, **options: object) -> str:
        raise LocalEntryNotFoundError(str(options))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert cli.main(["bench", "owner/name", "--offline"]) == 1
    assert "--offline forbids" in capsys.readouterr().err
    assert cli.main(["bench", "owner/name"]) == 1
    assert "is not in the local cache" in capsys.readouterr().err


def test_unknown_shapes_and_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--shape", "gpt-5"]) == 2
    assert "solar-10.7b" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2


def test_choices_of_foreign_routers_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_experts=4,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, num_experts_per_tok=2,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    flags = ["bench", str(tmp_path), "--expert-popularity", "uniform", "--model-impl", "transformers"]
    assert cli.main(flags) == 2
    assert "--expert-popularity own" in capsys.readouterr().err
