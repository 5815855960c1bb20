"""The unquantized twin, layer by layer, against transformers' own model as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from sparse_models import write_sparse_llama
from test_families import dequantized
from tiny_models import DISTINCT, MIXTURES, MODELS, build, in_circles
from torch import Tensor, nn

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.conversion.convert import convert
from warm_python import run_warm

TOKENS = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def whole(model: transformers.PreTrainedModel) -> tuple[list[Tensor], Tensor]:
    """Hidden states after each layer, and logits."""
    number = model.config.num_hidden_layers
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == number)
    hidden: list[Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _, __, output: hidden.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in layers
    ]
    logits = model(TOKENS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    # Gemma 3n has several hidden states of each token.
    return [each.permute(1, 2, 0, 3).flatten(2) if each.dim() == 4 else each for each in hidden], logits


def assert_equal(folder: Path, oracle: transformers.PreTrainedModel) -> None:
    twin = UnquantizedModel(open_model(folder))
    hidden, logits = whole(oracle)
    for _ in range(2):  # nothing is left over of the first time
        computed = twin.forward(TOKENS)
        torch.testing.assert_close(computed.logits, logits)
        assert len(computed.hidden) == len(hidden)
        for mine, expected in zip(computed.hidden, hidden, strict=True):
            torch.testing.assert_close(mine, expected)


#: Of mixtures, one for each way in which experts are named and lie.
MERGED = (
    "Laguna",
    "Qwen2-MoE",
    "Mistral 4",
    "Llama 4",
    "MiniMax-M2",
    "Granite MoE",
    "Phi-3.5-MoE",
    "DeepSeek V3",
    "gpt-oss",
    "Gemma 4, experts",
)


@pytest.mark.parametrize(
    "name",
    in_circles([name for name in MODELS if (name in DISTINCT and name not in MIXTURES) or name in MERGED]),
)
def test_layer_by_layer_equals_the_whole_model(name: str, tmp_path: Path) -> None:
    assert_equal(tmp_path, build(name, tmp_path))


@pytest.mark.parametrize("name", ["Mixtral", "Granite MoE", "Apertus"])
def test_a_converted_folder(name: str, tmp_path: Path) -> None:
    """It holds experts apart, and no constants of activations."""
    oracle = dequantized(build(name, tmp_path / "made"), tmp_path / "made")
    convert(open_model(tmp_path / "made").store, tmp_path / "converted")
    assert_equal(tmp_path / "converted", oracle)


def test_a_model_that_transformers_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' twin of MiniCPM is not there for users."""
    build("MiniCPM", tmp_path)
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, "minicpm")
    with pytest.raises(UnsupportedModel, match="transformers has no model of type 'minicpm'"):
        UnquantizedModel(open_model(tmp_path))


@pytest.mark.parametrize("name", ["Llama, tied, biases", "GPT-2", "GPT-NeoX", "BLOOM, untied"])
def test_int8_is_dequantized(name: str, tmp_path: Path) -> None:
    """Tied heads, transposed matrices, heads of another name, fused matrices."""
    model = build(name, tmp_path / "original")
    convert(open_model(tmp_path / "original").store, tmp_path / "int8")
    assert_equal(tmp_path / "int8", dequantized(model, tmp_path / "original"))


def test_half_precision_is_computed_in_float32(tmp_path: Path) -> None:
    build("Llama", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    assert_equal(
        tmp_path, transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    )


def test_a_bare_model_without_its_prefix(tmp_path: Path) -> None:
    model = build("GPT-2", tmp_path)
    config = (tmp_path / "config.json").read_text()
    model.base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert_equal(tmp_path, model)


def test_what_transformers_leaves_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("Llama", tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "initialize_weights", lambda self: None)
    with pytest.raises(UnsupportedModel, match=r"leaves model\.rotary_emb\.inv_freq.* empty"):
        UnquantizedModel(open_model(tmp_path))


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    twin = UnquantizedModel(open_model(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(CorruptFile, match=r"model\.safetensors ends within tensor"):
        twin.forward(TOKENS)


FORWARD_UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
import torch
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel

torch.set_num_threads(1)
torch.ones(512, 512) @ torch.ones(512, 512)
opened = open_model(Path(sys.argv[1]))
twin = UnquantizedModel(opened)
line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
budget = twin.workspace_bytes() + twin.sequence_bytes(16)
limit = int(line.split()[1]) * 1024 + budget
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
logits = twin.forward(torch.zeros(1, 16, dtype=torch.int64)).logits
total = sum(entry.num_bytes for entry in opened.store.checkpoint.entries.values())
print(json.dumps({"budget": budget, "float32": 2 * total, "shape": logits.shape}))
"""


def test_a_checkpoint_much_larger_than_its_memory(tmp_path: Path) -> None:
    """1.1 GB in float32, computed in what workspace_bytes() and sequence_bytes() say; the kernel enforces
    it."""
    write_sparse_llama(tmp_path, num_layers=8, hidden_size=1024, intermediate_size=10240)
    run = run_warm("-c", FORWARD_UNDER_A_LIMIT, str(tmp_path))
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["shape"] == [1, 16, 256]
    assert result["float32"] > 3 * result["budget"]
