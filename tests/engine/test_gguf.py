"""GGUF files, written with llama.cpp's Python package by its rules: the same numbers, and clear refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats_in import GREEDY, PROMPTS, Ids, assert_computes
from tiny_models import YARN_ROPE, build
from tiny_tokenizers import TEXTS, save_sentencepiece
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from units import read_layer

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import CheckpointError, CheckpointNotFound, ConfigError, CorruptFile, UnsupportedModel
from penstock.model.registry import open_model
from penstock.text.tokenizer import Tokenizer
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.checkpoints.hub import find_model
from penstock.weights.conversion.convert import convert
from penstock.weights.formats.model_formats import has_int4
from penstock.weights.quantization_error import quantization_errors
from penstock.weights.quantize import quantize
from warm_python import run_warm

gguf = pytest.importorskip("gguf")

KINDS = [
    "Llama",
    "Llama, tied, biases",
    "Llama, wide heads",
    "Llama, rope llama3",
    "Llama, rope yarn",
    "Llama, rope linear",
    "Qwen2",
    "Qwen3",
    "Phi-3",
    "Phi-3, part of a head, window",
    "Phi-3, rope longrope",
    "Gemma 2",
    "Gemma 3",
]
#: The numbers of these models that no file tells: the scale of scores, and which layers have a window.
CHANGES: dict[str, dict[str, Any]] = {
    "Gemma 2": {"query_pre_attn_scalar": 16},
    "Gemma 3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6},
}
TOKENS = [f"word{index}" for index in range(160)]


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    model: Any,
    path: Path,
    kind: str = "Q8_0",
    tokens: list[str] = TOKENS,
    changes: dict[str, Any] | None = None,
) -> None:
    """A model of transformers as llama.cpp's converter writes it; `changes` are of its metadata."""
    config = model.config
    name = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, name)
    for key, value in (numbers(model) | {"tokenizer.ggml.eos_token_id": 1} | (changes or {})).items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{name}.{key}"
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds |= {bool: writer.add_bool}
        add = kinds.get(type(value), writer.add_array)
        add(full, value)
    writer.add_token_list(tokens)
    names = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for tensor, stored in rope_tensors(config).items():
        writer.add_tensor(tensor, stored)
    is_tied = config.tie_word_embeddings
    for parameter, weight in model.state_dict().items():
        if is_tied and parameter == "lm_head.weight":
            continue
        stored = exchanged(parameter, weight, config) if name == "llama" else weight
        stored = stored + 1 if name in ("gemma2", "gemma3") and "norm" in parameter else stored
        dtype = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        data = gguf.quants.quantize(stored.contiguous().numpy(), dtype)
        writer.add_tensor(names.get_name(parameter, (".weight", ".bias")), data, raw_dtype=dtype)
    finish(writer)


def numbers(model: Any) -> dict[str, Any]:
    """Metadata, by the names of the specification."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = full_rope(config)
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("yarn", "linear"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    for key in ("beta_fast", "beta_slow"):
        found |= {f"rope.scaling.yarn_{key}": rope[key]} if key in rope else {}
    if rope["rope_type"] == "yarn" and "attention_factor" in rope:
        found |= {"rope.scaling.yarn_attn_factor": rope["attention_factor"]}
    if own := config.rope_parameters.get("sliding_attention"):
        found |= {"rope.freq_base_swa": float(own["rope_theta"])}
    if original := rope.get("original_max_position_embeddings"):
        found |= {"rope.scaling.original_context_length": original}
    if rope["rope_type"] == "longrope":
        scale = math.log(config.max_position_embeddings / original) / math.log(original)
        found |= {"rope.scaling.attn_factor": math.sqrt(1 + scale)}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        found |= {key: float(value)} if (value := getattr(config, key, None)) else {}
    if window := getattr(config, "sliding_window", None):
        found |= {"attention.sliding_window": window}
    return found


def full_rope(config: Any) -> Any:
    """The rope of layers without a window; a file has no other."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def rope_tensors(config: Any) -> dict[str, Any]:
    rope = full_rope(config)
    if rope["rope_type"] == "longrope":
        parts = {part: torch.tensor(rope[f"{part}_factor"]).numpy() for part in ("long", "short")}
        return {f"rope_factors_{part}.weight": factors for part, factors in parts.items()}
    if rope["rope_type"] != "llama3":
        return {}
    original, low, high = (rope[f"{of}"] for of in ("original_max_position_embeddings", "low_freq_factor",
                                                    "high_freq_factor"))  # fmt: skip
    factors = []
    for index in range(8):
        turns = original / (2 * math.pi * 10000.0 ** (index / 8))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": torch.tensor(factors).numpy()}


