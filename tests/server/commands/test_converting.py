"""The convert command: what it writes, what it says, its exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import UnsafeCheckpoint, WrongTensor
from penstock.loader.advice import read_advice
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.checkpoint import MANIFEST
from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.conversion.report import ConversionReport
from penstock.weights.formats.model_formats import has_int4
from penstock_server import cli
from penstock_server.commands.converting import run_convert, summary
from penstock_server.facade.loading import load_engine
from penstock_server.facade.source_checksums import begin_checksums
from penstock_server.settings.settings import Settings


def test_convert_resume_and_verify(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(tiny_llama), str(out)]) == 0
    text = capsys.readouterr().out
    assert "read and quantized" in text and "relative error of rounding" in text
    assert f"{len(list(out.glob('*.safetensors')))} files of weights" in text
    assert cli.main(["convert", str(tiny_llama), str(out)]) == 0
    assert "are from an earlier run" in capsys.readouterr().out
    assert cli.main(["convert", "--verify", str(out)]) == 0
    num_files = len(list(out.iterdir())) - 1  # all but the manifest
    assert f"{num_files} files have the checksums with which they were written" in capsys.readouterr().out
    (out / "model-layer-00000.safetensors").write_bytes(b"x" * 8)
    assert cli.main(["convert", "--verify", str(out)]) == 1
    assert "model-layer-00000" in capsys.readouterr().err


def test_a_budget_is_planned_and_kept(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """convert says what plan has said."""
    out, budget = tmp_path / "out", ["--bits", "6"]
    assert cli.main(["plan", str(tiny_llama), *budget]) == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if "for each weight" in line]
    assert cli.main(["convert", str(tiny_llama), str(out), *budget]) == 0
    assert capsys.readouterr().out.splitlines()[0] == planned[0]
    assert cli.main(["convert", str(tiny_llama), str(out), *budget, "--weights", "int4"]) == 2
    assert "give one of the two" in capsys.readouterr().err
    assert cli.main(["plan", str(tiny_llama), "--fit", "1KiB"]) == 2
    assert "needs at least" in capsys.readouterr().err


def test_tensors_that_the_model_does_not_know_are_left_out_on_request(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llama, source)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"adapter": torch.ones(3)}, source / "model.safetensors", {"format": "pt"})
    assert cli.main(["convert", str(source), str(out)]) == 1
    assert "--ignore-unexpected-tensors" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(out), "--ignore-unexpected-tensors"]) == 0
    assert cli.main(["convert", "--verify", str(out)]) == 0


@pytest.mark.parametrize(
    "sampling", [{}, {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05}, {"temp": 0.0}, {"temp": -1.0}]
)
def test_a_gguf_file_s_sampling_parameters_go_with_it(sampling: dict[str, float], tmp_path: Path) -> None:
    """llama-server's, where the file has none or one that no request may have; and for transformers, too."""
    pytest.importorskip("gguf")
    from test_gguf import write_byte_level
    from transformers import GenerationConfig

    file, out = tmp_path / "model.gguf", tmp_path / "out"
    write_byte_level(
        tmp_path / "source", file, {f"general.sampling.{key}": sampling[key] for key in sampling}
    )
    assert cli.main(["convert", str(file), str(out)]) == 0
    advice = read_advice(file)
    assert advice.keys() >= {"temperature", "top_k", "top_p", "min_p"} and read_advice(out) == advice
    theirs = GenerationConfig.from_pretrained(out)
    assert {name: getattr(theirs, name) for name in advice} == advice
    assert theirs.do_sample == (advice["temperature"] != 0) and theirs.eos_token_id == [1, 2]
    assert Tokenizer.load(out).eos_token_ids == {1, 2}
    # A folder that was converted before there was such a file gets it.
    content = (out / "generation_config.json").read_bytes()
    manifest = json.loads((out / MANIFEST).read_text())
    del manifest["files"]["generation_config.json"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    (out / "generation_config.json").unlink()
    assert cli.main(["convert", str(file), str(out)]) == 0
    assert (out / "generation_config.json").read_bytes() == content


def open_files(folder: Path) -> list[str]:
    """Of this process, by /proc."""
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(f"{folder.resolve()}/")]


@pytest.mark.parametrize("command", ["convert", "serve"])
def test_the_source_is_closed(tiny_llama: Path, tmp_path: Path, command: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llama, source)

    def run() -> None:
        if command == "convert":
            run_convert(Settings(model=str(source)), out, None, 0)
        else:
            load_engine(Settings(model=str(source), convert_to=out)).close()

    run()
    assert (out / "config.json").exists() and not open_files(source)
    # A tensor that is not a number is found when the layer is read: nothing may stay open then either.
    entry = next(entry for entry in read_header(source / "model.safetensors") if "2.mlp.down" in entry.name)
    with (source / "model.safetensors").open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(b"\xff" * 8)
    shutil.rmtree(out)
    with pytest.raises(WrongTensor, match="NaN"):
        run()
    assert not open_files(source) and not (out / "config.json").exists()


