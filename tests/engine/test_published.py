"""Weights in the forms in which they were published: Hugging Face's .bin, Megatron's shards, ModelCenter's
names, and BMInf's own files."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mutated_files import read_mutated
from published_files import (
    bminf_cpm1,
    bminf_t5,
    cpm1_ranks,
    cpm2_ranks,
    cpm_live_ant,
    model_center,
    save_ranks,
    write_bminf,
)
from safetensors.torch import load_file, save_file
from test_convert import GREEDY, PROMPTS, Ids, stop_after
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.cpm.soft_prompt import read_soft_prompt
from penstock.engine import Engine
from penstock.errors import (
    CheckpointNotFound,
    CorruptFile,
    PenstockError,
    UnsafeCheckpoint,
    UnsupportedModel,
    WrongTensor,
)
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.checkpoint import MANIFEST
from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.checkpoints.formats import open_checkpoint, read_config
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.manifest import verify

Tensors = dict[str, Tensor]


def save_bin(folder: Path, num_parts: int = 1, is_zip: bool = True, dtype: torch.dtype | None = None) -> None:
    """Put pytorch_model.bin, or its parts, in place of a folder's safetensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()}
    if num_parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        return
    names, weight_map = list(tensors), {}
    for part in range(num_parts):
        file = f"pytorch_model-{part + 1:05d}-of-{num_parts:05d}.bin"
        mine = names[part::num_parts]
        torch.save(
            {name: tensors[name] for name in mine}, folder / file, _use_new_zipfile_serialization=is_zip
        )
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def read_all(folder: Path) -> Tensors:
    """All tensors of a folder, by transformers' names; each read whole and in uneven pieces."""
    found = {}
    with open_checkpoint(folder, allow_pickle=True) as checkpoint:
        for name, entry in checkpoint.entries.items():
            whole = found[name] = checkpoint.read(name)
            assert entry.shape == whole.shape
            cuts = [0, 1, len(whole) // 2 + 1, len(whole)]
            pieces = [checkpoint.read_rows(name, a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]
            assert torch.equal(torch.cat(pieces), whole), name
    return found


def converted(folder: Path, target: Path, **options: Any) -> dict[str, bytes]:
    """The files of a conversion without the manifest, which names the source."""
    store = open_model(folder, allow_pickle=True, **options).store
    with store.checkpoint:
        convert(store, target)
    assert verify(target)
    return {path.name: path.read_bytes() for path in sorted(target.iterdir()) if path.name != MANIFEST}


# ---- Hugging Face's .bin


@pytest.mark.parametrize(
    ("kind", "num_parts", "is_zip"),
    [("Llama", 1, True), ("Llama", 1, False), ("Llama", 3, True), ("Llama, tied, biases", 3, False),
     ("Phi-3", 1, True), ("GPT-2", 1, False), ("GPT-2", 3, True), ("Gemma 2", 1, True),
     ("BLOOM, untied", 3, True)],
)  # fmt: skip
def test_bin_is_converted_to_the_same_bits_as_safetensors(
    kind: str, num_parts: int, is_zip: bool, tmp_path: Path
) -> None:
    build(kind, tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "bin")
    save_bin(tmp_path / "bin", num_parts, is_zip)
    assert converted(tmp_path / "bin", tmp_path / "one") == converted(tmp_path / "plain", tmp_path / "two")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    build("Llama", tmp_path / "bin")
    expected = load_file(tmp_path / "bin" / "model.safetensors")
    save_bin(tmp_path / "bin", dtype=dtype)
    found = read_all(tmp_path / "bin")
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["Llama", "GPT-2"])
def test_turned_matrices_and_tied_heads(kind: str, tmp_path: Path) -> None:
    """Matrices that lie column by column, and a head that is the embedding's very matrix."""
    build(kind, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    turned = {
        name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in tensors.items()
    }
    if kind == "GPT-2":
        turned["lm_head.weight"] = turned["transformer.wte.weight"]
    torch.save(turned, tmp_path / "bin" / "pytorch_model.bin")
    assert converted(tmp_path / "bin", tmp_path / "one") == converted(tmp_path / "plain", tmp_path / "two")


def test_without_permission_it_says_what_to_do(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    save_bin(tmp_path, 2)
    with pytest.raises(
        UnsafeCheckpoint, match=r"only as pickles.*penstock convert --allow-pickle .* NEW_FOLDER"
    ):
        open_model(tmp_path)
    with pytest.raises(UnsafeCheckpoint, match="--allow-pickle"):
        Engine.load(tmp_path, EngineConfig(), tokenizer=Ids())  # type: ignore[arg-type]
    assert open_model(tmp_path, allow_pickle=True).spec.num_layers == 3


def test_an_engine_streams_from_a_bin_as_from_safetensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build("Llama", tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "bin")
    save_bin(tmp_path / "bin", 2)
    answers = []
    caplog.set_level("INFO")
    for name in ("plain", "bin"):
        config = EngineConfig(allow_pickle=True, num_resident_layers=1, num_kv_tokens=512, device="cpu")
        with Engine.load(tmp_path / name, config, tokenizer=Ids()) as engine:  # type: ignore[arg-type]
            answers.append([(a.token_ids, a.logprobs) for a in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert not open_model(tmp_path, allow_pickle=True).store.checkpoint.pickles


def test_other_names_and_what_a_training_leaves(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    save_bin(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "weights.ckpt")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name)
    assert [path.name for path in open_model(tmp_path, allow_pickle=True).store.checkpoint.pickles] == [
        "weights.ckpt"
    ]
    shutil.copy(tmp_path / "weights.ckpt", tmp_path / "other.ckpt")
    with pytest.raises(CheckpointNotFound, match="2 files that could be the model: other.ckpt, weights.ckpt"):
        open_model(tmp_path, allow_pickle=True)


def test_a_part_that_is_missing_and_a_tensor_that_is_in_two(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    save_bin(tmp_path, 2)
    index, first, second = sorted(tmp_path.glob("pytorch_model*"), key=lambda path: path.suffix != ".json")
    first.rename(tmp_path / "away")
    with pytest.raises(CheckpointNotFound, match=f"lacks 1 of the 2 weight files.*{first.name}"):
        open_model(tmp_path, allow_pickle=True)
    shutil.copy(second, first)
    with pytest.raises(CorruptFile, match="is in both"):
        open_model(tmp_path, allow_pickle=True)
    index.unlink()
    (tmp_path / "away").rename(first)
    assert open_model(tmp_path, allow_pickle=True).spec.num_layers == 3  # the parts' names are enough


def test_a_stopped_conversion_goes_on(tmp_path: Path) -> None:
    build("Llama", tmp_path / "bin")
    save_bin(tmp_path / "bin")
    whole = converted(tmp_path / "bin", tmp_path / "whole")
    for num_files in (1, 3):
        target = tmp_path / f"stopped {num_files}"
        store = open_model(tmp_path / "bin", allow_pickle=True).store
        with store.checkpoint, pytest.raises(KeyboardInterrupt):
            convert(store, target, stop_after(num_files))
        assert converted(tmp_path / "bin", target) == whole
    file = tmp_path / "bin" / "pytorch_model.bin"
    tensors = torch.load(file)
    tensors["model.norm.weight"] += 1
    torch.save(tensors, file)
    with pytest.raises(PenstockError, match="has changed since"):
        converted(tmp_path / "bin", tmp_path / "stopped 1")


def test_checksums_are_those_of_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for file in files:
        file.write_bytes(random.Random(str(file)).randbytes(9 << 20))
    expected = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert Checksums(files).wait() == expected
    caplog.set_level("INFO")
    Checksums(files, is_logged=True).wait()
    assert all(checksum in caplog.text for checksum in expected.values())
    Checksums(files).close()
    with pytest.raises(CorruptFile, match="none.bin can't be read"):
        Checksums([tmp_path / "none.bin"]).wait()


def test_a_file_that_is_cut_while_its_checksum_is_computed(tmp_path: Path) -> None:
    """The piece that is missing is not mapped: the system would kill the process."""
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(9 << 20))
    pieces = Checksums([])._pieces(file)
    assert len(next(pieces)) == 8 << 20
    file.write_bytes(b"")
    with pytest.raises(OSError, match="was cut while it was read"):
        next(pieces)


def test_memory_of_reading_is_a_few_megabytes(tmp_path: Path) -> None:
    """Headers alone are read when a folder is opened."""
    torch.save({f"t{i}": torch.zeros(1 << 20) for i in range(32)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    open_checkpoint(tmp_path, allow_pickle=True)
    tracemalloc.start()
    try:
        open_checkpoint(tmp_path, allow_pickle=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---- Megatron's shards


@pytest.fixture
def gpt2(tmp_path: Path) -> Tensors:
    """A GPT-2 with CPM-1's vocabulary in small; its folder is tmp_path / "gpt2"."""
    model = build("GPT-2", tmp_path / "gpt2", n_embd=128, n_head=2)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.fixture
def t5() -> Tensors:
    config = transformers.MT5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=8,
        relative_attention_num_buckets=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.MT5ForConditionalGeneration(config)
    tensors = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    return {name: value for name, value in tensors.items() if "embed_tokens" not in name}


@pytest.mark.parametrize(
    ("num_ranks", "is_zip", "inside"), [(1, True, ""), (2, True, ""), (2, False, "80000")]
)
def test_cpm1_is_merged_to_gpt2(
    num_ranks: int, is_zip: bool, inside: str, gpt2: Tensors, tmp_path: Path
) -> None:
    """Converted to the same bits as GPT-2's own folder; config.json comes from the tensors' shapes."""
    save_ranks(cpm1_ranks(gpt2, num_ranks), tmp_path / "cpm1" / inside, is_zip)
    ours = converted(tmp_path / "cpm1", tmp_path / "one")
    theirs = converted(tmp_path / "gpt2", tmp_path / "two")
    weights = {name for name in ours if name.endswith(".safetensors")}
    assert weights == {name for name in theirs if name.endswith(".safetensors")}
    assert all(ours[name] == theirs[name] for name in weights)
    config = json.loads(ours["config.json"])
    assert (config["architectures"], config["eos_token_id"]) == (["GPT2LMHeadModel"], 7)
    assert config["tokenizer_class"] == "CpmTokenizer"
    assert open_model(tmp_path / "one").spec == open_model(tmp_path / "two").spec


def test_the_unquantized_twin_reads_the_shards(gpt2: Tensors, tmp_path: Path) -> None:
    save_ranks(cpm1_ranks(gpt2, 2), tmp_path / "cpm1")
    ids = torch.tensor([[5, 9, 20, 7]])
    twins = [UnquantizedModel(open_model(tmp_path / name, allow_pickle=True)) for name in ("cpm1", "gpt2")]
    assert torch.equal(*(twin.forward(ids).logits for twin in twins))


def test_the_published_shape_of_cpm1_has_32_heads(tmp_path: Path) -> None:
    shapes = {"word_embeddings.weight": (16, 2560), "position_embeddings.weight": (8, 2560)}
    layer = {"attention.query_key_value.weight": (3, 2560), "mlp.dense_h_to_4h.bias": (10240,)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"transformer.layers.0.{name}": torch.zeros(shape) for name, shape in layer.items()}
    save_ranks([tensors], tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as checkpoint:
        assert (checkpoint.config["n_head"], checkpoint.config["n_inner"]) == (32, 10240)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_cpm2_is_merged_to_mt5(num_ranks: int, t5: Tensors, tmp_path: Path) -> None:
    save_ranks(cpm2_ranks(t5, num_ranks), tmp_path)
    found = read_all(tmp_path)
    assert found.keys() == t5.keys()
    assert all(torch.equal(found[name], t5[name]) for name in t5)
    config = read_config_of(tmp_path)
    assert config == config | {
        "architectures": ["MT5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 48,
        "num_heads": 8, "num_layers": 2, "num_decoder_layers": 3, "vocab_size": 96,
        "relative_attention_num_buckets": 32, "eos_token_id": 7, "decoder_start_token_id": 1,
    }  # fmt: skip


def test_a_soft_prompt_beside_cpm2_is_no_part_of_the_model(
    t5: Tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = torch.randn(5, 32).half()
    save_ranks([rank | {"encoder.prompt_embeds.weight": vectors} for rank in cpm2_ranks(t5, 2)], tmp_path)
    assert read_all(tmp_path).keys() == t5.keys()
    assert "a soft prompt of 5 vectors" in caplog.text
    torch.save(vectors, tmp_path / "alone.pt")
    for path in (tmp_path, tmp_path / "mp_rank_01_model_states.pt", tmp_path / "alone.pt"):
        assert torch.equal(read_soft_prompt(path), vectors)
    save_ranks([{"one": vectors, "two": vectors}], tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for name, message in (("other", "2 tensors"), ("empty", "no file"), ("none", "does not exist")):
        with pytest.raises(CheckpointNotFound, match=message):
            read_soft_prompt(tmp_path / name)


def test_a_soft_prompt_that_was_trained_with_a_mask_is_refused(tmp_path: Path) -> None:
    torch.save(torch.randn(5, 32), tmp_path / "lcqmc.pt")
    config: dict[str, object] = {"fix_model": True, "enc": {"prompt_len": 5, "ratio_list": [1.0, 0.0, 0.0]}}
    others = (b"{", b"[1]", b'{"mask_prompt2token": true}', b" " * 70_000 + b"{}")
    for number, other in enumerate((*others, json.dumps(config | {"mask_prompt2token": False}).encode())):
        (tmp_path / f"{number}.json").write_bytes(other)
    assert read_soft_prompt(tmp_path / "lcqmc.pt").shape == (5, 32)
    for mask in ("mask_prompt2token", "mask_token2prompt"):
        (tmp_path / "prompt.json").write_text(json.dumps(config | {mask: True}))
        with pytest.raises(UnsupportedModel, match=f"prompt.json sets {mask}.*Train the soft prompt without"):
            read_soft_prompt(tmp_path / "lcqmc.pt")


def read_config_of(folder: Path) -> dict[str, Any]:
    with open_checkpoint(folder, allow_pickle=True) as checkpoint:
        return checkpoint.config


def test_model_centers_names(t5: Tensors, tmp_path: Path) -> None:
    torch.save(model_center(t5), tmp_path / "pytorch_model.pt")
    (tmp_path / "config.json").write_text('{"dim_model": 32, "num_heads": 8, "dim_head": 8}')
    found = read_all(tmp_path)
    assert found.keys() == t5.keys() and all(torch.equal(found[name], t5[name]) for name in t5)
    assert read_config_of(tmp_path)["d_kv"] == 8


def test_a_config_beside_the_shards_goes_first(gpt2: Tensors, tmp_path: Path) -> None:
    save_ranks(cpm1_ranks(gpt2, 2), tmp_path / "cpm1")
    (tmp_path / "cpm1" / "config.json").write_text('{"n_head": 4}')
    config = read_config_of(tmp_path / "cpm1")
    assert (config["n_head"], config["n_embd"]) == (4, 128)


def test_shards_that_are_missing_or_of_another_checkpoint(gpt2: Tensors, tmp_path: Path) -> None:
    ranks = cpm1_ranks(gpt2, 2)
    save_ranks(ranks, tmp_path)
    second = tmp_path / "mp_rank_01_model_states.pt"
    second.rename(tmp_path / "mp_rank_02_model_states.pt")
    with pytest.raises(CheckpointNotFound, match="lacks the file of rank 1"):
        open_checkpoint(tmp_path, allow_pickle=True)
    (tmp_path / "mp_rank_02_model_states.pt").unlink()
    with pytest.raises(CheckpointNotFound, match="files of 1 ranks.*there are 2"):
        open_checkpoint(tmp_path, allow_pickle=True)
    save_ranks([ranks[0], {name: value[:-1] for name, value in ranks[1].items()}], tmp_path)
    with pytest.raises(CorruptFile, match="in different shapes"):
        open_checkpoint(tmp_path, allow_pickle=True)
    save_ranks([{"a": torch.zeros(2)}] * 2, tmp_path)
    with pytest.raises(UnsupportedModel, match="it merges those of CPM-1 and CPM-2"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_without_permission_shards_are_named_too(gpt2: Tensors, tmp_path: Path) -> None:
    save_ranks(cpm1_ranks(gpt2, 2), tmp_path / "80000")
    with pytest.raises(UnsafeCheckpoint, match="mp_rank_00_model_states.pt.*--allow-pickle"):
        open_checkpoint(tmp_path)


# ---- CPM-Live

#: config.json of CPM-Live, for a small model.
CPM_LIVE = {
    "vocab_size": 160, "dim_model": 48, "dim_ff": 96, "num_layers": 2, "num_heads": 3, "dim_head": 24,
    "dropout_p": 0.0, "position_bias_num_buckets": 16, "position_bias_max_distance": 40, "eps": 1e-6,
    "half": True, "prompt_types": 4, "prompt_length": 5, "segment_types": 6,
}  # fmt: skip


def test_cpm_lives_own_file_is_converted_as_transformers_cpmant(tmp_path: Path) -> None:
    """To the same bits as transformers' own folder with the same weights under its names."""
    names = {"dim_model": "hidden_size", "num_layers": "num_hidden_layers"}
    names |= {"num_heads": "num_attention_heads"}
    config = {names.get(name, name): value for name, value in CPM_LIVE.items()}
    torch.manual_seed(7)
    model = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**config)).float()
    saved, same = cpm_live_ant({name: value.detach() for name, value in model.state_dict().items()}, 4 * 5)
    (tmp_path / "live").mkdir()
    torch.save(saved, tmp_path / "live" / "cpm-ant-10b.pt")
    (tmp_path / "live" / "config.json").write_text(json.dumps(CPM_LIVE))
    model.load_state_dict(same | {"lm_head.weight": same["cpmant.input_embedding.weight"][:160]})
    model.save_pretrained(tmp_path / "theirs")
    found = read_all(tmp_path / "live")
    assert found.keys() == same.keys() and all(torch.equal(found[name].float(), same[name]) for name in same)
    ours, theirs = (converted(tmp_path / name, tmp_path / f"{name} out") for name in ("live", "theirs"))
    weights = {name for name in theirs if name.endswith(".safetensors")}
    assert all(ours[name] == theirs[name] for name in weights) and weights <= ours.keys()
    assert open_model(tmp_path / "live out").spec == open_model(tmp_path / "theirs out").spec
    assert json.loads(ours["config.json"])["tokenizer_class"] == "CpmAntTokenizer"


@pytest.mark.parametrize(
    ("vocab_size", "kind", "embeddings"),
    [
        (30720, "CpmAnt", {"input_embedding.weight": (30720, 4), "prompt_embedding.weight": (1024, 4)}),
        (86579, "CPMAntPlus", {"input_embedding.weight": (86579 + 1024, 4)}),
    ],
)
def test_cpm_lives_published_shapes_need_no_config(
    vocab_size: int, kind: str, embeddings: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    shapes = embeddings | {
        "segment_embedding.weight": (32, 4), "position_bias.relative_attention_bias": (32 * 32 + 512, 32),
        "encoder.layers.0.self_att.self_attention.project_q.weight": (4096, 4),
        "encoder.layers.0.ffn.ffn.w_in.w_0.weight": (10240, 4),
    }  # fmt: skip
    torch.save({name: torch.zeros(shape).half() for name, shape in shapes.items()}, tmp_path / "ant.pt")
    config = read_config_of(tmp_path)
    assert config["tokenizer_class"] == f"{kind}Tokenizer" and "mask_modules" not in config
    published = {"vocab_size": vocab_size, "num_attention_heads": 32, "dim_head": 128, "dim_ff": 10240}
    published |= {"position_bias_num_buckets": 512, "segment_types": 32, "prompt_length": 32}
    assert config == config | published
    shapes["encoder.layers.2.ffn.ffn.w_in.w_0.weight"] = (10240, 4)
    torch.save({name: torch.zeros(shape).half() for name, shape in shapes.items()}, tmp_path / "ant.pt")
    assert read_config_of(tmp_path)["mask_modules"] == [[False, False], [True, True], [True, False]]


def test_cpm_bees_file_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"position_bias.relative_attention_bias": torch.zeros(512, 4)}
    tensors |= {"input_embedding.weight": torch.zeros(8, 4)}
    torch.save(tensors, tmp_path / "cpm-bee-10b.pt")
    with pytest.raises(UnsupportedModel, match="CPM-Bee is not supported.*each pair of the segments"):
        open_model(tmp_path, allow_pickle=True)


# ---- BMInf


def test_bminf_cpm1_keeps_every_integer(gpt2: Tensors, tmp_path: Path) -> None:
    tree = bminf_cpm1(gpt2)
    write_bminf(tmp_path / "bminf" / "checkpoint.pt", tree)
    files = converted(tmp_path / "bminf", tmp_path / "out")  # no permission is needed
    found = {
        name: value
        for path in (tmp_path / "out").glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    for index in range(3):
        names, ours = f"layers.{index}.", f"transformer.h.{index}."
        for kind, suffix in (("weight", "weight"), ("scale", "weight_scale"), ("bias", "bias")):
            qkv = torch.cat([tree[f"{names}self_attn.project_{name}.{kind}"] for name in "qkv"])
            others = {"attn.c_attn": qkv}
            for name, own in (("attn.c_proj", "self_attn.linear_out"), ("mlp.c_fc", "ff.linear_in")):
                others[name] = tree[f"{names}{own}.{kind}"]
            for name, value in others.items():
                stored = found[f"{ours}{name}.{suffix}"]
                assert torch.equal(stored.flatten(), value.flatten().to(stored.dtype)), name
    assert json.loads(files["config.json"])["tokenizer_class"] == "CpmTokenizer"


def test_bminf_cpm1_computes_what_its_integers_say(gpt2: Tensors, tmp_path: Path) -> None:
    """Against transformers' GPT-2 with the dequantized weights."""
    tree = bminf_cpm1(gpt2)
    write_bminf(tmp_path / "bminf" / "checkpoint.pt", tree)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").float().eval()
    state = {name: value.half().float() for name, value in gpt2.items()}
    for name, integers in tree.items():
        if match := re.fullmatch(
            r"layers\.(\d)\.(self_attn\.linear_out|ff\.linear_in|ff\.linear_out)\.weight", name
        ):
            own = {
                "self_attn.linear_out": "attn.c_proj",
                "ff.linear_in": "mlp.c_fc",
                "ff.linear_out": "mlp.c_proj",
            }
            exact = integers.float() * tree[name.replace("weight", "scale")].float()[:, None]
            state[f"transformer.h.{match[1]}.{own[match[2]]}.weight"] = exact.t()
    for index in range(3):
        parts = [f"layers.{index}.self_attn.project_{name}." for name in "qkv"]
        exact = torch.cat([tree[p + "weight"].float() * tree[p + "scale"].float()[:, None] for p in parts])
        state[f"transformer.h.{index}.attn.c_attn.weight"] = exact.t()
    model.load_state_dict(state)
    ids = torch.tensor([[5, 9, 20, 7]])
    with torch.no_grad():
        expected = model(ids).logits
    found = UnquantizedModel(open_model(tmp_path / "bminf")).forward(ids).logits
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("vocab_size", "kind"), [(96, "mt5"), (30000, "eva")])
def test_bminf_t5(vocab_size: int, kind: str, t5: Tensors, tmp_path: Path) -> None:
    t5["shared.weight"] = torch.randn(vocab_size, 32)
    tree = bminf_t5(t5)
    write_bminf(tmp_path / "checkpoint.pt", tree)
    found = read_all(tmp_path)
    scales = {f"{name}_scale" for name in t5 if found[name].dtype == torch.int8}
    assert found.keys() == t5.keys() | scales and len(scales) == 2 * 7 + 3 * 11
    for name, value in t5.items():
        if found[name].dtype == torch.int8:
            exact = found[name].float() * found[f"{name}_scale"].float()[:, None]
            exact[0, 0] = value[0, 0]  # moved on purpose
            assert float((exact - value).abs().max()) <= float(value.abs().amax()) / 127, name
        else:
            assert torch.equal(found[name], value.half()), name
    config = read_config(tmp_path)
    assert (
        config["model_type"] == kind and config["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    assert config["relative_attention_max_distance"] == (256 if kind == "eva" else 128)


def test_a_pickle_called_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    save_bin(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "checkpoint.pt")
    with pytest.raises(UnsafeCheckpoint, match="checkpoint.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (8, struct.pack("<I", 1 << 31), "a name of"),
        (8, struct.pack("<I", 0), "a name of"),
        (8 + 4 + 15, struct.pack("<I", 1 << 31), "more than 50000"),
    ],
)
def test_bminf_files_that_make_no_sense(
    offset: int, new: bytes, message: str, gpt2: Tensors, tmp_path: Path
) -> None:
    file = tmp_path / "bminf" / "checkpoint.pt"
    write_bminf(file, bminf_cpm1(gpt2))
    raw = bytearray(file.read_bytes())
    raw[offset : offset + 4] = new
    file.write_bytes(raw)
    with pytest.raises(CorruptFile, match=f"BMInf.*{message}"):
        open_checkpoint(file.parent)


def test_mutated_bminf_files_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = read_mutated("bminf", tmp_path, range(1000))
    assert results["read"] > 30 and results["CorruptFile"] > 500


def test_a_wrong_scale_is_named(gpt2: Tensors, tmp_path: Path) -> None:
    tree = bminf_cpm1(gpt2)
    tree["layers.1.ff.linear_in.scale"] = tree["layers.1.ff.linear_in.scale"][:-1]
    write_bminf(tmp_path / "bminf" / "checkpoint.pt", tree)
    with pytest.raises(WrongTensor, match=r"h.1.mlp.c_fc.weight_scale"):
        open_model(tmp_path / "bminf")


def test_compressed_tensors_in_a_bin(tmp_path: Path) -> None:
    """A format of other tools is read from a .bin as from safetensors."""
    build("Llama", tmp_path / "plain")
    int8 = converted(tmp_path / "plain", tmp_path / "int8")
    tensors = {
        name: value
        for path in (tmp_path / "int8").glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes(int8["config.json"])
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    again = converted(tmp_path / "bin", tmp_path / "again")
    assert {n: v for n, v in again.items() if n != "generation_config.json"} == {
        n: v for n, v in int8.items() if n != "generation_config.json"
    }
    save_file(tensors, tmp_path / "bin" / "model.safetensors")
    assert not open_model(tmp_path / "bin").store.checkpoint.pickles