def exchanged(parameter: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of q and k, halves of a head interleaved, as llama.cpp rotates them."""
    heads = config.num_attention_heads if "q_proj" in parameter else config.num_key_value_heads
    if ".q_proj." not in parameter and ".k_proj." not in parameter:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def stored_as(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What a file of this kind says of a matrix, by the gguf package."""
    dtype = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), dtype), dtype).copy())


def make(kind: str, folder: Path, of: str = "Q8_0") -> Any:
    """Writes folder/model.gguf; returns transformers' model with the matrices that the engine should have."""
    model = build(kind, folder / "source", **CHANGES.get(kind, {}))
    write_gguf(model, folder / "model.gguf", of)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.data = stored_as(parameter.data, of)
            if of != "Q8_0" and name != "model.embed_tokens.weight":
                parameter.data = quantize(parameter.data).dequantize()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_each_architecture(kind: str, tmp_path: Path) -> None:
    expected = make(kind, tmp_path)
    assert_computes(tmp_path / "model.gguf", expected, is_rounded=True)


YARN = YARN_ROPE | {"beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.4}
OWN_BASE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
TURNS = ["full_attention", "sliding_attention", "sliding_attention"]
#: A kind of model, what is different in it, and what the file says beyond numbers().
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn's numbers": ("Llama", {"rope_parameters": YARN}, {}),
    "attn_factor": (
        "Llama",
        {"rope_parameters": YARN_ROPE | {"attention_factor": 1.5 * (1 + 0.1 * math.log(4.0))}},
        {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_attn_factor": 0.0},
    ),
    "a whole number for a real one": (
        "Llama",
        {"rms_norm_eps": 1.0},
        {"attention.layer_norm_rms_epsilon": 1, "rope.freq_base": 10000},
    ),
    "another base in windows": ("Gemma 3", CHANGES["Gemma 3"] | {"rope_parameters": OWN_BASE}, {}),
    "windows by number": (
        "Gemma 3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention"] + TURNS[:2],
        },
        {"attention.sliding_window_pattern": 2},
    ),
    "windows by layer": (
        "Gemma 2",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 3, "layer_types": TURNS},
        {"attention.sliding_window_pattern": [False, True, True]},
    ),
    "no windows": (
        "Gemma 3",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        {"attention.sliding_window": 0},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_keys_that_change_the_arithmetic_are_read(name: str, tmp_path: Path) -> None:
    kind, changes, metadata = SETTINGS[name]
    model = build(kind, tmp_path / "source", **changes)
    write_gguf(model, tmp_path / "model.gguf", "F32", changes=metadata)
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    computed = UnquantizedModel(open_model(tmp_path / "model.gguf")).forward(ids)
    with torch.inference_mode():
        expected = model(ids).logits
    torch.testing.assert_close(computed.logits, expected, atol=1e-4, rtol=1e-4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "model.embed_tokens.weight":
            parameter.data = quantize(parameter.data, 0).dequantize()
    assert_computes(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("of", ["Q8_0", "F16", "BF16", "F32"])
def test_each_kind_of_numbers(of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = make("Llama", tmp_path, of)
    with caplog.at_level(logging.INFO):
        assert_computes(tmp_path / "model.gguf", expected, is_rounded=of == "Q8_0")
    assert "quantized again" not in caplog.text


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    source = make(kind, tmp_path)
    theirs = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=source)
    head_dim = {"head_dim": 16} if kind == "Qwen3" else {}  # which transformers leaves in the file
    config = transformers.AutoConfig.for_model(**(theirs["config"] | head_dim))
    expected = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing = expected.load_state_dict(theirs["tensors"], strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    layer = read_layer(open_model(tmp_path / "model.gguf").store, 1)
    their_layer = expected.model.layers[1]
    qkv = torch.cat([getattr(their_layer.self_attn, f"{name}_proj").weight for name in "qkv"])
    assert torch.equal(layer.matrix("qkv").dequantize(), qkv)
    assert torch.equal(layer.matrix("down").dequantize(), their_layer.mlp.down_proj.weight)
    assert_computes(tmp_path / "model.gguf", expected, is_rounded=True)


def test_a_group_size_that_codes_do_not_have_is_refused(tmp_path: Path) -> None:
    """Codes of 4 bits come with scales of their own."""
    path = tmp_path / "model.gguf"
    write_gguf(build("Llama", tmp_path / "source", hidden_size=128, intermediate_size=256), path, "Q4_0")
    with pytest.raises(ConfigError, match="scales per 32 inputs, which --group-size 64 can't change"):
        open_model(path, group_size=64)
    for group_size in (None, 32):
        assert has_int4(open_model(path, group_size=group_size).store.tensors)


def test_blocks_are_kept_as_groups(tmp_path: Path) -> None:
    """Integers and scales of the file itself."""
    make("Qwen2", tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    store = open_model(tmp_path / "model.gguf").store
    down = read_layer(store, 2).matrix("down")
    blocks = torch.from_numpy(tensors["blk.2.ffn_down.weight"].data.copy()).view(-1, 34)
    assert torch.equal(down.qweight.view(-1, 32), blocks[:, 2:].view(torch.int8))
    assert torch.equal(down.scale.view(-1), blocks[:, :2].contiguous().view(torch.float16).flatten().float())
    assert not list(quantization_errors(store))


def test_reading_in_small_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("Llama", tmp_path)
    whole = read_layer(open_model(tmp_path / "model.gguf").store).matrix("qkv")
    monkeypatch.setattr("penstock.weights.formats.weight_format.CHUNK_BYTES", 1000)
    pieces = read_layer(open_model(tmp_path / "model.gguf").store).matrix("qkv")
    assert torch.equal(whole.qweight, pieces.qweight) and torch.equal(whole.scale, pieces.scale)


# ---- tokenizers, conversion, the way in


def write_byte_level(folder: Path, path: Path, changes: dict[str, Any] | None = None) -> None:
    """A model and a Llama 3 style tokenizer, as a folder and as a file; ids 0 to 2 are control tokens.
    `changes` are of the file's metadata."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<bos>", "<|im_end|>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 5, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )
    model = build("Llama", folder, vocab_size=330)
    tokenizer.save_pretrained(folder)
    merges = json.loads(backend.to_str())["model"]["merges"]
    write_gguf(model, path, tokens=[backend.id_to_token(index) for index in range(330)], changes={
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 327, "tokenizer.chat_template": TEMPLATE,
    } | (changes or {}))  # fmt: skip


TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def test_the_tokenizer_in_the_file(tmp_path: Path) -> None:
    write_byte_level(tmp_path / "source", tmp_path / "model.gguf")
    # What lies beside the file belongs to another model.
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    expected = Tokenizer.load(tmp_path / "source")
    with Engine.load(tmp_path / "model.gguf") as engine:
        assert engine.tokenizer.eos_token_ids == {1, 2}
        for text in [*TEXTS, "<bos>Can't 12345 \n\n go<|im_end|>"]:
            ids = engine.tokenizer.encode(text)
            assert ids == expected.encode(text)
            assert engine.tokenizer.decode(ids, False) == expected.decode(ids, False)
        assert engine.tokenizer.backend.chat_template == TEMPLATE
    convert(open_model(tmp_path / "model.gguf").store, tmp_path / "converted")
    converted = Tokenizer.load(tmp_path / "converted")
    assert converted.eos_token_ids == {1, 2} and converted.backend.chat_template == TEMPLATE
    assert converted.encode(TEXTS[0]) == expected.encode(TEXTS[0])


def test_a_sentencepiece_tokenizer_in_the_file(tmp_path: Path) -> None:
    processor = save_sentencepiece(tmp_path / "source")
    size = processor.vocab_size()
    kinds = [2, 3, 3] + [6 if processor.is_byte(index) else 1 for index in range(3, size)]
    write_gguf(
        build("Llama", tmp_path / "source", vocab_size=size),
        tmp_path / "model.gguf",
        tokens=[processor.id_to_piece(index) for index in range(size)],
        changes={
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.scores": [processor.get_score(index) for index in range(size)],
            "tokenizer.ggml.token_type": kinds,
        },
    )  # fmt: skip
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *processor.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.inner
def test_converted_it_computes_the_same_bits(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["w o"]}
    model = build("Llama, rope llama3", tmp_path / "source")
    write_gguf(model, tmp_path / "model.gguf", tokens=["w", "o", "wo", *TOKENS[3:]], changes=tokens)
    for group_size in (None, 0):
        target = tmp_path / f"converted {group_size}"
        report = convert(open_model(tmp_path / "model.gguf", group_size=group_size).store, target)
        layers = [error for name, error in report.errors.items() if "layers" in name]
        assert all(error == 0 for error in layers) == (group_size is None)
        answers = []
        for folder in (tmp_path / "model.gguf", target):
            config = EngineConfig(group_size=group_size, num_resident_layers=1)
            tokenizer: Any = Ids()
            with Engine.load(folder, config, tokenizer=tokenizer) as engine:
                answers.append([(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)])
        assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["Llama, rope llama3", "Phi-3, rope longrope", "Gemma 2"])
def test_the_unquantized_twin_is_what_the_file_says(kind: str, tmp_path: Path) -> None:
    """transformers computes by our config and from our decoded tensors."""
    model = build(kind, tmp_path / "source", **CHANGES.get(kind, {}))
    write_gguf(model, tmp_path / "model.gguf", "F32")
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    computed = UnquantizedModel(open_model(tmp_path / "model.gguf")).forward(ids)
    with torch.inference_mode():
        expected = model(ids).logits
    torch.testing.assert_close(computed.logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """A model in two files: the second has the tensors of the last layer, the first has the vocabulary."""
    folder = tmp_path / "parts"
    folder.mkdir()
    write_byte_level(tmp_path / "source", tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    files = folder / "split-00001-of-00002.gguf", folder / "split-00002-of-00002.gguf"
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if field.name.startswith(("llama.", "tokenizer.")):
                kinds = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), *kinds)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.2") == (number == 1):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return files


def assert_is_whole(path: Path, whole: Path) -> None:
    mine, all_of_it = (read_layer(open_model(file).store, 2).matrix("down") for file in (path, whole))
    assert torch.equal(mine.qweight, all_of_it.qweight) and torch.equal(mine.scale, all_of_it.scale)
    assert Tokenizer.load(path).encode(TEXTS[0]) == Tokenizer.load(whole).encode(TEXTS[0])


def test_any_part_of_a_model_is_the_model(parts: tuple[Path, Path], tmp_path: Path) -> None:
    for part in parts:
        assert_is_whole(part, tmp_path / "whole.gguf")
    parts[1].unlink()
    with pytest.raises(CheckpointNotFound, match="split-00002-of-00002.gguf is not there"):
        open_model(parts[0])


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_under_another_name(number: int, parts: tuple[Path, Path], tmp_path: Path) -> None:
    renamed = parts[number].rename(parts[number].with_name("mine.gguf"))
    assert_is_whole(renamed, tmp_path / "whole.gguf")
    parts[1 - number].rename(renamed.with_name("other.gguf"))
    for load in (open_model, Tokenizer.load):
        with pytest.raises(CheckpointNotFound, match=rf"mine.gguf is part {number + 1} of 2 by its header"):
            load(renamed)


def test_parts_under_each_others_names(parts: tuple[Path, Path]) -> None:
    parts[0].rename(parts[0].with_name("first.gguf"))
    parts[1].rename(parts[0])
    parts[0].with_name("first.gguf").rename(parts[1])
    with pytest.raises(CorruptFile, match="named as part 1 of 2, and is part 2 of 2"):
        open_model(parts[0])


SWEEP_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from penstock.model.registry import open_model

torch.set_num_threads(1)
store = open_model(Path(sys.argv[1])).store
keys = list(store.units)
buffer = torch.empty(store.units[keys[0]].num_bytes, dtype=torch.uint8)
store.read_unit(keys[0], buffer)  # let torch allocate what it keeps
line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
limit = int(line.split()[1]) * 1024 + (32 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for key in keys:
    store.read_unit(key, buffer)
print(buffer.numel(), sum(entry.num_bytes for entry in store.checkpoint.entries.values()))
"""


def test_a_file_much_larger_than_its_memory(tmp_path: Path) -> None:
    """Layers of 35 MB, read into one buffer with 32 MB to spare."""
    write_sparse_gguf(tmp_path / "model.gguf", num_layers=12, hidden_size=1024, intermediate_size=10240)
    run = run_warm("-c", SWEEP_UNDER_A_LIMIT, str(tmp_path / "model.gguf"))
    assert run.returncode == 0, run.stderr[-2000:]
    layer, file = map(int, run.stdout.split())
    assert layer > 30e6 and file > 11 * layer  # a scale has 16 bits in the file, and 32 in memory


def write_sparse_gguf(path: Path, num_layers: int, hidden_size: int, intermediate_size: int) -> None:
    """A Llama in Q8_0 whose data is a hole in the file."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": num_layers, "embedding_length": hidden_size, "context_length": 128,
        "feed_forward_length": intermediate_size, "attention.head_count": 16,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    square, up = (hidden_size, hidden_size), (intermediate_size, hidden_size)
    shapes = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    shapes |= {"ffn_gate": up, "ffn_up": up, "ffn_down": up[::-1]}
    tensors = {f"blk.{i}.{name}": shape for i in range(num_layers) for name, shape in shapes.items()}
    size = 0
    for name, shape in (tensors | {"token_embd": (256, hidden_size)}).items():
        num_bytes = shape[0] * shape[1] // 32 * 34
        stored = (shape[0], shape[1] // 32 * 34)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), num_bytes, kind)
        size += num_bytes
    norms = [f"blk.{i}.{name}" for i in range(num_layers) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor_info(f"{name}.weight", (hidden_size,), np.dtype(np.float32), 4 * hidden_size)
        size += 4 * hidden_size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + size + 32)


def test_a_file_is_a_model(tmp_path: Path) -> None:
    make("Llama", tmp_path)
    assert find_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert read_config(tmp_path / "model.gguf")["eos_token_id"] == [1]
    with pytest.raises(CheckpointNotFound, match=r"a \.gguf file"):
        find_model(str(tmp_path / "other.gguf"))


# ---- what is refused

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "has nothing for llama.expert_used_count"),
    "rope": ({"rope.scaling.type": "su", "rope.scaling.factor": 2.0}, "rope scaling 'su'"),
    "another share of yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
        "0.5 for llama.rope.scaling.yarn_ext_factor",
    ),
    "a share of yarn in a linear rope": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 1.0},
        "1.0 for llama.rope.scaling.yarn_ext_factor",
    ),
    "yarn's attention in a linear rope": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 0.5},
        "0.5 for llama.rope.scaling.yarn_attn_factor",
    ),
    "yarn's attention without a factor": (
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5},
        "0.5 for llama.rope.scaling.yarn_attn_factor",
    ),
    "a new number of yarn": (
        {"rope.scaling.yarn_new": 2.0},
        "2.0 for llama.rope.scaling.yarn_new",
    ),
    "longrope without factors": ({"rope.scaling.type": "longrope"}, "'longrope' without factors"),
    "half of each head": ({"rope.dimension_count": 8}, "rotates 50% of each head"),
    "long values": ({"attention.value_length": 32}, "different lengths"),
    "a number for each layer": (
        {"attention.head_count_kv": [2, 2, 1]},
        "one for each layer for llama.attention.head_count_kv",
    ),
}


#: Keys of llama.cpp that change what some model computes, with a value that changes it and one that does not.
OTHER_KEYS: dict[str, tuple[Any, Any]] = {
    "attention.scale": (0.2, 0.0),
    "attention.clamp_kqv": (5.0, 0.0),
    "attention.causal": (False, True),
    "attention.sliding_window": (64, 0),
    "attention.temperature_scale": (0.1, 0.0),
    "logit_scale": (0.5, 1.0),
    "residual_scale": (0.5, 1.0),
    "embedding_scale": (12.0, 1.0),
    "final_logit_softcapping": (30.0, 0.0),
    "expert_weights_scale": (2.5, 1.0),
    "rope.freq_base_swa": (5e4, 10000.0),
    "rope.scaling.attn_factor": (1.2, 1.0),
    "rope.scaling.alpha": (1000.0, 0.0),
    "rope.scaling.yarn_attn_factor": (0.5, 1.0),
    "rope.scaling.yarn_ext_factor": (0.5, -1.0),
    "nextn_predict_layers": (1, 0),
    "attention.key_length_swa": (8, None),
    "a_new_key": (1, None),
    "xielu.beta": (1.0, None),
}


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_keys_that_are_not_read_are_refused(key: str, tmp_path: Path) -> None:
    model = build("Llama", tmp_path / "source")
    changing, idle = OTHER_KEYS[key]
    write_gguf(model, tmp_path / "model.gguf", changes={key: changing})
    with pytest.raises(UnsupportedModel, match=f"llama.{key}"):
        open_model(tmp_path / "model.gguf")
    if idle is not None:
        yarn = {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.finetuned": True, "vocab_size": 160}
        write_gguf(model, tmp_path / "model.gguf", changes={key: idle} | yarn)
        open_model(tmp_path / "model.gguf").store.close()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    make("Llama", tmp_path)
    write_gguf(
        build("Llama", tmp_path / "source"), tmp_path / "model.gguf", changes={"general.type": "adapter"}
    )
    with pytest.raises(UnsupportedModel, match=r"'adapter' \(general.type\)"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("fault", FAULTS)
def test_variants_are_refused(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    write_gguf(build("Llama", tmp_path / "source"), tmp_path / "model.gguf", changes=changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_model(tmp_path / "model.gguf")


def test_other_numbers_and_models_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    finish(writer)
    with pytest.raises(UnsupportedModel, match="'mamba'.*llama, qwen2, qwen3"):
        open_model(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.int16))
    finish(writer)
    with pytest.raises(UnsupportedModel, match="token_embd.weight as I16.*Q8_0.*F32, F16.*BF16"):
        open_model(tmp_path / "model.gguf")


def test_files_that_are_no_models(tmp_path: Path) -> None:
    make("Llama", tmp_path)
    file = tmp_path / "model.gguf"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-100], "truncated"),
        (whole[:1000], "ends within its header"),
        (b"<html>" * 99, "does not begin with GGUF"),
        (b"GGUF" + bytes([0, 0, 0, 3]) + whole[8:], "version is 0x3000000.*little-endian"),
        (b"", "ends within"),
    ):
        file.write_bytes(content)
        with pytest.raises(CorruptFile, match=f"model.gguf.*{message}"):
            open_model(file)


@pytest.mark.parametrize("shape", [(2, 8), (9,), (1,)])
def test_factors_of_rope_need_their_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = build("Llama", tmp_path / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "rope_tensors", lambda config: {"rope_freqs.weight": np.ones(shape, "f")})
        write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(CorruptFile, match=r"rope_freqs.weight has shape \[.*\] instead of \[8\]"):
        open_model(tmp_path / "model.gguf")


def test_a_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a header is kept in memory, many times as large as its bytes."""
    make("Llama", tmp_path)
    open_model(tmp_path / "model.gguf").store.close()
    monkeypatch.setattr("penstock.gguf_file.MAX_HEADER_BYTES", 4096)
    with pytest.raises(CorruptFile, match="ends within its header, or the header has more than"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.inner
@settings(max_examples=150, deadline=None)
@given(position=st.integers(4, 1500), value=st.integers(0, 255), cut=st.integers(0, 4000))
def test_any_header_is_read_or_refused(
    position: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One byte changed, or the end cut off: a checkpoint, or an error of ours."""
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "model.gguf").exists():
        make("Llama", folder)
    content = bytearray((folder / "model.gguf").read_bytes())
    content[position] = value
    (folder / "fuzz.gguf").write_bytes(content[:cut] if cut < 2000 else content)
    with contextlib.suppress(CheckpointError):
        open_model(folder / "fuzz.gguf").store.close()
