"""Types of GGUF's blocks against llama.cpp's Python package, bit for bit, alone and mixed in a model."""

from __future__ import annotations

import collections
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_formats_in import Ids, assert_computes
from test_gguf import TOKENS, exchanged, finish, numbers
from tiny_models import build
from torch import Tensor
from units import read_layer

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import CheckpointError, ConfigError, UnsupportedModel
from penstock.kernels import Int4Tensor, QuantizedTensor, StackedMatrix
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BLOCK_TYPES
from penstock.weights.checkpoints.gguf_files.gguf_rows import GgufRows, renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.quantization_error import quantization_errors
from penstock.weights.quantize import quantize

gguf = pytest.importorskip("gguf")

#: Types of integers with a scale for 32 of them, which are INT8 as they are.
INTEGERS = ["Q5_0", "Q8_0"]
CODES = ["Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
FLOATS = ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"]
#: Where a block has its numbers in float16, and what these are divided by, so that elements are below 1.
HALVES = {
    "Q4_0": ((0,), 100), "Q4_1": ((0, 2), 100), "Q4_K": ((0, 2), 8000), "IQ4_NL": ((0,), 1000),
    "IQ4_XS": ((0,), 30000), "MXFP4": ((), 1), "Q5_0": ((0,), 200), "Q5_1": ((0, 2), 200),
    "Q8_0": ((0,), 1000), "Q5_K": ((0, 2), 16000), "Q6_K": ((208,), 40000),
}  # fmt: skip


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of blocks with all bits at random, but for numbers in float16 and exponents."""
    num_inputs, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    places, divisor = HALVES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * width // num_inputs, num_bytes), dtype=np.uint8)
    for at in places:
        numbers = (rng.normal(size=(len(blocks), 1)) / divisor).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(117, 123, len(blocks))
    return blocks.reshape(rows, -1)


def decoded(kind: str, stored: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).copy())


def kind_of(name: str, kinds: dict[str, str]) -> str:
    """The type of a tensor: that of the last word of its name, otherwise that of ""."""
    return kinds.get(name.removesuffix(".weight").rpartition(".")[2], kinds[""])


def write_mixed(model: Any, path: Path, kinds: dict[str, str]) -> None:
    """A GGUF file of a model, whose matrices have random blocks of the types in `kinds`, by llama.cpp's names
    of tensors. The model's matrices become what the package says of the blocks."""
    config = model.config
    name = config.model_type
    writer = gguf.GGUFWriter(path, name)
    for key, value in (numbers(model) | {"tokenizer.ggml.eos_token_id": 1}).items():
        add = {int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    writer.add_token_list(TOKENS)
    names = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for seed, (parameter, weight) in enumerate(model.named_parameters()):
        stored_name = names.get_name(parameter, (".weight", ".bias"))
        kind = kind_of(stored_name, kinds) if weight.dim() == 2 else "F32"
        dtype = gguf.GGMLQuantizationType[kind]
        if kind in HALVES:
            blocks = random_blocks(kind, *weight.shape, seed)
            weight.data = put_back(parameter, decoded(kind, blocks), config)
        else:
            weight.data = weight.data.half().float() if kind == "F16" else weight.data
            data = exchanged(parameter, weight.data, config) if name == "llama" else weight.data
            data = data + 1 if name == "gemma2" and "norm" in parameter else data
            blocks = gguf.quants.quantize(data.contiguous().numpy(), dtype)
        writer.add_tensor(stored_name, blocks, raw_dtype=dtype)
    finish(writer)


def put_back(parameter: str, weight: Tensor, config: Any) -> Tensor:
    """Rows of q and k as transformers has them: halves of a head one after the other."""
    heads = config.num_attention_heads if "q_proj" in parameter else config.num_key_value_heads
    if config.model_type != "llama" or (".q_proj." not in parameter and ".k_proj." not in parameter):
        return weight
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", CODES + FLOATS)
def test_each_type(kind: str, tmp_path: Path) -> None:
    """One row and several; the fewest blocks in a row."""
    width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for rows, blocks in ((1, 1), (7, 3)):
        stored = random_blocks(kind, rows, blocks * width, rows)
        entry_type = next(block for block in BLOCK_TYPES.values() if block.name == kind)
        path = tmp_path / f"{rows}"
        path.write_bytes(stored.tobytes())
        entry = TensorEntry("x", path, 0, kind, (rows, blocks * width), stored.nbytes)
        with Checkpoint(tmp_path, {}, {"x": renamed("x", GgufRows(entry))}) as checkpoint:
            assert (checkpoint.entry("x").int4 is None) == (entry_type.form is None)
            found = [checkpoint.read_rows("x", at, min(at + 2, rows)) for at in range(0, rows, 2)]
            assert torch.equal(torch.cat(found), decoded(kind, stored))


#: What llama.cpp's quantizer makes of a model as Q4_K_M, and other mixtures.
MIXTURES = {
    "Q4_K_M": {"token_embd": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "": "Q4_K"},
    "Q4_K_S, other fallbacks": {
        "token_embd": "Q5_K",
        "attn_k": "Q5_0",
        "ffn_up": "Q8_0",
        "output": "F16",
        "": "Q4_K",
    },
    "Q4_0": {"token_embd": "Q4_0", "output": "Q6_K", "": "Q4_0"},
    "IQ4_XS": {"token_embd": "Q8_0", "attn_q": "IQ4_NL", "output": "Q5_1", "": "IQ4_XS"},
    "MXFP4": {"token_embd": "F16", "attn_output": "Q4_1", "output": "Q8_0", "": "MXFP4"},
}


def make(mixture: str, folder: Path, family: str = "Llama", **changes: Any) -> Any:
    """Writes folder/model.gguf with rows of 256; returns transformers' model with the file's matrices."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    model = build(family, folder / "source", **(sizes | changes))
    write_mixed(model, folder / "model.gguf", MIXTURES[mixture])
    return model


def as_computed(model: Any, kinds: dict[str, str]) -> None:
    """Rounds to INT8 what the engine rounds: types of more than 4 bits in groups of 32, unless they are
    integers with scales; others in rows."""
    names = gguf.get_tensor_name_map(gguf.constants.MODEL_ARCH[model.config.model_type.upper()], 2)
    for parameter, weight in model.named_parameters():
        if weight.dim() == 2:
            kind = kind_of(names.get_name(parameter, (".weight", ".bias")), kinds)
            if kind not in CODES + INTEGERS:
                weight.data = quantize(weight.data, 32 if kind in FLOATS else 0).dequantize()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_in_a_model(mixture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make(mixture, tmp_path)
    with caplog.at_level(logging.INFO):
        opened = open_model(tmp_path / "model.gguf")
    has_floats = sorted(set(MIXTURES[mixture].values()) & set(FLOATS) - set(INTEGERS))
    assert (f"{', '.join(has_floats)}, which become INT8 in groups of 32" in caplog.text) == bool(has_floats)
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        logits = UnquantizedModel(opened).forward(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    as_computed(model, MIXTURES[mixture])
    kernels = "torch" if mixture == "Q4_K_M" else "auto"
    assert_computes(tmp_path / "model.gguf", model, kernels=kernels, is_rounded=True)


def test_parts_keep_their_types(tmp_path: Path) -> None:
    """q and k in 4 bits, v in 8; all codes as the file has them, and only the others have an error."""
    model = make("Q4_K_M", tmp_path)
    store = open_model(tmp_path / "model.gguf").store
    layer, theirs = read_layer(store, 1), model.model.layers[1]
    qkv, gate_up = layer.matrix("qkv"), layer.matrix("gate_up")
    assert isinstance(qkv, StackedMatrix) and isinstance(gate_up, Int4Tensor)
    assert [type(part) for part in qkv.parts] == [Int4Tensor, Int4Tensor, QuantizedTensor]
    assert torch.equal(qkv.parts[0].dequantize(), theirs.self_attn.q_proj.weight)
    assert torch.equal(qkv.parts[1].dequantize(), theirs.self_attn.k_proj.weight)
    assert torch.equal(
        qkv.parts[2].dequantize(), quantize(theirs.self_attn.v_proj.weight.data, 32).dequantize()
    )
    up = [theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]
    assert torch.equal(gate_up.dequantize(), torch.cat(up))
    errors = {error.name: error.relative for error in quantization_errors(store)}
    layers = [
        f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("self_attn.v_proj", "mlp.down_proj")
    ]
    assert set(errors) == {*layers, "lm_head.weight"} and max(errors.values()) < 0.01
    assert store.is_quantized
    with pytest.raises(ConfigError, match="in 4 bits already, with scales per 32 inputs"):
        open_model(tmp_path / "model.gguf", group_size=64)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("weights", ["int8", "planes"])
def test_integers_are_kept(
    kind: str, family: str, weights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any integers, also blocks without the largest one of the type, in layers, embedding and head."""
    MIXTURES.setdefault(kind, {"": kind})
    model = make(kind, tmp_path, family)
    with caplog.at_level(logging.INFO):
        opened = open_model(tmp_path / "model.gguf", weights=weights)
    store = opened.store
    assert "quantized again" not in caplog.text and not list(quantization_errors(store))
    layer, theirs = read_layer(store, 1), model.model.layers[1]
    attention = [getattr(theirs.self_attn, f"{name}_proj").weight for name in "qkv"]
    if weights == "int8":
        assert torch.equal(layer.matrix("qkv").dequantize(), torch.cat(attention))
        assert torch.equal(layer.matrix("down").dequantize(), theirs.mlp.down_proj.weight)
    embedding = store.read_resident(store.tensors.embedding).matrix("embedding")
    assert torch.equal(embedding.dequantize(), model.model.embed_tokens.weight)
    assert torch.equal(store.read_exact("model.layers.1.mlp.down_proj.weight"), theirs.mlp.down_proj.weight)
    assert_computes(tmp_path / "model.gguf", model, is_rounded=True, weights=weights)


def test_one_scale_for_a_channel_is_there_for_who_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MIXTURES.setdefault("Q8_0", {"": "Q8_0"})
    model = make("Q8_0", tmp_path)
    store = open_model(tmp_path / "model.gguf", group_size=0).store
    down = read_layer(store, 1).matrix("down")
    expected = quantize(model.model.layers[1].mlp.down_proj.weight.data)
    assert torch.equal(down.qweight, expected.qweight) and torch.equal(down.scale, expected.scale)
    assert {error.name for error in quantization_errors(store)} >= {"model.embed_tokens.weight"}
    read_layer(open_model(tmp_path / "model.gguf", group_size=64).store, 1)
    make("Q4_0", tmp_path)
    with pytest.raises(ConfigError, match="which --group-size 0 can't change"):
        open_model(tmp_path / "model.gguf", group_size=0)
    with pytest.raises(ConfigError, match="group_size is 0, and 4 bits need groups"):
        EngineConfig(weights="int4", group_size=0)


def test_streamed_files_are_advised_to_be_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = Ids()
    make("Q4_K_M", tmp_path)
    config = EngineConfig(device="cpu", num_resident_layers=1, max_model_len=64)
    with caplog.at_level(logging.WARNING):
        Engine.load(tmp_path / "model.gguf", config, tokenizer=tokenizer).close()
    assert "not laid out to be streamed" in caplog.text and "penstock convert MODEL" in caplog.text


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Phi-3", "Gemma 2"])
def test_other_families_and_tied_heads(family: str, tmp_path: Path) -> None:
    MIXTURES.setdefault("tied", {"token_embd": "Q6_K", "attn_v": "Q6_K", "": "Q4_K"})
    changes = {"query_pre_attn_scalar": 64} if family == "Gemma 2" else {}
    model = make("tied" if family in ("Qwen3", "Gemma 2") else "Q4_K_M", tmp_path, family, **changes)
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        logits = UnquantizedModel(open_model(tmp_path / "model.gguf")).forward(ids).logits
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0", "NVFP4"])
def test_types_with_fewer_bits_are_named(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    dtype = gguf.GGMLQuantizationType[kind]
    num_bytes = gguf.GGML_QUANT_SIZES[dtype][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, num_bytes), np.uint8), raw_dtype=dtype)
    finish(writer)
    with pytest.raises(UnsupportedModel, match=f"blk.0.ffn_up.weight as {kind}; .*Q4_0, .*F16"):
        open_model(tmp_path / "model.gguf")


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Some bytes of the header changed: no other error than ours, whatever is read then."""
    make("Q4_K_M", tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    whole, tensors = file.read_bytes(), gguf.GGUFReader(file).tensors
    results = collections.Counter[str]()
    first = min(tensor.field.offset for tensor in tensors)
    for seed in range(120):
        rng, content = random.Random(seed), bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = (
                rng.randrange(4, int(tensors[0].data_offset))
                if seed % 2
                else rng.randrange(first, first + 1400)
            )
            content[at] = rng.choice((0, 1, 2, 6, 8, 12, 14, 23, 39, 255, rng.randrange(256)))
        file.write_bytes(content)
        results[outcome(file)] += 1
    assert results["read"] > 10 and results["CorruptFile"] > 10, results


def outcome(file: Path) -> str:
    try:
        store = open_model(file).store
        for index in range(store.num_layers):
            read_layer(store, index)
        store.read_resident(store.tensors.embedding)
        store.close()
    except CheckpointError as error:
        return type(error).__name__
    return "read"
