"""The plan and hardware commands, on an invented machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from conftest import save_byte_tokenizer, save_tiny_llama
from penstock import kernels
from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.kernel_tuning import KernelTuning
from penstock.memory.hardware import DiskProfile, HardwareProfile, KernelProfile
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES
from penstock.weights.checkpoints.hub import CONFIG_PATTERNS, SHIPPED
from penstock_server import cli
from penstock_server.facade import machine
from penstock_server.facade.figures import duration, rate

GIB = 1 << 30
MACHINE = HardwareProfile(2, 24 * GIB, 20 * GIB, 40.0, 1500.0, DiskProfile(2.0, 4 << 20, 4, True))


@pytest.fixture(autouse=True)
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_hardware", lambda *_: MACHINE)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_plan_as_a_table_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB", "--kv-tokens", "4096")
    data: dict[str, Any] = json.loads(run(capsys, *flags, "--json"))
    plan = data["plan"]
    assert plan["host_used_bytes"] <= 6 * GIB == plan["host_budget_bytes"]
    streamed = sum(layer["num_bytes"] for layer in plan["layers"] if layer["home"] == "disk")
    step = data["steps"]["decode, 1 sequence"]
    assert step["terms"]["disk"] == pytest.approx(streamed / 2e9) and step["binding"] == "disk"
    text = run(capsys, *flags)
    assert f"{plan['num_resident_layers']} layers" in text and "waits for disk" in text
    assert f"{streamed / 2**30:8.2f} GiB" in text and "of a budget of 6.00 GiB" in text


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        (("--shape", "solar-10.7b", "--kv-tokens", "7000"), [1, 3]),
        (("--shape", "solar-10.7b", "--kv-tokens", "65536", "--max-num-seqs", "10"), [1, 8, 10]),
        (("--shape", "tinyllama-1.1b", "--kv-tokens", "65536"), [1, 8, 32]),
        (("--shape", "solar-10.7b", "--kv-tokens", "7000", "--max-model-len", "100"), [1, 8, 32]),
        (("--shape", "lfm2-1.2b", "--kv-tokens", "65536", "--state-memory", "1MiB"), [1, 3]),
    ],
)
def test_steps_are_of_as_many_sequences_as_fit(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], counts: list[int]
) -> None:
    """Of 2048 tokens, or of the longest there can be, and of those with recurrent states."""
    data = json.loads(run(capsys, "plan", "--json", "--host-memory", "20GiB", *flags))
    found = [int(name.split()[1]) for name in data["steps"] if name.startswith("decode, ")]
    if "--state-memory" in flags:
        counts = [1, data["plan"]["num_state_sequences"]]
        assert 1 < counts[1] < 8
    assert found == counts


def test_what_guesses_should_bring(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that waits for the disk has room for guesses; where the memory is full, the draft model's bytes
    are missing to the model."""
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB", "--kv-tokens", "4096")
    alone = json.loads(run(capsys, *flags, "--json"))
    data = json.loads(run(capsys, *flags, "--json", "--draft-model", "tinyllama-1.1b"))
    taken = data["draft_model"]["host_used_bytes"]
    assert taken > 1e9 and data["plan"]["host_budget_bytes"] == 6 * GIB - taken
    assert data["draft_model"]["streamed_bytes"] == 0 == data["draft_model"]["device_used_bytes"]
    assert data["plan"]["num_resident_layers"] < alone["plan"]["num_resident_layers"]
    rows = [(row["num_seqs"], row["source"]) for row in alone["drafting"]]
    assert rows == [(count, source) for count in (1, 2) for source in ("new_text", "quotation")]
    steps = data["steps"]
    for row in data["drafting"]:
        assert row["tokens_per_s"] >= row["plain_tokens_per_s"]
        name = f"decode, {row['num_seqs']} sequence{'s' if row['num_seqs'] > 1 else ''}"
        assert row["plain_s"] == pytest.approx(steps[name]["seconds"])
    assert max(row["num_gained"] for row in data["drafting"]) > 3
    text = run(capsys, *flags, "--draft-model", "tinyllama-1.1b")
    assert f"draft model: {taken / 2**30:.2f} GiB of the host's memory" in text
    plain_s = alone["steps"]["decode, 1 sequence"]["seconds"]
    assert f"a step of 1 sequence takes {duration(plain_s)}" in text
    for row in data["drafting"]:
        assert f"{rate(row['tokens_per_s'])} tokens/s in place of {rate(row['plain_tokens_per_s'])}" in text
    assert json.loads(run(capsys, *flags, "--json", "--speculation", "off"))["drafting"] == []


