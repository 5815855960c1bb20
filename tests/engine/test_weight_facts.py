"""What people are told of a model's weights: the form of the files, their types, the number of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_gguf import write_gguf
from tiny_models import build

from penstock.config import WeightBits
from penstock.model.registry import open_model
from penstock.weights.conversion.convert import convert
from penstock.weights.weight_facts import WeightFacts


def facts(folder: Path) -> WeightFacts:
    opened = open_model(folder)
    opened.store.close()
    return opened.store.facts


@pytest.mark.parametrize(
    ("file_type", "of", "name"), [(15, "Q4_0", "Q4_K_M"), (None, "Q4_0", "Q4_0"), (None, "Q8_0", "Q8_0")]
)
def test_of_a_gguf_file(file_type: int | None, of: str, name: str, tmp_path: Path) -> None:
    """A file without `general.file_type` is named after its tensors."""
    model = build("Llama", tmp_path / "source")
    changes = {} if file_type is None else {"general.file_type": file_type}
    write_gguf(model, tmp_path / "model.gguf", of, changes=changes)
    found = facts(tmp_path / "model.gguf")
    assert (found.file_format, found.family, found.quantization) == ("gguf", "llama", name)
    assert found.num_parameters == model.num_parameters()


@pytest.mark.parametrize("kind", ["Llama", "Llama, tied, biases", "Mixtral"])
@pytest.mark.parametrize(("weights", "name"), [("int8", "INT8"), ("int4", "INT4"), ("planes", "INT8")])
def test_of_a_folder(kind: str, weights: WeightBits, name: str, tmp_path: Path) -> None:
    """Before it is converted, and after."""
    model = build(kind, tmp_path / "source")
    opened = open_model(tmp_path / "source", weights=weights, group_size=32)
    convert(opened.store, tmp_path / "out")
    opened.store.close()
    before, after = opened.store.facts, facts(tmp_path / "out")
    assert (after.file_format, after.family, after.quantization) == (
        "safetensors",
        model.config.model_type,
        name,
    )
    assert before == after and after.num_parameters == model.num_parameters()
    buffers = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0.5 * buffers < after.num_bytes < buffers
