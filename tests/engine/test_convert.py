"""Conversion: the same bits, whatever interrupts it, and a folder that transformers opens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build
from units import layer_bytes, layer_key

from penstock.config import EngineConfig, WeightBits
from penstock.engine import Engine
from penstock.errors import CapacityError, CheckpointError, ConfigError, CorruptFile, MissingTensor
from penstock.generation.requests.generation_request import SamplingParams
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.pages import PAGE
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.checkpoint import MANIFEST
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.conversion import whole_file
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.manifest import verify
from penstock.weights.conversion.unit_files import unit_files
from penstock.weights.quantization_error import quantization_errors
from penstock.weights.store import WeightStore
from penstock.weights.tiers.readers import StoreReader
from warm_python import run_warm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 20], [7] * 40]
#: Fused and separate matrices, biases, tied and untied heads, rows per head, transposed weights, positions.
KINDS = [
    "Llama",
    "Llama, tied, biases",
    "Phi-3",
    "Gemma 2",
    "GPT-NeoX",
    "GPT-2",
    "OPT, norms behind, narrow embedding",
    "StableLM, parallel, head norms",
    "Phi",
    "BLOOM, untied",
    "Qwen3",
]


class Ids:
    """Instead of a tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def store_of(folder: Path, group_size: int | None = None, weights: WeightBits = "int8") -> WeightStore:
    return open_model(folder, group_size=group_size, weights=weights).store


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if whole_file.is_leftover(path)]