def test_upper_planes(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """They take no memory, and a small model beside them is left out, with a warning."""
    flags = ["plan", "--shape", "solar-10.7b", "--kv-tokens", "1024", "--max-num-batched-tokens", "128"]
    flags += ["--host-memory", "7GiB", "--weights", "planes", "--json", "--speculative-config"]
    found = list[dict[str, Any]]()
    for small in ({}, {"model": "tinyllama-1.1b"}):
        assert not caplog.records
        asked = json.dumps({"method": "planes", "num_speculative_tokens": 8} | small)
        found.append(json.loads(run(capsys, *flags, asked)))
    assert "tinyllama-1.1b is left out" in caplog.text
    assert found[0]["drafting"] == found[1]["drafting"] and "draft_model" not in found[1]
    assert [row["source"] for row in found[0]["drafting"] if row["num_seqs"] == 1][2:] == ["planes"]
    assert all(layer["home"] == "host" for layer in found[0]["plan"]["layers"] if not layer["is_lower"])
    both = json.dumps({"method": "planes", "model": "tinyllama-1.1b"})
    tight = [("5GiB" if flag == "7GiB" else flag) for flag in flags]
    assert cli.main([*tight, both]) == 1
    assert "name a small draft model in their place" in capsys.readouterr().err
    assert cli.main(["plan", "--shape", "solar-10.7b", "--speculative-config", both]) == 2
    assert "--weights planes" in capsys.readouterr().err


def test_guesses_that_no_server_would_make_are_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of serve."""
    planes = ["--weights", "planes", "--speculative-config", '{"method": "planes"}']
    assert cli.main(["plan", "--shape", "qwen3-30b-a3b", *planes]) == 2
    assert "can't be used with a model with experts yet: upper planes" in capsys.readouterr().err
    assert cli.main(["plan", "--shape", "tinyllama-1.1b", "--speculative-config", '{"method": "mtp"}']) == 2
    assert "has no guesses by multi-token prediction" in capsys.readouterr().err


def test_a_converted_copy_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also as a draft model: no repository is asked for."""
    copy = tmp_path / "models" / "owner" / "name"
    shutil.copytree(SHIPPED["demo"], copy)
    flags = ["plan", "owner/name", "--draft-model", "owner/name", "--offline", "--cache-dir", str(tmp_path)]
    assert cli.main(flags) == 0
    assert "draft model" in capsys.readouterr().out


def test_a_draft_model_that_can_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "solar-10.7b", "--host-memory", "3GiB", "--draft-model"]
    assert cli.main([*flags, "solar-10.7b"]) == 1
    assert "draft model solar-10.7b does not fit into 3.00 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "draft", "words"),
    [
        ("solar-10.7b", "cpm-2", "the part of a draft model can't be used with a model with an encoder"),
        ("cpm-2", "tinyllama-1.1b", "--draft-model can't be used with a model with an encoder"),
        ("solar-10.7b", "gpt-j-6b", "another vocabulary: 50400 tokens, and 32000 in the model"),
        ("qwen2.5-7b", "tinyllama-1.1b", "another vocabulary: 32000 tokens, and 152064 in the model"),
    ],
)
def test_a_pair_that_serve_refuses(
    shape: str, draft: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--shape", shape, "--draft-model", draft]) == 2
    assert words in capsys.readouterr().err


def test_models_of_one_vocabulary_may_be_padded(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5's of 7B has 152,064 rows, smaller ones 151,936; they have the same tokens."""
    flags = ("plan", "--shape", "qwen2.5-7b", "--draft-model", "qwen3-8b", "--host-memory", "18GiB")
    assert "draft model: " in run(capsys, *flags)


def test_tokens_are_compared_where_both_have_tokenizers(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path, tmp_path: Path
) -> None:
    """A folder with as many tokens, one of which is another; and the same without a tokenizer."""
    save_tiny_llama(tmp_path, vocab_size=300)
    save_byte_tokenizer(tmp_path, num_merges=5)
    tokens = tmp_path / "tokenizer.json"
    flags = ["plan", str(tiny_llama), "--draft-model", str(tmp_path)]
    assert cli.main(flags) == 0
    tokens.write_text(tokens.read_text().replace('"a":', '"q8":').replace('"a b"', '"q8 b"'))
    assert cli.main(flags) == 2
    assert "another vocabulary: token " in capsys.readouterr().err
    tokens.unlink()
    assert cli.main(flags) == 0


def test_an_eagle3_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One for a model of 10.7B has matrices of 425M numbers; the model's embedding is no part of it."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "vocab_size": 32000,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
                "intermediate_size": 14336, "draft_vocab_size": 32000, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 2048,
            }
        )
    )  # fmt: skip
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB", "--kv-tokens", "4096")
    other = ("plan", "--shape", "minicpm4-8b", "--draft-model", str(tmp_path))
    assert cli.main([*other]) == 2
    assert "was made for another model: one with 32000 tokens" in capsys.readouterr().err
    flags += ("--draft-model", str(tmp_path))
    data = json.loads(run(capsys, *flags, "--json"))
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    weights = layer + 3 * 4096 * 4096 + 32000 * 4096
    taken = data["draft_model"]["host_used_bytes"]
    held = data["draft_model"]["embedding_bytes"] + data["draft_model"]["head_bytes"]
    held += sum(each["num_bytes"] for each in data["draft_model"]["layers"])
    assert weights < held < 1.01 * weights and held < taken < 1e9
    assert data["plan"]["host_budget_bytes"] == 6 * GIB - taken
    (found,) = (row for row in data["drafting"] if row["source"] == "eagle3" and row["num_seqs"] == 1)
    assert found["num_gained"] > 4
    card = (*flags, "--card", "GTX 1060")
    data = json.loads(run(capsys, *card, "--json"))
    on_card = card_bytes_of(data["draft_model"])
    assert layer < on_card and data["draft_model"]["host_used_bytes"] < taken
    assert f" and {on_card / GIB:.2f} GiB of the GPU's; this plan has the rest" in run(capsys, *card)
    data = json.loads(run(capsys, *card, "--json", "--draft-device", "cpu"))
    assert data["draft_model"]["device_used_bytes"] == 0 and data["plan"]["has_gpu"]


