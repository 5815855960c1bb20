"""gpt-oss as the hub has it: the experts of a layer merged, in MXFP4, beside matrices of bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import TOLERANCE, Model, oracle_logits
from tiny_models import VOCAB_SIZE, build
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.config import EngineConfig
from penstock.errors import UnsupportedModel
from penstock.kernels import Int4Tensor, QuantizedTensor
from penstock.model.known_shapes import SHAPES
from penstock.model.registry import find_family, open_model, read_spec
from penstock.spec import UnitKey
from penstock.weights.quantize import quantize
from penstock.weights.store import planned_tensors

MODULES = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder with random codes and exponents, and transformers' model with what its own code makes of them.
    The oracle's other matrices are what INT8 stands for."""
    folder = tmp_path_factory.mktemp("packed")
    oracle = build("gpt-oss", folder, num_hidden_layers=2)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    parameters: dict[str, Tensor] = dict(oracle.named_parameters())
    for layer in range(2):
        for module in MODULES:
            name = f"model.layers.{layer}.mlp.experts.{module}"
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, shape[:3], dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    for name, parameter in parameters.items():
        if name.endswith("proj.weight") or name in ("lm_head.weight", "model.embed_tokens.weight"):
            with torch.no_grad():
                parameter.copy_(quantize(parameter).dequantize())
    return folder, oracle


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_logits_equal_transformers(packed: tuple[Path, transformers.PreTrainedModel], kv_dtype: str) -> None:
    folder, oracle = packed
    model = Model(folder, EngineConfig(kv_dtype=kv_dtype))
    expected = oracle_logits(oracle)
    worst = float((model.all_logits(model.sequences()) - expected).abs().max())
    assert expected.shape[1] == VOCAB_SIZE
    assert worst <= TOLERANCE[kv_dtype] * float(expected.max() - expected.min())


def test_experts_keep_their_bits(packed: tuple[Path, transformers.PreTrainedModel]) -> None:
    """Experts stay in 4 bits, and attention becomes INT8; each expert is read alone."""
    folder, oracle = packed
    store = open_model(folder).store
    unit = store.units[UnitKey("decoder", 1, 4)]
    weights = store.read_unit(unit.key, torch.empty(unit.num_bytes, dtype=torch.uint8))
    experts = dict(oracle.named_parameters())
    for module, name in zip(MODULES, ("gate_up", "down"), strict=True):
        matrix = weights.matrix(name)
        assert isinstance(matrix, Int4Tensor) and matrix.codebook == "mxfp4"
        expected = experts[f"model.layers.1.mlp.experts.{module}"][4].t()
        assert torch.equal(matrix.dequantize(), expected)
        assert torch.equal(
            weights.vector(f"{name}.bias"), experts[f"model.layers.1.mlp.experts.{module}_bias"][4]
        )
    dense = store.units[UnitKey("decoder", 1)]
    layer = store.read_unit(dense.key, torch.empty(dense.num_bytes, dtype=torch.uint8))
    assert isinstance(layer.matrix("qkv"), QuantizedTensor)


def test_the_plan_knows_what_has_4_bits() -> None:
    config = SHAPES["gpt-oss-20b"]
    family, spec = read_spec(config)
    tensors = planned_tensors(family.model_tensors(spec), config, "int8", None)
    expert = tensors.stacks[0].experts[0][0]
    assert [tensor.format.name for tensor in expert if tensor.is_matrix] == ["int4 mxfp4, groups of 32"] * 2
    assert {tensor.format.name for tensor in tensors.stacks[0].layers[0] if tensor.is_matrix} == {"int8"}


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"layer_types": ["chunked_attention"] * 24}])
def test_other_variants_are_refused(change: dict[str, object]) -> None:
    config = SHAPES["gpt-oss-20b"] | change
    with pytest.raises(UnsupportedModel, match="gelu|chunked_attention"):
        find_family(config).read_spec(config)