def same_but_for_the_source(one: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """Manifests tell where the source lay."""
    return {n: c for n, c in one.items() if n != MANIFEST} == {
        n: c for n, c in other.items() if n != MANIFEST
    }


#: Each kind with a scale per channel or with groups, in turn.
SCALED = [(kind, (None, 32)[index % 2]) for index, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "group_size"), [*SCALED, (KINDS[0], 32)])
def test_a_converted_model_computes_the_same_bits(kind: str, group_size: int | None, tmp_path: Path) -> None:
    build(kind, tmp_path / "source")
    convert(store_of(tmp_path / "source", group_size), tmp_path / "target")
    store = store_of(tmp_path / "target")
    ranges = [store.contiguous_unit(layer_key(index)) for index in range(store.num_layers)]
    assert all(found is not None and found.offset % PAGE == 0 for found in ranges)
    tokenizer: Any = Ids()
    answers = []
    for folder, config in (
        ("source", EngineConfig(group_size=group_size)),
        ("target", EngineConfig()),
        ("target", EngineConfig(num_resident_layers=1)),
    ):
        with Engine.load(tmp_path / folder, config, tokenizer=tokenizer) as engine:
            answers.append([(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("kind", "group_size"),
    [scaled for scaled in [*SCALED, (KINDS[0], 32)] if scaled[0] != "GPT-2"],  # whose layers are no Linear
)
def test_transformers_opens_it_and_computes_the_same(
    kind: str, group_size: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    build(kind, tmp_path / "source")
    convert(store_of(tmp_path / "source", group_size), tmp_path / "target")
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer: Any = Ids()
    with Engine.load(tmp_path / "target", EngineConfig(kv_dtype="float32"), tokenizer=tokenizer) as engine:
        for prompt in PROMPTS:
            (mine,) = engine.generate([prompt], GREEDY)
            with torch.inference_mode():
                logits = opened(torch.tensor([prompt + mine.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits.double(), -1)
            for step, (token, logprobs) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
                spread = float(logits[step].max() - logits[step].min())
                assert abs(logprobs.logprob - float(expected[step, token])) <= 1e-3 * spread


@pytest.mark.parametrize("kind", ["Llama, tied, biases", "Phi-3", "GPT-NeoX", "GPT-2"])
def test_four_bits_are_kept_and_are_the_same_to_transformers(kind: str, tmp_path: Path) -> None:
    """A fused and a tied model, a head that transformers calls otherwise, and transposed weights."""
    pytest.importorskip("compressed_tensors")
    import transformers

    build(kind, tmp_path / "source")
    source = store_of(tmp_path / "source", 32, "int4")
    convert(source, tmp_path / "target")
    with pytest.raises(ConfigError, match="quantized in another way"):
        convert(store_of(tmp_path / "source", 32), tmp_path / "target")
    opened = open_model(tmp_path / "target")
    for index in range(source.num_layers):
        buffers = [torch.empty(layer_bytes(source), dtype=torch.uint8) for _ in range(2)]
        for store, buffer in zip((source, opened.store), buffers, strict=True):
            store.read_unit(layer_key(index), buffer)
        assert torch.equal(*buffers)
        place = opened.store.contiguous_unit(layer_key(index))
        assert place is not None and place.offset % PAGE == 0
    if kind == "GPT-2":  # its layers are no Linear
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, UnquantizedModel(opened).forward(ids).logits)


def test_it_reports_and_writes_a_manifest(tiny_llama: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    store = store_of(tiny_llama)
    report = convert(store, tmp_path / "new" / "out", lambda *seen: progress.append(seen))
    assert report.num_files == len(progress) and report.num_resumed == 0
    assert progress[-1][0] == progress[-1][1] and progress == sorted(progress)
    expected = {error.name: error.relative for error in quantization_errors(store_of(tiny_llama))}
    for name, relative in report.errors.items():
        if name in expected:  # the library's report has fused matrices as one
            assert relative == pytest.approx(expected[name], rel=1e-4)
    assert any(name in expected for name in report.errors)
    manifest = json.loads((tmp_path / "new" / "out" / MANIFEST).read_text())
    bytes_written = 0
    for name, entry in manifest["files"].items():
        assert (tmp_path / "new" / "out" / name).stat().st_size == entry["file_bytes"]
        is_weights = name.endswith(".safetensors")
        assert ("errors" in entry) == is_weights
        bytes_written += entry["file_bytes"] if is_weights else 0
    assert report.bytes_written == bytes_written
    for pattern in ("tokenizer.json", "generation_config.json"):
        if (tiny_llama / pattern).exists():
            assert (tmp_path / "new" / "out" / pattern).read_bytes() == (tiny_llama / pattern).read_bytes()


@pytest.mark.parametrize("value", [1e30, -3e38, 1e-40])
def test_huge_and_tiny_weights_have_errors_that_are_numbers(value: float, tmp_path: Path) -> None:
    build("GPT-2", tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.mlp.c_fc.weight"][3, 5] = value
    tensors["transformer.h.1.mlp.c_fc.weight"][:] = value
    save_file(tensors, path, {"format": "pt"})
    report = convert(store_of(tmp_path / "source"), tmp_path / "target")
    assert report.errors and all(0 <= error < 2 for error in report.errors.values())


def test_torch_has_its_threads_back(tiny_llama: Path, tmp_path: Path) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        convert(store_of(tiny_llama), tmp_path / "out", lambda *_: seen.append(torch.get_num_threads()))
        with pytest.raises(KeyboardInterrupt):
            convert(store_of(tiny_llama), tmp_path / "other", stop_after(1))
        assert set(seen) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_int8_checkpoints_are_laid_out_anew(tiny_llama: Path, tmp_path: Path) -> None:
    convert(store_of(tiny_llama), tmp_path / "one")
    report = convert(store_of(tmp_path / "one"), tmp_path / "two")
    assert same_but_for_the_source(content(tmp_path / "one"), content(tmp_path / "two"))
    assert not report.errors


def test_verify_finds_a_flipped_bit_in_any_byte(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(store_of(tiny_llama), out)
    names = sorted(path.name for path in out.iterdir() if path.name != MANIFEST)
    assert verify(out) == len(names) > 8
    for name in names:
        good = (out / name).read_bytes()
        for position in (9, len(good) // 2, len(good) - 1):  # 9 is in a header
            bad = bytes([good[position] ^ 4])
            (out / name).write_bytes(good[:position] + bad + good[position + 1 :])
            with pytest.raises(CorruptFile, match=f"{name} is not what was written"):
                verify(out)
        (out / name).unlink()
        missing = "not finished" if name == "config.json" else f"{name} is missing"
        with pytest.raises(CheckpointError, match=missing):
            verify(out)
        (out / name).write_bytes(good)
    assert verify(out)
    with pytest.raises(CheckpointError, match="not made by penstock convert"):
        verify(tiny_llama)


def test_an_unfinished_conversion_is_not_verified(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(store_of(tiny_llama), tmp_path / "out", stop_after(5))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5
    with pytest.raises(CheckpointError, match="not finished; run `penstock convert .*, with the same flags"):
        verify(tmp_path / "out")


def test_a_finished_folder_is_not_touched(tiny_llama: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llama, source)
    convert(store_of(source), out)
    before, times = content(out), {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    report = convert(store_of(source), out)
    assert report.num_resumed == report.num_files == 5 and report.errors
    assert times == {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    # What is not what it was is written again, and nothing else.
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (out / "tokenizer.json").write_text("{")
    (out / "model-layer-00001.safetensors").unlink()
    assert convert(store_of(source), out).num_resumed == 4
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    after = content(out)
    assert all(after[name] == before[name] for name in before if name != MANIFEST)
    assert (out / "model-head.safetensors").stat().st_mtime_ns == times[out / "model-head.safetensors"]
    assert verify(out) == len(after) - 1


def as_another_version(folder: Path) -> None:
    """What a Penstock before the first release wrote: checksums of tensors alone, sources with times."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["format_version"] = 1
    files = {name: entry for name, entry in manifest["files"].items() if "errors" in entry}
    manifest["files"] = {name: entry | {"sha256": "ab"} for name, entry in files.items()}
    sources = manifest["source"]["files"]
    manifest["source"]["files"] = {name: [of[0], 1700000000] for name, of in sources.items()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_folder_of_another_version_is_served_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(store_of(tiny_llama), out)
    as_another_version(out)
    before = content(out)
    report = convert(store_of(tiny_llama), out)
    assert report.num_resumed == report.num_files and content(out) == before
    assert open_model(out).store.contiguous_unit(layer_key(0))
    with pytest.raises(CheckpointError, match=r"another version.*1, this one's 2.*convert the model"):
        verify(out)
    (out / "config.json").unlink()
    with pytest.raises(ConfigError, match="begun by another version.*delete the folder"):
        convert(store_of(tiny_llama), out)
    with pytest.raises(ConfigError, match="another model.* or has changed"):
        build("Llama", tmp_path / "llama")
        convert(store_of(tmp_path / "llama"), out)


def test_other_folders_and_other_sources_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        convert(store_of(tiny_llama), tmp_path / "full")
    convert(store_of(tiny_llama), tmp_path / "out")
    shutil.copytree(tiny_llama, tmp_path / "sister")
    weights = tmp_path / "sister" / "model.safetensors"
    start, data = min(entry.offset for entry in read_header(weights)), weights.read_bytes()
    weights.write_bytes(data[:start] + bytes(byte ^ 1 for byte in data[start:]))
    with pytest.raises(ConfigError, match="another model.* or has changed"):
        convert(store_of(tmp_path / "sister"), tmp_path / "out")
    shutil.copytree(tiny_llama, tmp_path / "changed")
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="another model.* or has changed"):
        convert(store_of(tmp_path / "changed"), tmp_path / "out")


def stop_after(num_files: int) -> Callable[[int, int], None]:
    """A progress report that ends the conversion."""

    def report(done: int, total: int, count: list[int] = []) -> None:  # noqa: B006
        count.append(done)
        if len(count) == num_files:
            raise KeyboardInterrupt

    return report


def overwrite(path: Path) -> None:
    """One byte in place. The size stays."""
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))


def replace(path: Path) -> None:
    """By a file of the same content: nobody can tell what was read of which."""
    shutil.copyfile(path, path.with_name("new"))
    path.with_name("new").replace(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", overwrite),
        ("model.safetensors", replace),
        ("config.json", overwrite),
        ("config.json", replace),
        ("tokenizer.json", overwrite),
    ],
)
def test_a_source_that_changes_meanwhile(
    tiny_llama: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    """Neither a model nor a half of one is left, and another run makes a whole one."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llama, source)
    if name == "tokenizer.json":
        (source / name).write_text("{}")

    def report(done: int, total: int) -> None:
        if done == total:  # the last file of weights is there
            change(source / name)

    with pytest.raises(CorruptFile, match=rf"{name} was changed .* is deleted: run it again"):
        convert(store_of(source), out, report)
    assert list(out.iterdir()) == []
    shutil.copytree(tiny_llama, source, dirs_exist_ok=True)
    convert(store_of(source), out)
    convert(store_of(tiny_llama), tmp_path / "whole")
    assert same_but_for_the_source(content(out), content(tmp_path / "whole"))


def test_a_fault_of_the_disk_deletes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """What was written before is still of this source, and the next run goes on."""

    def report(done: int, total: int) -> None:
        raise CorruptFile("reading failed: Input/output error")

    with pytest.raises(CorruptFile, match="Input/output error$"):
        convert(store_of(tiny_llama), tmp_path / "out", report)
    assert convert(store_of(tiny_llama), tmp_path / "out").num_resumed == 1


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_file_that_changes_between_header_and_weights(
    tiny_llama: Path, tmp_path: Path, is_converted: bool
) -> None:
    """Its tensors need not lie where the header said, so nothing of it is read."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    if is_converted:
        convert(store_of(folder), tmp_path / "out")
        folder = tmp_path / "out"
    opened = open_model(folder)
    file = opened.store.source.entry("model.layers.0.input_layernorm.weight").file
    replace(file)
    with contextlib.closing(StoreReader(opened.store)) as reader:
        buffer = aligned_buffer(opened.store.units[layer_key(0)].layout.num_bytes)
        with pytest.raises(CorruptFile, match=f"{file.name} was changed"):
            reader.submit(layer_key(0), buffer).result()


@pytest.mark.parametrize("place", ["moved", "touched", "hub cache"])
def test_it_goes_on_wherever_the_source_lies_now(tiny_llama: Path, tmp_path: Path, place: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_llama, source)
    with pytest.raises(KeyboardInterrupt):
        convert(store_of(source), out, stop_after(2))
    if place == "moved":
        source = source.rename(tmp_path / "elsewhere")
    elif place == "touched":
        os.utime(source / "model.safetensors", (1, 1))
    else:  # where files are links to blobs, which are fetched anew when the cache was deleted
        (tmp_path / "snapshots" / "4fe1").mkdir(parents=True)
        for path in source.rename(tmp_path / "blobs").iterdir():
            os.utime(path, (1, 1))
            (tmp_path / "snapshots" / "4fe1" / path.name).symlink_to(path)
        source = tmp_path / "snapshots" / "4fe1"
    report = convert(store_of(source), out)
    assert report.num_resumed == 2
    assert json.loads((out / MANIFEST).read_text())["source"]["folder"] == str(source)
    convert(store_of(tiny_llama), tmp_path / "expected")
    assert same_but_for_the_source(content(out), content(tmp_path / "expected"))


def test_a_disk_that_is_too_small_is_told_first(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))  # type: ignore
    with pytest.raises(CapacityError, match=r"needs 0\.\d\d MiB more, .* but only 0\.98 KiB are free"):
        convert(store_of(tiny_llama), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_disk_that_fills_up_loses_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(store_of(tiny_llama), tmp_path / "expected")
    real, left = os.write, [6]

    def write(descriptor: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CapacityError, match="No space left on device.*same command again"):
        convert(store_of(tiny_llama), tmp_path / "out")
    assert not leftovers(tmp_path / "out")
    with pytest.raises(CheckpointError, match="not finished; run `penstock convert .*, with the same flags"):
        open_model(tmp_path / "out")
    monkeypatch.undo()
    report = convert(store_of(tiny_llama), tmp_path / "out")
    assert report.num_resumed > 0
    assert same_but_for_the_source(content(tmp_path / "out"), content(tmp_path / "expected"))


KILL_EVERYWHERE = """
import gc, json, os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from penstock.model.registry import open_model
from penstock.weights.checkpoints.checkpoint import CONFIG, MANIFEST
from penstock.weights.conversion import manifest, whole_file
from penstock.weights.conversion.convert import convert

source, out, expected = map(Path, sys.argv[1:])
CALLS = ("mkdir", "open", "write", "fdatasync", "replace", "fsync", "unlink")

def die_at(point):
    \"\"\"SIGKILL in the midst of a system call: a write that was done by half, others not at all.\"\"\"
    def wrap(name, real):
        def call(*arguments, **options):
            nonlocal point
            if name == "open" and not str(arguments[0]).startswith(str(out)):
                return real(*arguments, **options)
            point -= 1
            if point < 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call
    for name in CALLS:
        # What was written survives a process; waiting for the disk would only take time.
        is_sync = name in ("fsync", "fdatasync")
        setattr(os, name, wrap(name, (lambda _: None) if is_sync else getattr(os, name)))

def run(point):
    \"\"\"Whether a conversion came through.\"\"\"
    child = os.fork()
    if child == 0:
        die_at(point)
        convert(open_model(source).store, out)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

def check(point):
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    for name in names - {MANIFEST, whole_file.LOCK}:
        if not name.endswith(whole_file.TEMPORARY):
            assert (out / name).read_bytes() == (expected / name).read_bytes(), (point, name)
    if CONFIG in names:
        assert names >= {path.name for path in expected.iterdir()}, (point, names)
        assert manifest.verify(out) == manifest.verify(expected), point
    return len(names)

gc.freeze()  # else each child collects garbage among all modules, which takes longer than the conversion
point, seen = 0, set()
while not run(point):
    seen.add(check(point))
    if run(point):  # going on takes fewer steps
        check(point)
    else:
        seen.add(check(point))
        assert run(1 << 30)
    assert {path.name for path in out.iterdir()} == {path.name for path in expected.iterdir()}, point
    check(point)
    shutil.rmtree(out)
    point += 1
print(json.dumps({"points": point, "stages": len(seen)}))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """kill -9 at each system call that writes, and again in the run that goes on: never a file that looks
    whole and is not, no model before everything is there, and in the end the same bytes and nothing else."""
    build("Llama", tmp_path / "source", num_hidden_layers=1)
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    convert(store_of(tmp_path / "source"), tmp_path / "expected")
    run = run_warm("-c", KILL_EVERYWHERE, *(str(tmp_path / name) for name in ("source", "out", "expected")))
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    num_files = len(list((tmp_path / "expected").iterdir()))
    assert found["points"] > 6 * num_files and found["stages"] > num_files


def test_a_source_at_fault_is_named(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tiny_llama)
    monkeypatch.delitem(store.checkpoint.entries, "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(MissingTensor, match=r"layers\.1\.mlp\.down_proj"):
        convert(store, tmp_path / "out")


def test_half_written_files_have_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the same file is written twice at the same time."""
    seen = []

    def fdatasync(descriptor: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        if len(seen) == 1:
            whole_file.write(tmp_path / "x", [b"other", bytes(3)])
            assert (tmp_path / "x").read_bytes() == b"other" + bytes(3)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    whole_file.write(tmp_path / "x", [b"head", bytes(range(10))])
    assert [len(names) for names in seen] == [1, 2] and not any("x" in names for names in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"head" + bytes(range(10))


def test_the_files_are_those_of_the_model(tiny_llama: Path) -> None:
    names = [file.name for file in unit_files(store_of(tiny_llama).tensors)]
    assert names[0] == "model-embedding.safetensors" and names[-1].endswith("head.safetensors")
    assert names[1:4] == [f"model-layer-{index:05d}.safetensors" for index in range(3)]


def test_killed_before_the_manifest_was_whole(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / f"{MANIFEST}.0123{whole_file.TEMPORARY}").write_text('{"format_')
    (tmp_path / whole_file.LOCK).touch()
    convert(store_of(tiny_llama), tmp_path)
    verify(tmp_path)
    assert not leftovers(tmp_path)


def test_one_conversion_at_a_time(tiny_llama: Path, tmp_path: Path) -> None:
    convert(store_of(tiny_llama), tmp_path / "expected")
    out, num_refused = tmp_path / "out", 0

    def convert_as_well(done: int, total: int) -> None:
        nonlocal num_refused
        with pytest.raises(CheckpointError, match="another process is converting"):
            convert(store_of(tiny_llama), out)
        num_refused += 1

    convert(store_of(tiny_llama), out, convert_as_well)
    assert num_refused > 2 and not leftovers(out)
    assert same_but_for_the_source(content(out), content(tmp_path / "expected"))


def test_a_lock_is_the_one_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its owner may end, and a third may come."""
    flock, holders = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not holders:
            (tmp_path / whole_file.LOCK).unlink()
            holders.append(os.open(tmp_path / whole_file.LOCK, os.O_RDWR | os.O_CREAT))
            flock(holders[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="another process"), whole_file.lock(tmp_path):
        pass
    os.close(holders[0])
    with whole_file.lock(tmp_path):
        assert leftovers(tmp_path) == [whole_file.LOCK]
    assert not leftovers(tmp_path)


def test_what_is_not_ours_stays(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "film.part").write_text("half a download")
    with pytest.raises(ConfigError, match="not empty"):
        convert(store_of(tiny_llama), tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        convert(store_of(tiny_llama), tmp_path / "film.part")
    with pytest.raises(ConfigError, match="Not a directory"):
        convert(store_of(tiny_llama), tmp_path / "film.part" / "out")
    assert content(tmp_path) == {"film.part": b"half a download"}
