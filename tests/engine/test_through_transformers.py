"""Models through transformers' own modules, against transformers' own attention and linear modules with the
dequantized weights; the guard; what is refused; and a Llama both ways."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_convert import Ids
from test_invariance import arriving, requests
from tiny_models import NO_GROUPS, SMALL, UNTIED
from transformers.activations import ACT2FN

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import UnsupportedModel
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import choose_kernels
from penstock.kernels.reference import ReferenceKernels
from penstock.model.registry import open_model, read_spec
from penstock.model.through_transformers import guard
from penstock.model.through_transformers.architectures import architectures
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.family import ThroughTransformers
from penstock.model.through_transformers.skeleton import read
from penstock.model.through_transformers.stand_ins import Activation, stand_in
from penstock.spec import FLOAT16
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize
from penstock_server.commands.planning.architecture_table import line

#: Name -> transformers' classes, config. No family of our own computes them, but for those that are computed
#: both ways.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Parallel blocks, LayerNorm, rope on a quarter of a head, biases; GPT-NeoX's own family is not used here.
    "GPT-NeoX": ("GPTNeoX", "GPTNeoXForCausalLM", NO_GROUPS),
    # One matrix of q, k and v per head, LayerNorm on heads, half of a head is turned, squared ReLU.
    "Persimmon": ("Persimmon", "PersimmonForCausalLM", NO_GROUPS | {"qk_layernorm": True}),
    # A norm inside of attention and of the mlp.
    "BitNet": ("BitNet", "BitNetForCausalLM", SMALL | {"tie_word_embeddings": True}),
    # Learned positions, a head of several modules, norms behind the blocks.
    "BERT": ("Bert", "BertLMHeadModel", NO_GROUPS | {"is_decoder": True}),
    # LayerNorm without biases, windows in two of three layers with another rope.
    "ModernBERT": (
        "ModernBertDecoder",
        "ModernBertDecoderForCausalLM",
        NO_GROUPS
        | {
            "local_attention": 8,
            "global_attn_every_n_layers": 3,
            "cls_token_id": 0,
            "sep_token_id": 1,
            "pad_token_id": 2,
        },
    ),
    # Norms without weights, cap of the logits.
    "NanoChat": ("NanoChat", "NanoChatForCausalLM", SMALL),
    # Mixtures: experts that lie apart in files beside an expert for all; experts that lie in one tensor.
    "FlexOlmo": ("FlexOlmo", "FlexOlmoForCausalLM", SMALL | {"num_experts": 8, "num_experts_per_tok": 2}),
    "GraniteMoE": (
        "GraniteMoe",
        "GraniteMoeForCausalLM",
        # Without a multiplier, random scores are so sharp that float16 K differ by as much as the tolerance.
        SMALL
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "logits_scaling": 0.1,
            "attention_multiplier": 0.2,
        },
    ),
    "Llama": ("Llama", "LlamaForCausalLM", SMALL | UNTIED),
}


def make(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A random model, saved as transformers saves it."""
    config, kind, sizes = MODELS[name]
    torch.manual_seed(10)
    made = getattr(transformers, f"{config}Config")(**sizes, attn_implementation="eager")
    model: transformers.PreTrainedModel = getattr(transformers, kind)(made).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += (0.1 if key.endswith("bias") else 0.3) * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def round_weights(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """The model with each matrix replaced by what its INT8 stands for."""
    spec = read(json.loads((folder / "config.json").read_text()))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = (spec.embedding, *spec.layers, spec.head)
    matrices = [each for group in groups for each in group if each.is_matrix]
    with torch.no_grad():
        for matrix in matrices:
            for part in matrix.parts:
                if matrix.name != "head" or not spec.is_tied:
                    parameters[part].copy_(quantize(parameters[part]).dequantize())
        for layer in spec.experts:
            for number, expert in enumerate(layer):
                for matrix in expert:
                    part = parameters[matrix.parts[0].removesuffix(f".{number}.weight")][number]
                    part.copy_(quantize(part).dequantize())
    return model


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of test_families.py come through transformers here."""
    monkeypatch.setattr(families, "open_model", functools.partial(open_model, model_impl="transformers"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    oracle = round_weights(make(name, tmp_path), tmp_path)
    expected = families.oracle_logits(oracle)
    for dtype in ("float32", "float16"):
        tolerance = families.TOLERANCE[dtype]
        model = families.Model(tmp_path, EngineConfig(kv_dtype=dtype))
        assert isinstance(model.executor.family, ThroughTransformers)
        logits = model.all_logits(model.sequences())
        assert (logits - expected).abs().max() < tolerance * (expected.max() - expected.min())


Converted = Callable[[str], Path]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """converted(name): the folder of a converted model."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        make(name, folder / "made")
        convert(open_model(folder / "made", model_impl="transformers").store, folder / "int8")
        return folder / "int8"

    return folder_of


@pytest.mark.inner
@pytest.mark.parametrize("name", ["BERT", "FlexOlmo"])
def test_a_request_gets_in_any_company_what_it_gets_alone(name: str, converted: Converted) -> None:
    """Alone with all layers in memory; then in company, in chunks, with streamed layers and preemptions."""
    dice = random.Random(name)
    asked = requests(dice)
    plain = EngineConfig(
        max_model_len=96, max_num_batched_tokens=128, enable_prefix_caching=False, model_impl="transformers"
    )
    with Engine.load(converted(name), plain, tokenizer=Ids()) as engine:
        assert engine.model.is_invariant and engine.spec.implementation == "transformers"
        alone = [engine.generate([prompt], params)[0] for prompt, params in asked]
        kv_bytes = 96 * engine.spec.kv_bytes_per_token()
    crowded = EngineConfig(
        max_model_len=96, max_num_batched_tokens=33, max_num_seqs=3, num_resident_layers=1,
        kv_cache_bytes=kv_bytes, model_impl="transformers",
    )  # fmt: skip
    with Engine.load(converted(name), crowded, tokenizer=Ids()) as engine:
        together = arriving(engine, dice, asked)
        assert engine.metrics.num_preemptions
    for mine, expected in zip(together, alone, strict=True):
        assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_llama_both_ways(tmp_path: Path) -> None:
    make("Llama", tmp_path)
    answers = []
    for model_impl in ("penstock", "transformers"):
        config = EngineConfig(max_model_len=96, kv_dtype="float32", model_impl=model_impl)
        with Engine.load(tmp_path, config, tokenizer=Ids()) as engine:
            assert engine.spec.implementation == model_impl
            answers.append(engine.generate([[5, 7, 11]], requests(random.Random(0))[0][1])[0].logprobs)
    assert answers[0] is not None and answers[1] is not None
    for own, other in zip(*answers, strict=True):
        assert own.token_id == other.token_id and abs(own.logprob - other.logprob) < 1e-3


def test_int8_keys_and_values_pass_the_guard(converted: Converted) -> None:
    """The guard looks at modules and not at what INT8 rounds."""
    config = EngineConfig(max_model_len=96, kv_dtype="int8", model_impl="transformers")
    with Engine.load(converted("BERT"), config, tokenizer=Ids()) as engine:
        assert engine.model.is_invariant
        assert engine.generate([[5, 7, 11]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids


def test_the_guard_finds_what_depends_on_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mlp that looks at all tokens of a step; attention that forgets what it was asked for."""
    make("Persimmon", tmp_path)
    model = families.Model(tmp_path, EngineConfig())
    family, tensors = model.executor.family, model.store.tensors
    assert isinstance(family, ThroughTransformers)
    assert guard.is_invariant(family, tensors, FLOAT16)
    mlp = family.skeleton.layers[0].module.get_submodule("mlp")
    compute = mlp.forward
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda x: compute(x) * (1 + 1e-6 * x.abs().max()))
        assert not guard.is_invariant(family, tensors, FLOAT16)
        patch.setattr(mlp, "forward", lambda x: compute(x) * x.abs().max())
        with pytest.raises(UnsupportedModel, match="alone and in company"):
            guard.is_invariant(family, tensors, FLOAT16)
    family.attentions = [replace(each, scale=2 * each.scale) for each in family.attentions]
    with pytest.raises(UnsupportedModel, match="layer 0 of PersimmonForCausalLM is .* away"):
        guard.is_invariant(family, tensors, FLOAT16)


def test_an_activation_that_clips_is_none_of_ours() -> None:
    desk = Desk(ReferenceKernels(), lambda weights, name, x: x, 0, 1)
    found = {name: stand_in(ACT2FN[name], desk, name) for name in ("gelu", "gelu_10", "relu6")}
    assert isinstance(found["gelu"], Activation) and found["gelu_10"] is found["relu6"] is None


def test_names_of_files(tmp_path: Path) -> None:
    """Old files of BERT have gamma and beta."""
    make("BERT", tmp_path)
    before = families.Model(tmp_path, EngineConfig())
    logits = before.all_logits(before.sequences())
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file(old, tmp_path / "model.safetensors")
    after = families.Model(tmp_path, EngineConfig())
    assert torch.equal(after.all_logits(after.sequences()), logits)


REFUSED = [
    ("Mamba", {}, "MambaForCausalLM keeps a recurrent state"),
    ("RoFormer", {}, "RoFormerForCausalLM has no place for another attention"),
    ("Bert", NO_GROUPS, "its attention sees other keys than all before"),
    (
        "BitNet",
        SMALL | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "message"), REFUSED, ids=lambda value: str(value)[:9])
def test_what_is_refused_says_what_is_missing(kind: str, sizes: dict[str, Any], message: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    named = config.to_dict() | {
        "architectures": [f"{kind}{'LMHeadModel' if kind == 'Bert' else 'ForCausalLM'}"]
    }
    with pytest.raises(UnsupportedModel, match=f"is not supported.*Nor can .*{message}"):
        read_spec(named)
    with pytest.raises(UnsupportedModel, match="lists all"):
        read_spec(named, "penstock")


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": {"AutoModel": "modeling.Own"}}
    with pytest.raises(UnsupportedModel, match=r"auto_map.* is never run"):
        read_spec(config)


TABLE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"


#: Types that transformers 5.24 brought, which an older one does not know.
BROUGHT_BY_5_24 = {
    "apertus1p5_text", "dory", "exaone", "inkling2_loop_text", "lara_mini", "sarvam_mla", "sarvam_moe",
}  # fmt: skip


def test_the_table_of_architectures() -> None:
    """It has a row for each causal model that transformers knows; some rows are made anew. A newer
    transformers with types that the table lacks fails here: the message says who computes them."""
    kernels = choose_kernels(EngineConfig())
    kinds = ("bert", "llama", "mamba", "nanochat")
    rows = [row for row in TABLE.read_text().splitlines() if row.startswith("| ")][1:]
    for served in architectures(kernels, kinds):
        assert line(served) in rows, "run `penstock plan --architectures`"
    listed = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    known = set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert listed == sorted(listed) and set(listed) - known <= BROUGHT_BY_5_24
    new = tuple(sorted(known - set(listed)))
    told = "\n".join(line(served) for served in architectures(kernels, new)) if new else ""
    assert not new, (
        f"transformers {transformers.__version__} has causal types that {TABLE.name} lacks:\n{told}\n"
        "Run `penstock plan --architectures`, and look at those that are refused"
    )
