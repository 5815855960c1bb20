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
from penstock.errors import CheckpointError, ConfigError, CorruptFile, UnsupportedModel
from penstock.kernels import Int4Tensor, QuantizedTensor, StackedMatrix
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.reference import ReferenceKernels
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of, renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.conversion.convert import convert
from penstock.weights.quantization_error import quantization_errors
from penstock.weights.quantize import quantize

gguf = pytest.importorskip("gguf")

#: Types of integers with a scale for 32 of them, which are INT8 as they are.
INTEGERS = ["Q5_0", "Q8_0"]
#: The last ones have a scale for 16 inputs.
CODES = [
    "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "TQ1_0",
    "TQ2_0", "Q2_K", "Q3_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4",
]  # fmt: skip
FLOATS = ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"]
#: What is kept as the file has it.
KEPT = [*CODES, *INTEGERS]
#: Where a block has its numbers in float16, and what these are divided by, so that elements are below 1.
HALVES = {
    "Q4_0": ((0,), 100), "Q4_1": ((0, 2), 100), "Q4_K": ((0, 2), 8000), "IQ4_NL": ((0,), 1000),
    "IQ4_XS": ((0,), 30000), "MXFP4": ((), 1), "Q5_0": ((0,), 200), "Q5_1": ((0, 2), 200),
    "Q8_0": ((0,), 1000), "Q5_K": ((0, 2), 16000), "Q6_K": ((208,), 40000),
    "Q2_K": ((80, 82), 400), "Q3_K": ((108,), 1000), "IQ1_S": ((0,), 300), "IQ1_M": ((), 1),
    "IQ2_XXS": ((0,), 1500), "IQ2_XS": ((0,), 1500), "IQ2_S": ((0,), 1500), "IQ3_XXS": ((0,), 4000),
    "IQ3_S": ((0,), 4000), "TQ1_0": ((52,), 10), "TQ2_0": ((64,), 10), "NVFP4": ((), 1),
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
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 24, (len(blocks), 4))
    if kind == "IQ1_M":  # four bits in each of four words: float16's sign, exponent and mantissa
        parts = (rng.normal(size=len(blocks)) / 300).astype(np.float16).view(np.uint16)
        for place in range(4):
            at = 49 + 2 * place
            blocks[:, at] = (blocks[:, at] & 15) | ((parts >> 4 * place & 15) << 4).astype(np.uint8)
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


@pytest.mark.parametrize("kind", dict.fromkeys(KEPT + FLOATS))
def test_each_type(kind: str, tmp_path: Path) -> None:
    """One row and several; the fewest blocks in a row."""
    width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for rows, blocks in ((1, 1), (7, 3)):
        stored = random_blocks(kind, rows, blocks * width, rows)
        entry = written(kind, stored, tmp_path / f"{rows}")
        with Checkpoint(tmp_path, {}, {"x": entry}) as checkpoint:
            assert (entry.int4 is None) == (BY_NAME[kind].form is None)
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
    "Q2_K": {"token_embd": "Q2_K", "attn_v": "Q4_K", "attn_k": "Q3_K", "output": "Q6_K", "": "Q2_K"},
    "Q3_K_M": {"token_embd": "Q3_K", "attn_v": "Q5_K", "ffn_down": "Q4_K", "output": "IQ4_XS", "": "Q3_K"},
    "IQ1": {"token_embd": "IQ1_M", "attn_v": "IQ2_XXS", "attn_k": "Q2_K", "output": "Q5_K", "": "IQ1_S"},
    "IQ2_M": {"token_embd": "IQ3_S", "attn_q": "IQ2_XXS", "ffn_up": "IQ2_S", "output": "IQ1_S", "": "IQ2_XS"},
    "IQ3": {
        "token_embd": "IQ2_S",
        "attn_v": "IQ3_S",
        "ffn_gate": "IQ1_M",
        "output": "IQ3_XXS",
        "": "IQ3_XXS",
    },
    "ternary": {"token_embd": "TQ2_0", "attn_v": "NVFP4", "ffn_up": "TQ2_0", "output": "NVFP4", "": "TQ1_0"},
    "NVFP4": {"": "NVFP4"},
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
            if kind not in KEPT:
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
    with pytest.raises(ConfigError, match="group_size is 0, and weights of 4 bits need groups"):
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


