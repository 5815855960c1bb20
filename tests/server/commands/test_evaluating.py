"""The eval command: what it prints, what it says is missing, what it refuses, the memory that it leaves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_seams import open_mixture, write_mixture
from transformers import AutoTokenizer, LlamaForCausalLM

from penstock.engine import Engine
from penstock.evaluate import GROUP_BYTES, Divergence
from penstock.memory.hardware import HardwareProfile
from penstock.model.registry import open_model
from penstock.weights.conversion.convert import convert
from penstock.weights.quantization_error import QuantizationError
from penstock_server import cli
from penstock_server.commands import evaluating

TEXT = "the water runs down the pipe and the wheel turns. " * 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def int8(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "tiny"
    convert(open_model(tiny_llama).store, folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["eval", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@torch.no_grad()
def plain_perplexity(folder: Path, context: int) -> float:
    """transformers' own, of windows one after the other."""
    ids = AutoTokenizer.from_pretrained(folder).encode(TEXT)
    model, losses = LlamaForCausalLM.from_pretrained(folder).eval(), []
    for start in range(0, len(ids), context):
        window = torch.tensor([ids[start : start + context]])
        log_probabilities = model(window).logits[0, :-1].double().log_softmax(-1)
        losses.append(-log_probabilities.gather(1, window[0, 1:, None]))
    return math.exp(float(torch.cat(losses).mean()))