@pytest.mark.slow
def test_a_dflash_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One of two layers for a model of 10.7B: embedding and logits are the model's, and so is the place."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DFlashDraftModel"], "hidden_size": 4096, "vocab_size": 32000,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2,
                "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
                "block_size": 16, "num_target_layers": 48,
                "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 22, 45]},
            }
        )
    )  # fmt: skip
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB", "--kv-tokens", "4096")
    assert cli.main(["plan", "--shape", "minicpm4-8b", "--draft-model", str(tmp_path)]) == 2
    assert "was made for another model: one with 32000 tokens" in capsys.readouterr().err
    flags += ("--draft-model", str(tmp_path))
    data = json.loads(run(capsys, *flags, "--json"))
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    weights = 2 * layer + 3 * 4096 * 4096
    taken = data["draft_model"]["host_used_bytes"]
    held = data["draft_model"]["embedding_bytes"] + data["draft_model"]["head_bytes"]
    held += sum(each["num_bytes"] for each in data["draft_model"]["layers"])
    assert weights < held < 1.01 * weights and held < taken < 1.2e9
    assert data["plan"]["host_budget_bytes"] == 6 * GIB - taken
    (found,) = (row for row in data["drafting"] if row["source"] == "dflash" and row["num_seqs"] == 1)
    assert found["num_gained"] > 4
    data = json.loads(run(capsys, *flags, "--card", "GTX 1060", "--json"))
    assert 2 * layer < card_bytes_of(data["draft_model"]) and data["plan"]["has_gpu"]
    assert cli.main([*flags, "--card", "GTX 1060", "--draft-device", "cpu"]) == 2
    assert "largest matrices are those of the model" in capsys.readouterr().err