def written(kind: str, stored: np.ndarray[Any, Any], path: Path) -> TensorEntry:
    """A tensor whose blocks are a file's whole content."""
    block = BY_NAME[kind]
    path.write_bytes(stored.tobytes())
    width = stored.shape[1] // block.num_bytes * block.num_inputs
    entry = TensorEntry("x", path, 0, kind, (stored.shape[0], width), stored.nbytes)
    return renamed("x", entry)


def operand(entry: TensorEntry) -> Int4Tensor | QuantizedTensor:
    """The matrix as kernels get it."""
    with Checkpoint(entry.file, {}, {"x": entry}) as checkpoint:
        if entry.int4 is not None:
            form = entry.int4.form
            arrays = entry.int4.read(checkpoint, 0, entry.shape[0])
            arrays = {name: array.contiguous() for name, array in arrays.items()}
            return Int4Tensor(group_size=form.group_size, codebook=form.codebook, **arrays)
        assert entry.int8 is not None
        integers, scales = entry.int8.read(checkpoint, 0, entry.shape[0])
        return QuantizedTensor(integers.contiguous(), scales.float().contiguous())


def test_types_that_the_package_does_not_decode(tmp_path: Path) -> None:
    """One bit: set is 1, clear -1. Two bits: minus 1."""
    rng = np.random.default_rng(3)
    for kind, width in (("Q1_0", 128), ("Q2_0", 64)):
        stored = rng.integers(0, 256, (5, 2 * 18), dtype=np.uint8)
        stored[:, [1, 19]] &= 0xBF  # neither NaN nor infinite
        rows = []
        for row in stored.reshape(5, 2, 18):
            for block in row:
                scale, bits = (
                    float(block[:2].view(np.float16)[0]),
                    np.unpackbits(block[2:], bitorder="little"),
                )
                whole = 2.0 * bits - 1 if kind == "Q1_0" else bits[::2] + 2.0 * bits[1::2] - 1
                rows.append(whole * scale)
        expected = torch.tensor(np.array(rows)).view(5, 2 * width).float()
        assert torch.equal(operand(written(kind, stored, tmp_path / kind)).dequantize(), expected)


