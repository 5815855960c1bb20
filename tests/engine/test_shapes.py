"""Shapes against transformers' own count of parameters, and random folders against the loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import minicpm_twin
import pytest
import torch
import transformers
from test_convert import Ids
from units import layer_key

from penstock.config import EngineConfig, WeightBits
from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.engine import Engine
from penstock.errors import CheckpointError
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import SamplingParams
from penstock.model.footprint import footprint
from penstock.model.known_shapes import SHAPES, find_shape
from penstock.model.registry import find_family, open_model
from penstock.model.shapes import write_random
from penstock.weights.conversion import whole_file
from penstock.weights.formats.model_formats import has_int4, has_planes

#: Parameters as the models' cards state them, in 1e9.
STATED = {
    "cpm-1": 2.6, "cpm-2": 11.1, "eva": 2.84, "cpm-ant": 9.39, "minicpm-2b": 2.72, "minicpm4-8b": 8.19,
    "tinyllama-1.1b": 1.1, "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
    "solar-10.7b": 10.7, "falcon3-10b": 10.3, "mistral-7b": 7.25, "qwen2.5-7b": 7.61, "qwen3-8b": 8.2,
    "qwen3-14b": 14.8, "phi-3-mini": 3.82, "phi-4": 14.7, "gemma-2-9b": 9.24, "gpt2-xl": 1.56,
    "gemma-7b": 8.54, "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0,
    "mistral-small-24b": 23.6, "glm-4-9b": 9.4, "glm-4-32b": 32.6, "olmo-2-7b": 7.3, "olmo-2-13b": 13.7,
    "granite-3.3-8b": 8.17, "smollm3-3b": 3.08, "command-r7b": 8.03, "exaone-4-32b": 32.0,
    "seed-oss-36b": 36.2, "apertus-8b": 8.05, "t5-11b": 11.3, "flan-t5-xxl": 11.1, "flan-ul2": 19.5,
    "qwen2-57b-a14b": 57.4, "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "olmoe-1b-7b": 6.92,
    "glm-4.5-air": 106.9, "minicpm3-4b": 4.07, "deepseek-v2-lite": 15.7, "deepseek-v3": 671.0,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "llama-3.1-8b": 8.03, "qwen3-32b": 32.8,
    "gemma-4-26b-a4b": 25.2, "gemma-4-31b": 30.7, "qwen3-next-80b-a3b": 80.0, "qwen3.6-35b-a3b": 35.0,
    "qwen3.5-4b": 4.2, "qwen3.5-9b": 8.95, "qwen3.5-27b": 26.9, "qwen3.6-27b": 26.9, "qwen3.8-27b": 26.9,
    "granite-4-h-tiny": 6.94, "granite-4-h-small": 32.2, "nemotron-nano-9b-v2": 8.89,
    "kimi-linear-48b-a3b": 49.1, "ling-3.0-flash": 124.0,
    "nemotron-3-nano-30b-a3b": 31.6, "lfm2-1.2b": 1.17, "lfm2-8b-a1b": 8.34, "gemma-3n-e4b": 6.87,
    "gemma-4-e4b": 7.5,
    "opt-6.7b": 6.66, "gpt-j-6b": 6.05, "gpt-neox-20b": 20.6, "bloom-7b1": 7.07, "falcon-7b": 6.92,
    "falcon-40b": 41.3, "mpt-7b": 6.65, "phi-2": 2.78, "stablelm-2-12b": 12.1, "starcoder2-15b": 15.7,
}  # fmt: skip


#: Configurations of text parts have names of their own.
_TEXT = re.compile("(Gemma3n|Gemma3|Gemma4|Qwen3_5Moe|Qwen3_5)")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers_model(name: str) -> None:
    config = find_shape(name)
    # transformers has no EVA, which has the matrices of mT5.
    kind = config["architectures"][0].replace("EVAModel", "MT5ForConditionalGeneration")
    library: Any = minicpm_twin if kind.startswith("MiniCPMFor") else transformers
    with torch.device("meta"):
        kind_of_config = re.sub("For.*|LMHeadModel", "Config", kind)
        own_config = getattr(library, _TEXT.sub(r"\1Text", kind_of_config))(
            **{key: value for key, value in config.items() if key != "architectures"}
        )
        model = getattr(library, kind)(own_config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    family = find_family(config)
    spec = family.read_spec(config)
    tensors = family.model_tensors(spec)
    own_head = 0
    if spec.soft_prompt:  # transformers' head is a matrix of its own, with the embedding's first rows
        num_parameters -= model.lm_head.weight.numel()
        del model.lm_head
    if spec.num_encoder_layers and not spec.is_tied:  # transformers counts one matrix until a file has two
        own_head = spec.vocab_size
        num_parameters += own_head * spec.hidden_size
    assert num_parameters / 1e9 == pytest.approx(STATED[name], rel=0.01)
    found = footprint(spec, tensors)
    # Tables of positions stay float32. GPT-2 has matrices [in_features, out_features].
    # So do routers, whose corrections are buffers. transformers merges experts.
    is_table = re.compile(
        r"wpe|embed_positions|relative_attention_bias|segment_embedding|((?<!input_)gate|router)\.weight|_proj_bias"
        r"|router\.proj|altup\.[a-z_]+\.weight|in_proj_b?a?\.weight|\.(b|f_a|f_b)_proj\.weight"
    )
    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and not is_table.search(n)}
    experts = [p for n, p in model.named_parameters() if p.dim() == 3 and "conv" not in n]
    num_matrix_elements = sum(p.numel() for p in (*matrices.values(), *experts))
    vectors = num_parameters - num_matrix_elements - own_head * spec.hidden_size
    vectors += sum(
        b.numel()
        for n, b in model.named_buffers()
        if n.endswith(("correction_bias", "layer_scalar", "expert_bias"))
    )
    is_gpt2 = kind == "GPT2LMHeadModel"
    scales = own_head + sum(p.shape[1 if is_gpt2 and ".c_" in n else 0] for n, p in matrices.items())
    # gpt-oss has experts' matrices as GPT-2 has its own.
    scales += sum(p.shape[0] * p.shape[2 if kind.startswith("GptOss") else 1] for p in experts)
    layers = sum(unit.num_bytes for unit in tensors.units)
    weights = layers + found.embedding_bytes + found.head_bytes
    assert weights == num_matrix_elements + own_head * spec.hidden_size + 4 * (vectors + scales)
    assert found.head_elements == config["vocab_size"] * own_config.hidden_size
    if spec.num_encoder_layers == 0:
        assert found.num_layers == own_config.num_hidden_layers
        assert sum(found.layer_bytes) + found.experts.count * found.experts.num_bytes == layers
        assert found.experts.count * found.experts.elements == sum(p.numel() for p in experts)
    in_layers = {n: p.numel() for n, p in matrices.items() if re.search(r"\.\d+\.", n) and "altup_" not in n}
    # An encoder-decoder makes keys and values of the encoded prompt once, in layers of their own.
    encoded = [n for n in in_layers if re.search(r"^encoder\.|EncDecAttention\.[kv]\.", n)]
    assert found.num_encoder_layers == (2 * own_config.num_hidden_layers if encoded else 0)
    assert found.encoder_elements == sum(in_layers[n] for n in encoded)
    assert found.layer_elements == sum(in_layers.values()) - found.encoder_elements


def test_a_random_model_of_another_family_is_a_model(tmp_path: Path) -> None:
    """CPM-1's config has none of Llama's names."""
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    write_random(find_shape("cpm-1") | sizes, tmp_path)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(), tokenizer=tokenizer) as engine:
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5


def test_a_random_cpm_ant_is_a_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "dim_ff": 96, "dim_head": 16, "num_attention_heads": 4, "vocab_size": 128}
    write_random(find_shape("cpm-ant") | sizes | {"num_hidden_layers": 3}, tmp_path)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(), tokenizer=tokenizer) as engine:
        assert engine.model.store.tensors.is_tied
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5


@pytest.mark.parametrize("weights", ["int8", "planes"])
def test_a_random_encoder_decoder_is_a_model(weights: WeightBits, tmp_path: Path) -> None:
    """CPM-2's form: projections of equal parts, a stack between encoder and decoder. All layers in memory,
    and some."""
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "vocab_size": 128}
    config = find_shape("cpm-2") | sizes | {"num_layers": 3, "num_decoder_layers": 2}
    write_random(config, tmp_path, weights=weights)
    tokenizer: Any = Ids()
    answers = []
    for num_resident in (None, 3, 0):
        with Engine.load(
            tmp_path, EngineConfig(num_resident_layers=num_resident), tokenizer=tokenizer
        ) as engine:
            assert has_planes(engine.model.store.tensors) == (weights == "planes")
            asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            answers.append(engine.generate([[1, 2, 3], [4, 5]], asked))
    assert len(answers[0][0].token_ids) == 5
    assert answers[0] == answers[1] == answers[2]


def test_random_four_bits_are_a_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config = find_shape("solar-10.7b") | sizes | {"num_key_value_heads": 2, "intermediate_size": 96}
    write_random(config, tmp_path, weights="int4", group_size=32)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(), tokenizer=tokenizer) as engine:
        tensors = engine.model.store.tensors
        assert has_int4(tensors) and tensors.group_size == 32
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5


def test_a_random_model_has_the_head_that_its_config_tells_of(tmp_path: Path) -> None:
    """A hybrid with experts, and its head of multi-token prediction."""
    config = find_shape("qwen3.6-35b-a3b") | {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
        "vocab_size": 128, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    write_random(config, tmp_path, weights="int4", group_size=32)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(mtp="on"), tokenizer=tokenizer) as engine:
        assert isinstance(engine.draft_model, MTPDrafter)
        engine.scheduler._drafter = Speculation(lambda num_tokens: 1.0, engine.draft_model)
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        assert len(answer.token_ids) == 5 and engine.metrics.draft_tokens


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_random_model_is_a_model(is_tied: bool, tmp_path: Path) -> None:
    config = find_shape("qwen3-14b") | {
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 128, "head_dim": 16, "tie_word_embeddings": is_tied,
    }  # fmt: skip
    progress: list[tuple[int, ...]] = []
    leftover = tmp_path / f"model-head.safetensors.0123{whole_file.TEMPORARY}"
    leftover.touch()  # of a process that was killed

    def report(*seen: int) -> None:
        progress.append(seen)
        with pytest.raises(CheckpointError, match="another process"):
            write_random(config, tmp_path)

    write_random(config, tmp_path, report)
    assert not any(whole_file.is_leftover(path) for path in tmp_path.iterdir())
    assert progress[-1][0] == progress[-1][1]
    store = open_model(tmp_path).store
    assert all(store.contiguous_unit(layer_key(index)) for index in range(5))
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(num_resident_layers=2), tokenizer=tokenizer) as engine:
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5
