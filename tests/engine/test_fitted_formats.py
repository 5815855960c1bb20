"""Formats by a budget: the solver against trying everything, and models that it was asked for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_convert import GREEDY, PROMPTS, Ids
from tiny_models import build

from penstock import Engine, EngineConfig
from penstock.errors import ConfigError
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family, open_model, read_spec
from penstock.weights.conversion.bit_budget import Choice, least_loss
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.fitted_formats import FORMATS, BitBudget, described, fit, fit_store
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import ModelTensors


def test_nothing_loses_less() -> None:
    """By all choices of five parts. Lagrange finds the least loss of the bytes that it takes, so it may lose
    a little where bytes are left."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(20):
        sizes = torch.randint(10, 100, (5,), generator=generator).tolist()
        parts = [
            [Choice(bits * size, 4.0**-bits * (1 + size % 3)) for bits in (2, 3, 4, 8)] for size in sizes
        ]
        budget = int(4.2 * sum(sizes))
        chosen = least_loss(parts, budget)
        assert chosen is not None
        bought = [part[i] for part, i in zip(parts, chosen, strict=True)]
        assert sum(each.num_bytes for each in bought) <= budget
        losses = [
            sum(each.loss for each in tried)
            for tried in itertools.product(*parts)
            if sum(each.num_bytes for each in tried) <= budget
        ]
        worst = max(worst, sum(each.loss for each in bought) / min(losses))
    assert worst < 1.35
    assert least_loss(parts, sum(part[0].num_bytes for part in parts) - 1) is None
    assert least_loss(parts, 10**6) == [3] * 5


def num_bytes(tensors: ModelTensors) -> int:
    return sum(unit.num_bytes for unit in tensors.units)


def test_attention_is_finer_than_experts() -> None:
    config = find_shape("qwen3-30b-a3b")
    family, spec = read_spec(config)
    plain = planned_tensors(family.model_tensors(spec), config, "int8", None)
    whole = fit(plain, BitBudget(num_bytes=12 << 30))
    assert (
        11.7 * 2**30
        < num_bytes(whole) + sum(2 * each.num_elements for each in plain.embedding if each.is_matrix)
        <= 12.1 * 2**30
    )
    stack = whole.stacks[0]
    bits = {
        each.name: each.format.name for each in (*stack.layers[0], *stack.experts[0][0]) if each.is_matrix
    }
    assert bits["qkv"].startswith("int8") and bits["gate_up"].startswith("int3")
    assert len({each.format for layer in stack.experts for expert in layer for each in expert}) <= 2
    assert described(whole)[0].startswith("12.0")
    finer = fit(plain, BitBudget(bits=4.0))
    elements = sum(each.num_elements for each in plain.multiplied) - sum(
        each.num_elements for each in plain.head if each.is_matrix
    )
    assert 3.6 < 8 * num_bytes(finer) / elements < 4.05
    with pytest.raises(ConfigError, match="at least"):
        fit(plain, BitBudget(bits=2.0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    torch.manual_seed(0)
    build("Llama", folder, hidden_size=256, intermediate_size=512)
    return folder


def test_a_mixed_folder_answers_as_its_plan_says(source: Path, tmp_path: Path) -> None:
    target, opened = tmp_path / "target", open_model(source)
    lines = fit_store(opened.store, BitBudget(bits=4.0))
    convert(opened.store, target)
    config, kept = json.loads((target / "config.json").read_text()), open_model(target)
    formats = {each.format for unit in kept.store.tensors.units for each in unit.tensors if each.is_matrix}
    assert len(formats) > 1 and formats <= set(FORMATS)
    assert described(kept.store.tensors) == lines
    planned = planned_tensors(find_family(config).model_tensors(kept.spec), config, "int8", None)
    assert [unit.num_bytes for unit in planned.units] == [unit.num_bytes for unit in kept.store.tensors.units]
    answers = []
    for way in (EngineConfig(kernels="reference"), EngineConfig(num_resident_layers=1)):
        with Engine.load(target, way, tokenizer=cast(Any, Ids())) as engine:
            answers.append([c.token_ids for c in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match="quantized already"):
        fit_store(kept.store, BitBudget(bits=4.0))


@pytest.mark.parametrize(("bits", "is_coarse"), [(3.3, False), (2.6, True)])
def test_two_bits_are_taken_only_where_three_do_not_fit(bits: float, is_coarse: bool) -> None:
    config = find_shape("qwen3-30b-a3b")
    family, spec = read_spec(config)
    found = fit(planned_tensors(family.model_tensors(spec), config, "int8", None), BitBudget(bits=bits))
    assert any("int2" in line for line in described(found)) == is_coarse