@pytest.mark.parametrize("kind", CODES[6:])
def test_products_are_within_the_arithmetic_rule(kind: str, tmp_path: Path) -> None:
    """Every build and torch against float64: activations round to half of max|x| / 32512."""
    stored = random_blocks(kind, 37, 768)
    matrix, exact = operand(written(kind, stored, tmp_path / "x")), decoded(kind, stored).double()
    assert torch.equal(matrix.dequantize().double(), exact)
    kernels = [NativeKernels(build=build) for build in compiled_builds()]
    for tokens in (1, 2, 5, 17, 70):
        x = torch.randn(tokens, 768, generator=torch.Generator().manual_seed(tokens))
        found = [each.linear(x, matrix) for each in (ReferenceKernels(), TorchKernels(), *kernels)]
        assert all(torch.equal(found[0], each) for each in found[1:])
        step = x.abs().amax(1, keepdim=True).double() / 32512
        allowed = 0.5 * step * exact.abs().sum(1) + 1e-6 * (x.double().abs() @ exact.abs().t())
        assert bool(((found[0].double() - x.double() @ exact.t()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KEPT)
def test_extreme_scales_and_damaged_ones(kind: str, tmp_path: Path) -> None:
    """Zeros, subnormal and largest numbers are exact; NaN and infinity are refused."""
    places, _ = HALVES[kind]
    for number in (0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, float("inf"), float("nan")):
        stored = random_blocks(kind, 3, 256)
        if kind == "IQ1_M":
            bits = int(np.float16(number).view(np.uint16))
            stored[:, 49:56:2] = (stored[:, 49:56:2] & 15) | np.array(
                [(bits >> 4 * i & 15) << 4 for i in range(4)]
            )
        for at in places[:1]:
            stored[:, at : at + 2] = np.array([number], np.float16).view(np.uint8)
        entry = written(kind, stored, tmp_path / "x")
        if np.isfinite(number) or not (places or kind == "IQ1_M"):
            assert torch.equal(operand(entry).dequantize(), decoded(kind, stored))
        else:
            with pytest.raises(CorruptFile, match=rf"x \({kind}\) has a scale that is NaN or infinite"):
                operand(entry)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_blocks_of_any_bits_are_read_or_refused(count: int, tmp_path: Path) -> None:
    """As the package decodes them, where all numbers are finite."""
    rng = np.random.default_rng(count)
    for kind in KEPT:
        block = BY_NAME[kind]
        stored = rng.integers(0, 256, (count, block.num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = decoded(kind, stored)
        for row in range(count):
            entry = written(kind, stored[row : row + 1], tmp_path / "x")
            try:
                found = operand(entry).dequantize()
            except CorruptFile:
                assert not bool(torch.isfinite(expected[row]).all()) or kind == "MXFP4"
                continue
            assert torch.equal(found, expected[row : row + 1])


@pytest.mark.parametrize("mixture", ["IQ1", "IQ2_M", "IQ3", "ternary", "NVFP4"])
def test_conversion_keeps_codes(mixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and groups of 16 come back from a Penstock folder. The file has no tokenizer."""
    monkeypatch.setattr("penstock.weights.conversion.convert.read_companions", lambda *args: {})
    make(mixture, tmp_path)
    convert(open_model(tmp_path / "model.gguf").store, tmp_path / "converted")
    before, after = open_model(tmp_path / "model.gguf").store, open_model(tmp_path / "converted").store
    for name in ("qkv", "gate_up", "down"):
        mine, theirs = (read_layer(store, 1).matrix(name) for store in (after, before))
        assert torch.equal(mine.dequantize(), theirs.dequantize())


def test_scales_beside_blocks_are_refused(tmp_path: Path) -> None:
    """A number that multiplies a whole tensor of NVFP4."""
    make("NVFP4", tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            add = writer.add_float32 if isinstance(field.contents(), float) else writer.add_uint32
            add(field.name, field.contents())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("blk.0.ffn_up.scale", np.ones(1, np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModel, match="blk.0.ffn_up.scale, a scale of a whole"):
        open_model(tmp_path / "scaled.gguf")


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


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "Q4_0", "MXFP4", "Q8_0", "Q3_K", "Q6_K", "F16"])
@pytest.mark.parametrize("unit", [128, 256])
def test_rows_and_columns_in_another_order(kind: str, unit: int, tmp_path: Path) -> None:
    """Rows of two tensors by turns, and heads of columns, also where a block reaches over two heads: what the
    package decodes, in that order, and codes and integers that say the same."""
    blocks = [random_blocks(kind, 6, 1024, seed) for seed in (1, 2)] if kind != "F16" else [
        np.random.default_rng(seed).standard_normal((6, 1024)).astype(np.float16) for seed in (1, 2)
    ]  # fmt: skip
    parts = []
    for number, stored in enumerate(blocks):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(stored.tobytes())
        parts.append(TensorEntry("x", path, 0, kind, (6, 1024), stored.nbytes))
    plain = [
        torch.from_numpy(each.astype(np.float32)) if kind == "F16" else decoded(kind, each) for each in blocks
    ]
    rows = torch.tensor([7, 0, 1, 11, 2, 2, 5])
    columns = torch.randperm(1024 // unit, generator=torch.Generator().manual_seed(3))
    whole = torch.cat([each.view(6, 1024) for each in plain])[rows]
    expected = whole.view(7, -1, unit)[:, columns].flatten(1)
    entry = made_of("y", Matrix((parts[0], parts[1]), rows, columns))
    assert entry.shape == (7, 1024) and entry.sources == tuple(parts)
    with Checkpoint(tmp_path, {}, {"y": entry}) as checkpoint:
        for start, stop in ((0, 7), (2, 5), (6, 7)):
            found = checkpoint.read_rows("y", start, stop).float()
            torch.testing.assert_close(found, expected[start:stop], atol=1e-6, rtol=1e-6)
            if entry.int8 is not None:
                integers, scales = entry.int8.read(checkpoint, start, stop)
                groups = integers.view(*scales.shape, -1).float() * scales.float()[..., None]
                torch.testing.assert_close(groups.flatten(1), expected[start:stop])
    is_coded = kind in CODES
    assert (entry.int4 is not None) == is_coded
