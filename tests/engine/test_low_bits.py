"""Our own codes of 3 and 2 bits: kernels give the bits of reference.py, which is checked against numbers
written out here; folders, plans and random shapes have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import GREEDY, PROMPTS, Ids
from test_convert_int4 import layer_buffers
from test_int4_kernels import FAST, kernels
from tiny_models import build
from torch import Tensor

from penstock import Engine, EngineConfig
from penstock.errors import ConfigError, WrongTensor
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.low_codes import MOST_STEPS, pack_low, row_bytes, unpack_low
from penstock.kernels.reference import ReferenceKernels, quantize_activations
from penstock.model.registry import find_family, open_model
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.gptq import compensate_int4, plan_turns
from penstock.weights.formats.int4_format import Int4
from penstock.weights.quantize_int4 import CODES, quantize_int4
from penstock.weights.store import planned_tensors

#: Rows, inputs and groups: whole blocks and parts of them, one group, half a pair, more channels than a task.
SHAPES = ((130, 576, 64), (67, 320, 32), (9, 96, 32), (5, 64, 64), (210, 1024, 64), (40, 832, 64))


def matrix(bits: int, rows: int, columns: int, size: int) -> Int4Tensor:
    """Random codes, and steps of all bytes: those beyond the largest count as that."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    steps = torch.randint(-128, 128, (rows, columns // size), generator=generator, dtype=torch.int8)
    units = (torch.rand(rows, 1, generator=generator) * 0.01).bfloat16()
    return Int4Tensor(pack_low(codes, bits), units, size, f"int{bits}", sub_scale=steps)


@pytest.mark.parametrize("bits", [3, 2])
def test_codes_lie_as_they_are_described(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 320), dtype=torch.uint8)
    stored = pack_low(codes, bits)
    assert stored.shape == (3, row_bytes(320, bits)) == (3, {3: 192, 2: 96}[bits])
    assert torch.equal(unpack_low(stored, bits, 320), codes)
    a, b, c = (int(byte) for byte in stored[1, [7, 39, 71]])
    own = [int(code) for code in codes[1]]
    if bits == 2:
        assert [a >> 2 * slot & 3 for slot in range(4)] == [own[14], own[15], own[78], own[79]]
        return
    slots = [a & 7, a >> 3 & 7, b & 7, b >> 3 & 7, c & 7, c >> 3 & 7]
    slots += [a >> 6 | (b >> 6 & 1) << 2, c >> 6 | b >> 7 << 2]
    assert slots == [own[at] for first in (14, 78, 142, 206) for at in (first, first + 1)]


@pytest.mark.parametrize("bits", [3, 2])
def test_reference_is_exact(bits: int) -> None:
    weight, x = matrix(bits, 5, 320, 32), torch.randn(2, 320)
    q, token_scale = quantize_activations(x, "int16")
    assert weight.sub_scale is not None
    steps = weight.sub_scale.long().clamp(-MOST_STEPS[bits], MOST_STEPS[bits]).repeat_interleave(32, 1)
    integers = (unpack_low(weight.codes, bits, 320).long() - (1 << (bits - 1))) * steps
    assert int(integers.abs().max()) <= 127
    exact = (q.long() @ integers.t()).double() * (token_scale.double()[:, None] * weight.scale.double().t())
    assert torch.equal(ReferenceKernels().linear(x, weight), exact.float())
    assert torch.equal(weight.dequantize(), (integers * weight.scale.double()).float())
    assert torch.equal(ReferenceKernels().linear(x, weight.in_nibbles()), exact.float())


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("bits", [3, 2])
@pytest.mark.parametrize("name", FAST)
def test_kernels_give_the_bits_of_the_reference(name: str, bits: int, activations: str) -> None:
    fast, reference = kernels(name, activations), ReferenceKernels(activations)
    for rows, columns, size in SHAPES:
        weight = matrix(bits, rows, columns, size)
        x, bias = torch.randn(40, columns), torch.randn(rows)
        expected = reference.linear(x, weight, bias)
        for tokens in (1, 2, 3, 5, 8, 9, 40):
            assert torch.equal(fast.linear(x[:tokens], weight, bias), expected[:tokens])


def test_a_search_loses_less_than_the_largest_weight() -> None:
    """By the errors that facts of the field have for these codes of normal weights."""
    weight = torch.randn(32, 2048, generator=torch.Generator().manual_seed(0))
    for name, size, most in (
        ("int3", 32, 0.167),
        ("int3", 64, 0.18),
        ("int2", 32, 0.337),
        ("int2", 64, 0.357),
    ):
        code = CODES[name]
        lost = (quantize_int4(weight, size, code).dequantize() - weight).norm() / weight.norm()
        groups = weight.view(32, -1, size)
        scale = groups.abs().amax(-1, keepdim=True) / -code.lowest
        plain = (groups / scale).round().clamp(code.lowest, code.highest) * scale
        assert lost < most and lost < (plain.view_as(weight) - weight).norm() / weight.norm()


@pytest.mark.parametrize("bits", [3, 2])
def test_compensation_loses_less_of_the_outputs(bits: int) -> None:
    """GPTQ, by inputs of which a few directions are far larger than the others."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 128, generator=generator)
    x = torch.randn(600, 40, generator=generator) @ torch.randn(40, 128, generator=generator)
    plain = quantize_int4(weight, 64, CODES[f"int{bits}"])
    found = plain.map(torch.zeros_like)
    compensate_int4(weight, plan_turns(x.t() @ x, torch.zeros(128, 128)), found)
    lost = [(x @ (each.dequantize() - weight).t()).norm() for each in (found, plain)]
    assert lost[0] < 0.6 * lost[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("low")
    torch.manual_seed(0)
    build("Qwen3", folder)
    return folder


@pytest.mark.parametrize("weights", ["int3", "int2"])
def test_a_folder_answers_as_the_model_that_was_quantized_while_it_was_loaded(
    weights: Any, source: Path, tmp_path: Path
) -> None:
    target, tokenizer = tmp_path / "target", cast(Any, Ids())
    opened = open_model(source, weights=weights, group_size=32)
    convert(opened.store, target)
    config, kept = json.loads((target / "config.json").read_text()), open_model(target)
    kinds = {each.format for each in kept.store.tensors.multiplied if isinstance(each.format, Int4)}
    assert {kind.name for kind in kinds} == {f"{weights}, groups of 32"}
    planned = planned_tensors(find_family(config).model_tensors(kept.spec), config, "int8", None)
    assert [unit.num_bytes for unit in planned.units] == [unit.num_bytes for unit in kept.store.tensors.units]
    for index in range(kept.store.num_layers):
        first, *others = layer_buffers([opened.store, kept.store], index)
        assert all(torch.equal(first, other) for other in others)
    answers = []
    ways = EngineConfig(weights=weights, group_size=32), EngineConfig(num_resident_layers=1)
    for folder, way in zip((source, target), ways, strict=True):
        with Engine.load(folder, way, tokenizer=tokenizer) as engine:
            answers.append([(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match="already"):
        open_model(target, weights="int2" if weights == "int3" else "int3")


def test_arrays_that_do_not_fit_are_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    convert(open_model(source, weights="int3", group_size=32).store, target)
    path = next(target.glob("model-layer-*.safetensors"))
    tensors: dict[str, Tensor] = load_file(path)
    name = next(name for name in tensors if name.endswith("_int3_32"))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)
    with pytest.raises(WrongTensor, match="does not fit"):
        open_model(target)


def test_groups_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 bits need groups"):
        EngineConfig(weights="int3", group_size=128)
