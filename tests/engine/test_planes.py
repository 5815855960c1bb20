"""INT8 in planes of four bits: whichever planes stay in memory, an engine gives the bits of INT8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_convert import GREEDY, PROMPTS, Ids, content, same_but_for_the_source, store_of
from tiny_models import build

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, UnsupportedModel
from penstock.kernels import PlanesTensor, QuantizedTensor
from penstock.memory.pages import PAGE
from penstock.memory.planning.plan import resident_layers
from penstock.model.registry import open_model
from penstock.spec import DECODER, UnitKey
from penstock.weights.conversion.convert import convert
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.quantization_error import quantization_errors


def answers(folder: Path, config: EngineConfig) -> tuple[list[Any], Engine]:
    """Tokens and log-probabilities, and the engine, closed."""
    tokenizer: Any = Ids()
    with Engine.load(folder, config, tokenizer=tokenizer) as engine:
        found = [(one.token_ids, one.logprobs) for one in engine.generate(PROMPTS, GREEDY)]
    return found, engine


@pytest.mark.inner
@pytest.mark.parametrize(("kind", "group_size"), [("Llama, tied, biases", 32), ("GPT-2", None)])
def test_a_folder_in_planes_computes_the_bits_of_int8(
    kind: str, group_size: int | None, tmp_path: Path
) -> None:
    """Converted from floats and from INT8; everything resident, the upper planes resident, parts of them, and
    everything streamed, from the folder and quantized on the way."""
    build(kind, tmp_path / "source", **{"n_layer" if kind == "GPT-2" else "num_hidden_layers": 6})
    convert(store_of(tmp_path / "source", group_size), tmp_path / "int8")
    convert(store_of(tmp_path / "source", group_size, "planes"), tmp_path / "planes")
    convert(store_of(tmp_path / "int8", weights="planes"), tmp_path / "again")
    assert same_but_for_the_source(content(tmp_path / "planes"), content(tmp_path / "again"))
    back = open_model(tmp_path / "planes", keeps_planes=False).store
    convert(back, tmp_path / "back")
    assert same_but_for_the_source(content(tmp_path / "int8"), content(tmp_path / "back"))
    store = store_of(tmp_path / "planes")
    ranges = [store.contiguous_unit(key) for key in store.units]
    assert len(ranges) == 12 and all(found is not None and found.offset % PAGE == 0 for found in ranges)
    config = EngineConfig(device="cpu", num_kv_tokens=128, group_size=group_size)
    expected, _ = answers(tmp_path / "int8", config)
    unconverted = replace(config, weights="planes", num_resident_layers=1)
    assert answers(tmp_path / "source", unconverted)[0] == expected
    planes = replace(config, group_size=None)
    found, whole = answers(tmp_path / "planes", planes)
    assert found == expected and not whole.plan.notes
    sizes = [layer.num_bytes for layer in whole.plan.layers]
    fixed = whole.plan.host_used_bytes - sum(sizes)
    for num_upper, num_lower, slots, note in (
        (6, 2, 2, "the upper planes of all layers stay in memory, and 4 of 6 lower planes are streamed"),
        (6, 0, 2, "the upper planes of all layers stay in memory, and 6 of 6 lower planes are streamed"),
        (2, 0, 4, "4 of 6 upper planes don't fit, and are streamed with the lower ones"),
        (0, 0, 4, "6 of 6 upper planes don't fit, and are streamed with the lower ones"),
    ):
        room = (num_upper + slots) * sizes[0] + num_lower * sizes[1]
        found, engine = answers(tmp_path / "planes", replace(planes, host_memory_bytes=fixed + room))
        assert engine.plan.notes == (note,) and engine.plan.num_staging_slots == slots
        assert found == expected
        assert engine.streamer.tiers.streamed_bytes > 0
        assert engine.metrics.num_resident_layers == engine.plan.num_resident_layers == num_lower


def test_a_layer_without_its_lower_planes_is_a_model_in_four_bits(tmp_path: Path) -> None:
    build("Llama", tmp_path / "source")
    whole, planes = store_of(tmp_path / "source"), store_of(tmp_path / "source", weights="planes")
    key = UnitKey(DECODER, 1)

    def read(store: Any, key: UnitKey) -> LayerWeights:
        weights: LayerWeights = store.read_unit(
            key, torch.empty(store.units[key].num_bytes, dtype=torch.uint8)
        )
        return weights

    int8, upper, lower = read(whole, key), read(planes, key), read(planes, key._replace(plane="lower"))
    for name, matrix in int8.items():
        if not isinstance(matrix, QuantizedTensor):
            assert torch.equal(upper.vector(name), matrix)  # type: ignore[arg-type]
            continue
        half, joined = upper.matrix(name), upper.with_lower_planes(lower).matrix(name)
        assert isinstance(half, PlanesTensor) and isinstance(joined, PlanesTensor) and half.lower is None
        assert torch.equal(joined.joined().qweight, matrix.qweight) and torch.equal(half.scale, matrix.scale)
        assert torch.equal(half.joined().qweight, (matrix.qweight >> 4 << 4) + 8)


def test_the_error_is_that_of_int8(tmp_path: Path) -> None:
    build("Llama", tmp_path / "source")
    source = store_of(tmp_path / "source")
    report = convert(store_of(tmp_path / "source", weights="planes"), tmp_path / "planes")
    converted = list(quantization_errors(store_of(tmp_path / "planes"), source))
    assert converted == list(quantization_errors(source))
    assert report.errors.keys() == convert(source, tmp_path / "int8").errors.keys()


def test_what_planes_are_not_for(tmp_path: Path) -> None:
    build(
        "Llama",
        tmp_path / "source",
    )
    convert(store_of(tmp_path / "source", 32, "int4"), tmp_path / "int4")
    with pytest.raises(ConfigError, match="in codes already"):
        store_of(tmp_path / "int4", weights="planes")
    convert(store_of(tmp_path / "source", weights="planes"), tmp_path / "planes")
    with pytest.raises(ConfigError, match="is INT8 already"):
        store_of(tmp_path / "planes", weights="int4")
    path = tmp_path / "planes" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["version"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="planes of version 2.*Install a newer Penstock"):
        open_model(tmp_path / "planes")


@given(
    num_units=st.integers(0, 60),
    num_resident=st.integers(0, 70),
    num_encoder=st.integers(0, 20),
    data=st.data(),
)
def test_upper_planes_stay_before_lower_ones(
    num_units: int, num_resident: int, num_encoder: int, data: st.DataObject
) -> None:
    """In the decoder first."""
    num_encoder = min(num_encoder, num_units)
    places = st.sets(st.integers(0, num_units - 1)) if num_units else st.just(set[int]())
    lower = data.draw(places)
    resident = resident_layers(num_units, num_resident, num_encoder, lower)
    assert len(resident) == min(num_units, num_resident)
    order = [(index < num_encoder, index in lower) for index in range(num_units)]
    kept, left = (
        [order[index] for index in resident],
        [order[i] for i in range(num_units) if i not in resident],
    )
    assert not kept or not left or max(kept) <= min(left)