def test_wrong_usage(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(tiny_llama)]) == 2
    assert "MODEL OUT" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert cli.main(["convert", "--verify", str(tmp_path / "nothing")]) == 2


def test_the_summary_names_the_limit() -> None:
    report = ConversionReport(
        num_files=3, bytes_read=4 * 10**9, bytes_written=2 * 10**9, quantize_s=2.0, write_s=4.0,
        errors={"a": 0.001, "b": 0.02},
    )  # fmt: skip
    text = "\n".join(summary(report, Path("out")))
    assert "4.00 GB at 2.00 GB/s" in text and "0.50 GB/s; writing was the limit" in text
    assert "2.00% (b)" in text


def test_calibrate_by_a_text(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the water runs down the pipe and the wheel turns\n" * 60)
    folders = [str(tmp_path / name) for name in ("plain", "calibrated")]
    assert cli.main(["convert", str(tiny_llama), folders[0]]) == 0
    assert cli.main(["convert", str(tiny_llama), folders[1], "--calibrate", str(text)]) == 0
    assert "before compensation" in capsys.readouterr().out
    files = [(Path(folder) / "model-layer-00000.safetensors").read_bytes() for folder in folders]
    assert files[0] != files[1] and len(files[0]) == len(files[1])
    assert cli.main(["convert", str(tiny_llama), folders[1]]) == 2  # plain rounding would be another model
    assert "another way" in capsys.readouterr().err
    assert cli.main(["convert", str(tiny_llama), folders[1], "--calibrate", str(tmp_path / "none")]) == 2
    assert "can't be read" in capsys.readouterr().err
    assert cli.main(["convert", str(tiny_llama), folders[1], "--calibration-tokens", "9"]) == 2
    text.write_text("short")
    assert cli.main(["convert", str(tiny_llama), str(tmp_path / "new"), "--calibrate", str(text)]) == 2
    assert "some thousands are better" in capsys.readouterr().err


def test_four_bits(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Converted by a command, evaluated, and converted on the way to an engine."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the water runs down the pipe and the wheel turns\n" * 40)
    convert = ["convert", str(tiny_llama), str(out), "--weights", "int4"]
    assert cli.main(convert) == 2
    assert "96 inputs" in (told := capsys.readouterr().err) and "choose --group-size 32" in told
    assert cli.main([*convert, "--group-size", "32", "--calibrate", str(text)]) == 0
    assert cli.main([*convert, "--group-size", "32"]) == 2  # plain rounding would be another model
    capsys.readouterr()
    assert cli.main(["eval", str(out), "--against", str(tiny_llama), "--text", str(text)]) == 0
    told = capsys.readouterr().out
    assert "weights           int4, groups of 32; int8\n" in told and "KL divergence" in told
    settings = Settings(model=str(tiny_llama), weights="int4", group_size=32, convert_to=tmp_path / "plain")
    with load_engine(settings) as engine:
        assert has_int4(engine.model.store.tensors) and (tmp_path / "plain" / "config.json").is_file()


def as_pickle(source: Path, folder: Path) -> Path:
    """A copy of a model whose weights are a file of torch.save; returns the file."""
    shutil.copytree(source, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def test_pickles_are_converted_on_request_alone(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = as_pickle(tiny_llama, tmp_path / "source"), tmp_path / "out"
    for command in (["convert", str(file.parent), str(out)], ["serve", str(file.parent)]):
        assert cli.main(command) == 1
        assert f"penstock convert --allow-pickle {file.parent} NEW_FOLDER" in capsys.readouterr().err
    assert cli.main(["convert", "--allow-pickle", str(file.parent), str(out)]) == 0
    expected = f"SHA-256 of pytorch_model.bin: {hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert expected in capsys.readouterr().out
    assert cli.main(["convert", str(tiny_llama), str(tmp_path / "plain")]) == 0
    assert "SHA-256" not in capsys.readouterr().out
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "plain" / path.name).read_bytes()


def test_checksums_that_were_begun_are_those_of_the_source(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = as_pickle(tiny_llama, tmp_path / "source")
    settings = Settings(model=str(file.parent), allow_pickle=True)
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert begin_checksums(settings).wait() == {file: expected}
    assert begin_checksums(Settings(model=str(file.parent))).wait() == {}  # pickles are not allowed
    assert begin_checksums(Settings(model=str(tiny_llama), allow_pickle=True)).wait() == {}
    for begun in (begin_checksums(settings), Checksums([tiny_llama / "config.json"])):
        run_convert(settings, tmp_path / "out", None, 0, begun)
        assert f"SHA-256 of pytorch_model.bin: {expected}" in capsys.readouterr().out


def test_convert_to_takes_pickles_on_request_alone(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, out = as_pickle(tiny_llama, tmp_path / "source"), tmp_path / "out"
    settings = Settings(model=str(file.parent), convert_to=out)
    with pytest.raises(UnsafeCheckpoint, match="--allow-pickle"):
        load_engine(settings)
    caplog.set_level("INFO")
    load_engine(replace(settings, allow_pickle=True)).close()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in caplog.text