def card_bytes_of(plan: dict[str, Any]) -> int:
    return int(plan["device_used_bytes"]) - CUDA_CONTEXT_BYTES


def test_a_draft_model_beside_a_model_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """On the card, where it fits there; else on the processor."""
    flags = ("plan", "--shape", "solar-10.7b", "--card", "GTX 1060", "--kv-tokens", "4096", "--json")
    alone = json.loads(run(capsys, *flags))["plan"]
    data = json.loads(run(capsys, *flags, "--draft-model", "tinyllama-1.1b"))
    taken = card_bytes_of(data["draft_model"])
    assert taken > 1e9 and data["draft_model"]["streamed_bytes"] == 0
    assert data["plan"]["device_budget_bytes"] == alone["device_budget_bytes"] - taken
    assert data["plan"]["device_used_bytes"] < alone["device_used_bytes"]
    data = json.loads(run(capsys, *flags, "--draft-model", "llama-2-7b"))
    assert data["draft_model"]["device_used_bytes"] == 0 < data["draft_model"]["host_used_bytes"]
    assert data["plan"]["device_used_bytes"] == alone["device_used_bytes"]


def test_an_encoder_is_counted_as_a_reader_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    """CPM-2 has 24 layers in its encoder; the matrices for the decoder's cross-attention are no layers."""
    rows = run(capsys, "plan", "--shape", "cpm-2", "--kv-tokens", "1024").splitlines()
    for name in ("24 encoder layers", "24 cross-attention projections", "24 layers"):
        assert any(row.startswith(f"{name} ") for row in rows), rows


@pytest.mark.parametrize("card", [(), ("--card", "GTX 1060")])
def test_what_the_table_shows_adds_up_to_what_is_used(
    capsys: pytest.CaptureFixture[str], card: tuple[str, ...]
) -> None:
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB", *card)
    plan = json.loads(run(capsys, *flags, "--json"))["plan"]
    lines = run(capsys, *flags).splitlines()
    for tier in ("host", "device") if card else ("host",):
        rows = [line.split() for line in lines]
        rows = [row for row in rows if tier in row and "GiB" in row]
        total = sum(float(row[row.index("GiB") - 1]) for row in rows)
        assert total == pytest.approx(plan[f"{tier}_used_bytes"] / 2**30, abs=0.05)


def test_activations_are_estimated_for_the_kernels_that_would_compute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's keep sums in float64; they also serve where nothing was compiled, but not on a GPU."""

    def workspace(*flags: str) -> int:
        text = run(capsys, "plan", "--shape", "solar-10.7b", "--max-model-len", "16", "--json", *flags)
        return int(json.loads(text)["plan"]["workspace_bytes"])

    card = ("--card", "gtx 1060")
    monkeypatch.setattr(kernels, "compiled_builds", lambda: ["generic"])
    native, on_card = workspace(), workspace(*card)
    assert workspace("--kernels", "torch") == pytest.approx(2.5 * native, rel=0.01)
    monkeypatch.setattr(kernels, "compiled_builds", list)
    assert workspace() == workspace("--kernels", "torch") and workspace(*card) == on_card