def test_a_float_checkpoint_is_its_own_reference(
    tiny_llama: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(run(capsys, tiny_llama, "--text", text, "--context", 64, "--json"))
    divergence = data["fidelity"]["divergence"]
    told = "model against fidelity weights num_windows context reference formats activations kv_dtype kernels"
    assert [*data] == told.split() and [*data["fidelity"]] == ["num_tokens", "perplexity", "divergence"]
    assert [*divergence] == ["perplexity", "mean_kl", "max_kl", "top1_agreement", "layer_errors"]
    assert [*data["weights"][0]] == ["name", "relative", "worst_channel", "outlier_ratio"]
    assert divergence["perplexity"] == pytest.approx(plain_perplexity(tiny_llama, 64), rel=1e-5)
    assert (data["reference"], data["context"], len(divergence["layer_errors"])) == ("unquantized", 64, 3)
    assert 0 < divergence["mean_kl"] < divergence["max_kl"]
    assert {"model.embed_tokens.weight", "lm_head.weight"} < {error["name"] for error in data["weights"]}

    lines = run(capsys, tiny_llama, "--text", text, "--context", 64).splitlines()
    assert f"unquantized {divergence['perplexity']:.4f}" in lines[3]
    assert f"{divergence['mean_kl']:.2e} nats" in lines[4]
    (layer,) = (line for line in lines if line.startswith("layer 1"))
    worst = max((e for e in data["weights"] if "layers.1." in e["name"]), key=lambda e: e["relative"])
    assert f"{divergence['layer_errors'][1]:.4%}" in layer
    assert layer.endswith(f"{worst['relative']:.4%}  {worst['name']}")


def test_an_int8_folder_needs_to_be_told_its_original(
    tiny_llama: Path, int8: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    float_data = json.loads(run(capsys, tiny_llama, "--text", text, "--json"))
    alone = json.loads(run(capsys, int8, "--text", text, "--json"))
    assert alone["fidelity"]["divergence"] is None and alone["weights"] == []
    assert alone["fidelity"]["perplexity"] == float_data["fidelity"]["perplexity"]
    assert "--against ORIGINAL" in run(capsys, int8, "--text", text)
    told = json.loads(run(capsys, int8, "--text", text, "--against", tiny_llama, "--json"))
    assert told["fidelity"] == float_data["fidelity"] and told["weights"] == float_data["weights"]


def test_an_int8_folder_against_itself_shows_all_but_the_weights(
    int8: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (int8, "--text", text, "--against", int8)
    fine = json.loads(run(capsys, *flags, "--json"))
    coarse = json.loads(run(capsys, *flags, "--json", "--activations", "int8"))
    assert (fine["reference"], fine["weights"]) == ("dequantized", [])
    assert (fine["activations"], coarse["activations"]) == ("int16", "int8")
    kl = [data["fidelity"]["divergence"]["mean_kl"] for data in (fine, coarse)]
    assert 100 * kl[0] < kl[1]
    output = run(capsys, *flags)
    assert ", dequantized " in output and "the weights have no error in these figures" in output


def test_a_folder_that_is_quantized_in_part_shows_what_is_rounded(
    tiny_llama: Path, int8: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "part"
    shutil.copytree(int8, folder)
    (folder / "model.safetensors.index.json").unlink()
    head = load_file(folder / "model-head.safetensors")
    del head["lm_head.weight_scale"]
    head["lm_head.weight"] = load_file(tiny_llama / "model.safetensors")["lm_head.weight"]
    save_file(head, folder / "model-head.safetensors", {"format": "pt"})
    output = run(capsys, folder, "--text", text, "--against", folder)
    assert "and of the weights that are rounded anew (1 matrices)" in output
    assert [line[:4] for line in output.splitlines() if line.endswith(".weight")] == ["head"]


def test_the_table_of_a_mixture_has_a_line_for_each_layer(tmp_path: Path) -> None:
    """Its experts belong to the layer: here one of them is the layer's worst tensor."""
    write_mixture(tmp_path / "model")
    tensors = open_mixture(tmp_path / "model").store.tensors
    worst = "model.layers.1.experts.3.down.weight"
    errors = tuple(
        QuantizationError(part, 0.5 if part == worst else 0.25, 0.0, 0.0)
        for part in ("prelude.0.down.weight", "model.layers.1.o_proj.weight", worst, "lm_head.weight")
    )
    found = evaluating.layer_table(Divergence(1.0, 0.0, 0.0, 1.0, (0.0,) * 5), errors, tensors)
    assert [line[:9].rstrip() for line in found[1:]] == [*(f"layer {index}" for index in range(5)), "head"]
    assert [line.split("  ")[-1] for line in found[1:]][3] == worst


def test_convert_to_is_evaluated_against_its_source(
    tiny_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--text", text, "--json")
    expected = json.loads(run(capsys, tiny_llama, *flags))
    assert json.loads(run(capsys, tiny_llama, *flags, "--convert-to", tmp_path / "out")) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", "/nowhere"], "the text /nowhere can't be read"),
        (["--context", "1"], "context is 1"),
        (["--context", "0"], "context is 0"),
        (["--context", "64", "--stride", "65"], "stride of 1 to 64"),
        (
            ["--context", "128", "--max-model-len", "64"],
            "windows have 128 tokens, and the context here is 64",
        ),
        (["--context", "400"], "the context here is 256"),
    ],
)
def test_wrong_usage(
    flags: list[str], message: str, tiny_llama: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(tiny_llama), "--text", str(text), *flags]) == 2
    assert message in capsys.readouterr().err


def test_texts_that_can_not_be_scored(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, message in ((b"a", "1 tokens, which is too short"), (b"\xff\xfe", "not a text in UTF-8")):
        (tmp_path / "text").write_bytes(content)
        assert cli.main(["eval", str(tiny_llama), "--text", str(tmp_path / "text")]) == 2
        assert message in capsys.readouterr().err


def test_another_model_is_refused(
    tiny_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    flags = ["--text", str(text), "--against", str(tmp_path / "other"), "--ignore-unexpected-tensors"]
    assert cli.main(["eval", str(tiny_llama), *flags]) == 2
    assert "num_layers is 3 in the model and 2" in capsys.readouterr().err


def test_the_engine_leaves_room_for_the_reference(
    tiny_llama: Path, int8: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    free, seen = 6 << 30, []
    real, hardware = Engine.load, HardwareProfile(2, 8 << 30, free, 0.0, 0.0)

    def load(*arguments: Any, hardware: HardwareProfile, **rest: Any) -> Engine:
        seen.append(hardware.free_ram_bytes)
        return real(*arguments, hardware=hardware, **rest)

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(evaluating, "capacities", lambda: dataclasses.replace(hardware))
    run(capsys, tiny_llama, "--text", text)
    run(capsys, int8, "--text", text)
    assert seen[0] <= free - GROUP_BYTES and seen[1] == free