def test_the_price_of_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """1.80 an hour is 0.0005 a second."""
    flags = ("plan", "--shape", "minicpm-2b", "--host-memory", "6GiB", "--price-per-hour", "1.8")
    data = json.loads(run(capsys, *flags, "--json"))
    prices, steps = data["price_per_million_tokens"], data["steps"]
    name = next(name for name in steps if name.endswith("sequences"))
    assert prices[name] == pytest.approx(steps[name]["seconds"] / int(name.split()[1]) * 500)
    assert prices["prompt of 512"] == pytest.approx(steps["prompt of 512"]["seconds"] / 512 * 500)
    text = run(capsys, *flags)
    assert all(f"{price:.2f} per million tokens" in text for price in prices.values())
    assert "per million tokens" not in run(capsys, *flags[:-2])


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf", "cheap"])
def test_a_price_that_is_none(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--shape", "cpm-1", "--price-per-hour", price])
    assert stopped.value.code == 2 and f"{price} is no price" in capsys.readouterr().err


def test_what_serves_on_a_card_without_dp4a(capsys: pytest.CaptureFixture[str]) -> None:
    """torch's kernels take more memory for activations, and read weights as float64."""
    flags = ("plan", "--shape", "minicpm4-8b", "--json", "--max-model-len", "512")
    old, newer = (json.loads(run(capsys, *flags, "--card", card)) for card in ("P100", "V100"))
    assert any("6.0 and no dp4a" in line for line in old["assumptions"])
    assert not any("dp4a" in line for line in newer["assumptions"])
    assert old["plan"]["workspace_bytes"] > 2 * newer["plan"]["workspace_bytes"]
    slow, fast = (data["steps"]["decode, 1 sequence"]["seconds"] for data in (old, newer))
    assert slow > 5 * fast


def test_a_processor_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything lies in RAM, so the step of one sequence takes what the memory needs, and little more."""
    flags = ("plan", "--shape", "llama-2-7b", "--kernels", "native", "--kv-tokens", "2048", "--processor")
    small, large = (json.loads(run(capsys, *flags, name, "--json")) for name in ("m2", "M2 Pro"))
    for data, gbps in ((small, 102.4), (large, 204.8)):
        assert data["hardware"]["memory_read_gbps"] == pytest.approx(0.75 * gbps)
        assert data["hardware"]["device"] is None
    one, two = (data["steps"]["decode, 1 sequence"]["seconds"] for data in (small, large))
    assert one == pytest.approx(2 * two, rel=0.1)
    text = run(capsys, *flags, "Apple M2 Pro 8GB")
    assert "Apple M2 Pro: figures of its data sheet" in text and "8.0 GiB of memory, 6.0 GiB free" in text
    assert "measured" not in text.split("Apple M2 Pro")[0]


def test_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan", "--shape", "solar-10.7b", "--card", "gtx 1060", "--kv-tokens", "2048")
    assert "processor are those of this machine" in text and "28% of the data sheet's peak" in text
    assert "GTX 1060 6 GB: 6 GiB" in text and "device: " in text
    # Of the host's memory and the link to the card, one is slower on each machine.
    assert "waits for host" in text


def test_no_more_sequences_are_promised_than_have_room(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--shape", "tinyllama-1.1b", "--json")
    for more, numbers in (((), [1, 8, 32]), (("--max-num-seqs", "8"), [1, 8]), (("--kv-tokens", "48"), [1])):
        steps = json.loads(run(capsys, *flags, *more))["steps"]
        assert [int(name.split()[1]) for name in steps if name.startswith("decode")] == numbers


def test_a_context_that_is_longer_than_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--shape", "falcon3-10b", "--host-memory", "6GiB", "--max-model-len", "32000")
    data = json.loads(run(capsys, *flags, "--kv-spill", "nowhere", "--json"))
    plan, steps = data["plan"], data["steps"]
    assert plan["num_kv_tokens"] == 32000 and 0 < plan["num_spilled_tokens"] < 32000
    assert steps["decode at 32000 tokens"]["terms"]["disk"] > steps["decode, 1 sequence"]["terms"]["disk"]
    text = run(capsys, *flags, "--kv-spill", "nowhere")
    assert f"32000 tokens, {plan['num_spilled_tokens']} of them on disk" in text


def test_a_context_that_is_longer_than_a_card_holds(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--shape", "falcon3-10b", "--card", "gtx 1060", "--max-model-len", "32000")
    data = json.loads(run(capsys, *flags, "--kv-spill-memory", "2GiB", "--max-num-seqs", "1", "--json"))
    plan, steps = data["plan"], data["steps"]
    assert 0 < plan["kv_spill_bytes"] <= 2 << 30 and plan["num_kv_tokens"] == 32000
    link = "host to device"
    long, short = (steps[name]["terms"] for name in ("decode at 32000 tokens", "decode, 1 sequence"))
    assert long[link] > short[link]
    share, memory_gbps = plan["attended_share"], data["hardware"]["memory_read_gbps"]
    assert share in (0.0, pytest.approx(1 - 12 / memory_gbps)), "0 where this is not faster on this machine"
    in_ram = share * plan["num_spilled_tokens"] * 2 * 40 * 4 * 256 * 2  # layers, KV heads and their width
    seconds = long.get("processor", 0.0) - short.get("processor", 0.0)
    assert seconds == pytest.approx(in_ram / memory_gbps / 1e9, rel=0.05)
    text = run(capsys, *flags, "--kv-spill-memory", "2GiB", "--max-num-seqs", "1")
    assert ("the processor attends to" in text) == (share > 0)
    assert f"{plan['num_spilled_tokens']} of them on the host" in text
    assert "without room on the GPU" in text


def test_a_folder_needs_no_weights(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    assert "3 layers" in run(capsys, "plan", str(tmp_path))


def test_a_repository_is_planned_from_its_config_alone(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wants to download 20 GB in order to hear that they don't fit."""

    def snapshot_download(repository: str, **options: Any) -> str:
        assert (repository, options["allow_patterns"]) == ("owner/name", CONFIG_PATTERNS)
        return str(tiny_llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert "3 layers" in run(capsys, "plan", "owner/name")


@pytest.mark.parametrize("error", [PermissionError("read-only"), CapacityError("no room")])
def test_a_disk_that_can_not_be_measured_is_assumed_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def measure(folder: Path | None, *_: object) -> HardwareProfile:
        if folder is None:
            return dataclasses.replace(MACHINE, disk=None)
        raise error

    monkeypatch.setattr(machine, "measure_hardware", measure)
    flags = ("plan", "--shape", "solar-10.7b", "--host-memory", "6GiB")
    text = run(capsys, *flags)
    assert f"({error}): 2.0 GB/s assumed" in text and "waits for disk" in text
    assert len(json.loads(run(capsys, *flags, "--json"))["assumptions"]) == 1


def test_rates_that_were_kept_are_told_with_their_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of a busy hour would mislead every later plan without a word."""
    assert "kept" not in run(capsys, "hardware", ".")
    kept = dataclasses.replace(MACHINE, kept_since_s=datetime(2026, 5, 4, 3, 2).timestamp())
    monkeypatch.setattr(machine, "measure_hardware", lambda *_: kept)
    for command in (["hardware", "."], ["plan", "--shape", "cpm-1"]):
        text = run(capsys, *command)
        assert "measured on 2026-05-04 at 03:02 and kept" in text and "hardware --remeasure" in text


def test_rates_of_a_busy_machine_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = dataclasses.replace(MACHINE, others_share=0.43)
    monkeypatch.setattr(machine, "measure_hardware", lambda *_: busy)
    for command in (["hardware", "."], ["plan", "--shape", "cpm-1"]):
        assert run(capsys, *command).count("measured while other work took 43% of the cores") == 1
    assert json.loads(run(capsys, "hardware", ".", "--json"))["others_share"] == 0.43


def test_wrong_usage_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measure_hardware", None)
    shape = ["plan", "--shape", "solar-10.7b"]
    for arguments, message in (
        (["plan"], "no model given"),
        ([*shape, "--card", "Voodoo 2"], "Voodoo 2"),
        ([*shape, "--processor", "Z80"], "Z80"),
        ([*shape, "--kv-tokens", "1", "--kv-cache-memory", "1GiB"], "say the same thing"),
        (["plan", "--shape", "gpt-5"], "gpt-5"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_what_can_not_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--shape", "solar-10.7b", "--device-memory", "6GiB"]) == 2
    assert "without a GPU" in capsys.readouterr().err
    assert cli.main(["plan", "--shape", "solar-10.7b", "--host-memory", "1GiB"]) == 1
    assert "needs at least" in capsys.readouterr().err
    assert cli.main(["hardware", "/nowhere"]) == 2
    assert cli.main(["plan", "--card", "GTX 1060", "--shape", "tinyllama-1.1b", "--weights", "planes"]) == 0


@pytest.mark.parametrize("command", [["hardware", "."], ["plan", "--shape", "solar-10.7b"]])
def test_rates_are_measured_as_the_flags_say(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineConfig] = []

    def measure(folder: Path | None, config: EngineConfig, *_: object) -> HardwareProfile:
        asked.append(config)
        return MACHINE

    monkeypatch.setattr(machine, "measure_hardware", measure)
    run(capsys, *command, "--kernels", "torch", "--activations", "int8", "--threads", "1")
    (config,) = asked
    assert (config.kernels, config.activations, config.num_threads) == ("torch", "int8", 1)


def test_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, "hardware", str(tmp_path))
    assert "disk 2.00 GB/s (direct, 4 MiB blocks, 4 in flight)" in text and "memory 40.0 GB/s" in text
    assert json.loads(run(capsys, "hardware", str(tmp_path), "--json"))["disk"]["depth"] == 4


def test_hardware_shows_the_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(kernels: KernelProfile) -> str:
        found = dataclasses.replace(MACHINE, kernels=kernels)
        monkeypatch.setattr(machine, "measure_hardware", lambda *_: found)
        return run(capsys, "hardware", ".")

    tuning = KernelTuning(few_rows=8)
    text = shown(KernelProfile("avx512", tuning, 0.02))
    assert (
        "processor: avx512 build" in text and f"tuning {tuning} (measured)" in text and "few_rows=8" in text
    )
    assert "(the usual values: other work took 50% of the cores" in shown(
        KernelProfile("avx512", tuning, 0.5)
    )
    assert "(as given)" in shown(KernelProfile("avx512", tuning)) and "not compiled" in shown(
        KernelProfile(None)
    )
    told = json.loads(run(capsys, "hardware", ".", "--json"))["kernels"]
    assert told == {"build": None, "tuning": None, "others_share": None}


def test_a_plan_tells_what_becomes_of_a_folders_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With files the line is of the files, without them of config.json; both say the same."""
    save_tiny_llama(tmp_path)
    expected = "computed by Penstock's own code as LlamaForCausalLM; all rounded (see `penstock report`)"
    lines = []
    for bits in ("int8", "int4"):
        text = run(
            capsys,
            "plan",
            str(tmp_path),
            "--weights",
            bits,
            *(("--group-size", "32") if bits == "int4" else ()),
        )
        lines += [line for line in text.splitlines() if line.startswith("weights: ")]
    assert all(line.startswith("weights: unquantized in the files, in memory ") for line in lines)
    assert all(line.endswith(expected) for line in lines)
    assert "bits each as INT8" in lines[0] and "bits each as INT4" in lines[1]
    (tmp_path / "model.safetensors").unlink()
    (line,) = (row for row in run(capsys, "plan", str(tmp_path)).splitlines() if row.startswith("weights: "))
    assert line == lines[0]
