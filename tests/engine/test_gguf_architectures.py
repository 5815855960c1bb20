"""GGUF files of every architecture, written by the converter's rules (converted_models.py): the same logits
as of the folder that they were made of."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import converted_models as rules
import pytest
import torch
from converted_models import Converted, gguf
from mtp_folders import save_with_head
from test_formats_in import Ids, assert_computes
from test_gguf import stored_as
from test_gguf_types import decoded, random_blocks
from tiny_models import build
from units import read_layer

import embedding_models
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import CheckpointError, UnsupportedModel
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import Int4Tensor
from penstock.model.registry import open_model, open_mtp_head
from penstock.text.tokenizer import NoText
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.gguf_files.gguf_models import ARCHITECTURES, OF_EXPERTS
from penstock.weights.quantize import quantize
from penstock.weights.tensors import beside_shared

GROUPS = {"n_group": 4, "topk_group": 2}
NO_DENSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
MISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48,
    "llama_4_scaling_beta": 0.5, "mscale": 0.5, "mscale_all_dim": 0.5,
}  # fmt: skip
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
CHUNKS = {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192}
CASES = [
    # hybrids
    Converted("qwen3next", "Qwen3-Next", NO_DENSE | {"attention_bias": False}, rules.delta_keys,
              rules.qwen3next),
    Converted("qwen35", "Qwen3.5", {}, rules.delta_keys, rules.qwen35),
    Converted("qwen35moe", "Qwen3.5 MoE", {}, rules.delta_keys, rules.qwen35),
    Converted("granitehybrid", "Granite 4", {}, rules.granite_hybrid, lambda *a: _granite_hybrid(*a)),
    Converted("granitehybrid", "Granite 4, no experts, rope",
              {"position_embedding_type": None, "mamba_n_groups": 1, "num_local_experts": 0},
              rules.granite_hybrid, lambda *a: _granite_hybrid(*a)),
    Converted("nemotron_h", "Nemotron-H", {"use_bias": False}, rules.nemotron_h, rules.mamba),
    Converted("nemotron_h_moe", "Nemotron-H, experts", {}, rules.nemotron_h, rules.mamba),
    Converted("nemotron_h_moe", "Nemotron-H, narrow experts", {}, rules.nemotron_h, rules.mamba),
    Converted("falcon-h1", "Falcon-H1", {}, rules.ssm, rules.falcon_h1),
    Converted("falcon-h1", "Falcon-H1, norm, biases", {}, rules.ssm, rules.falcon_h1),
    Converted("lfm2", "LFM2", {"conv_bias": False}, rules.lfm2_keys, rules.lfm2),
    Converted("lfm2moe", "LFM2-MoE", {}, rules.lfm2_keys, rules.lfm2),
    # dense
    Converted("llama", "Llama, tied, biases", {}, rules.part_of_head, rules.permuted),
    Converted("llama", "Llama, rope llama3", {}, rules.part_of_head, rules.permuted),
    Converted("qwen2", "Qwen2"),
    Converted("qwen2vl", "Qwen2", {}, lambda config: {"rope.dimension_sections": [16, 24, 24, 0]}),
    Converted("qwen3", "Qwen3"),
    Converted("qwen3vl", "Qwen3", {}, lambda config: {"n_deepstack_layers": 3}),
    Converted("phi3", "Phi-3, part of a head, window", {}, lambda config: rules.part_of_head(config)
              | {"attention.sliding_window": 9, "rope.scaling.original_context_length": 192}),
    Converted("mistral3", "Ministral 3", {"rope_parameters": MISTRAL3_ROPE}, rules.ministral_keys,
              rules.permuted),
    Converted("glm4", "GLM-4-0414", {}, rules.part_of_head),
    Converted("chatglm", "GLM-4", {}, rules.part_of_head),
    Converted("granite", "Granite", {}, rules.granite, rules.permuted),
    Converted("olmo", "OLMo", {}, lambda config: {
        "attention.clamp_kqv": 0.8, "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None}, rules.permuted),
    Converted("olmo2", "OLMo 2"),
    Converted("olmo2", "OLMo 3", {}, lambda config: rules.windows(config) | rules.own_base(config)),
    Converted("command-r", "Cohere", {}, lambda config: {"logit_scale": 0.25, "rope.scaling.type": "none"}),
    Converted("cohere2", "Cohere 2", {}, lambda config: {
        "logit_scale": 0.25, "attention.sliding_window": 9, "rope.dimension_count": 16}),
    Converted("ernie4_5", "ERNIE 4.5"),
    Converted("exaone4", "EXAONE 4", {}, rules.windows),
    Converted("smollm3", "SmolLM3", {"no_rope_layer_interval": 4}, rules.part_of_head, rules.permuted),
    Converted("seed_oss", "Seed-OSS"),
    Converted("hunyuan-dense", "Hunyuan", {}, rules.hunyuan_keys),
    Converted("arcee", "Arcee", {}, rules.part_of_head, rules.permuted),
    Converted("apertus", "Apertus", {}, rules.part_of_head),
    Converted("minicpm", "MiniCPM", {}, rules.minicpm_keys, rules.permuted),
    Converted("minicpm3", "MiniCPM3", {"dim_model_base": 256, "scale_emb": 12}, rules.minicpm3_keys),
    Converted("internlm2", "Llama", {}, rules.part_of_head, rules.permuted),
    Converted("exaone", "Llama, rope llama3", {}, rules.part_of_head),
    Converted("xverse", "Llama", {}, rules.part_of_head, rules.permuted),
    Converted("baichuan", "Llama", {}, rules.part_of_head, rules.permuted),
    # Gemma
    Converted("gemma", "Gemma", {}, rules.keep_none, rules.with_one),
    Converted("gemma2", "Gemma 2", {"query_pre_attn_scalar": 16}, lambda config: {
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0, "attention.sliding_window": 9},
        rules.with_one),
    Converted("gemma3", "Gemma 3", {"query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": PLAIN_ROPE}}, lambda config: rules.windows(config) | rules.own_base(config),
        rules.with_one),
    Converted("gemma3n", "Gemma 3n", {"altup_num_inputs": 4, "vocab_size_per_layer_input": 160},
              rules.gemma3n_keys, rules.gemma3n),
    Converted("gemma4", "Gemma 4", {}, rules.gemma4_keys, rules.gemma4),
    Converted("gemma4", "Gemma 4, experts", {}, rules.gemma4_keys, rules.gemma4),
    # mixtures
    Converted("llama", "Mixtral", {}, rules.part_of_head, rules.permuted),
    Converted("qwen2moe", "Qwen2-MoE", NO_DENSE, rules.experts_of_qwen),
    Converted("qwen3moe", "Qwen3-MoE", NO_DENSE, rules.experts_of_qwen),
    Converted("qwen3vlmoe", "Qwen3-MoE", NO_DENSE, rules.experts_of_qwen),
    Converted("olmoe", "OLMoE"),
    Converted("gpt-oss", "gpt-oss", {"swiglu_limit": 7.0}, lambda config: {
        "attention.sliding_window": 9, "expert_feed_forward_length": 96}, rules.gpt_oss),
    Converted("deepseek2", "DeepSeek V2", {"rope_parameters": DEEPSEEK_ROPE}, rules.deepseek_keys,
              rules.deepseek),
    Converted("deepseek2", "DeepSeek V3", {"rope_parameters": DEEPSEEK_ROPE, "num_nextn_predict_layers": 0},
              rules.deepseek_keys, rules.deepseek),
    Converted("deepseek32", "DeepSeek V3.2", {"rope_parameters": DEEPSEEK_ROPE}, rules.indexed_keys,
              rules.deepseek),
    Converted("glm-dsa", "GLM-5", {}, rules.indexed_keys, rules.deepseek),
    Converted("deepseek4", "DeepSeek V4", {"compress_rates": {
        "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}}, rules.deepseek4_keys,
        rules.deepseek4),
    Converted("mistral4", "Mistral 4", {}, rules.mistral4_keys, rules.mistral4),
    Converted("kimi-linear", "Kimi Linear", {}, rules.kda_keys, rules.kimi),
    Converted("bailingmoe3", "Ling 3", {}, rules.ling_keys, rules.ling),
    Converted("hy_v3", "Hunyuan 3", {}, rules.hy_v3_keys, rules.hy_v3),
    Converted("granitemoe", "Granite MoE", {}, rules.granite, lambda *a: _granite_hybrid(*a)),
    Converted("glm4moe", "GLM-4.5", {"num_nextn_predict_layers": 0}, lambda config: rules.sigmoid(config)
              | rules.part_of_head(config), rules.corrected),
    Converted("dots1", "dots.llm1", {}, rules.sigmoid, rules.corrected),
    Converted("minimax-m2", "MiniMax-M2", {}, lambda config: rules.part_of_head(config)
              | {"expert_feed_forward_length": 96, "expert_gating_func": 2}, rules.corrected),
    Converted("ernie4_5-moe", "ERNIE 4.5 MoE", {}, rules.ernie_keys, rules.ernie_moe),
    Converted("hunyuan-moe", "Hunyuan-A13B", {}, lambda config: {
        "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": 96,
        "expert_shared_feed_forward_length": 96}),
    Converted("phimoe", "Phi-3.5-MoE", {"router_jitter_noise": 0.01}, rules.part_of_head),
    Converted("llama4", "Llama 4", CHUNKS, lambda config: rules.part_of_head(config) | {
        "interleave_moe_layer_step": 2, "expert_feed_forward_length": config["intermediate_size"],
        "feed_forward_length": config["intermediate_size_mlp"]}, rules.turned_halves),
    # GPT's line
    Converted("gpt2", "GPT-2", {}, rules.keep_none, rules.gpt2),
    Converted("starcoder", "GPT-BigCode", {}, lambda config: {"attention.head_count_kv": 1}),
    Converted("gptneox", "GPT-NeoX", {}, lambda config: rules.part_of_head(config)
              | {"use_parallel_residual": True}, rules.by_head),
    Converted("gptneox", "GPT-NeoX, sequential", {}, lambda config: rules.part_of_head(config)
              | {"use_parallel_residual": False}, rules.by_head),
    Converted("bloom", "BLOOM, 6 heads", {}, rules.keep_none, rules.bloom),
    Converted("falcon", "Falcon", {}, lambda config: {"attention.head_count_kv": 1}, lambda *a: _falcon(*a)),
    Converted("falcon", "Falcon, groups", {}, lambda config: {"attention.head_count_kv": 2}, rules.by_group),
    Converted("mpt", "MPT, clip", {}, lambda config: {
        "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 2.0, "attention.max_alibi_bias": 8.0}),
    Converted("phi2", "Phi", {}, rules.part_of_head),
    Converted("stablelm", "StableLM, biases", {}, lambda config: rules.part_of_head(config)
              | {"use_parallel_residual": False}),
    Converted("stablelm", "StableLM, parallel, head norms", {}, lambda config: rules.part_of_head(config)
              | {"use_parallel_residual": True}, rules.stacked_norms),
    Converted("starcoder2", "StarCoder2", {"sliding_window": None}),
    Converted("nemotron", "Nemotron", {"head_dim": 16}, rules.part_of_head, rules.nemotron),
    Converted("jais2", "Jais 2", {}, rules.part_of_head),
]  # fmt: skip
#: Models that `make test` converts.
#: Models whose files are tried with mistakes.
MUTATED = ("Qwen3.5 MoE", "Gemma 4", "Granite 4", "LFM2")
QUICK = {"Qwen3.5 MoE", "LFM2", "Granite 4"}
PROMPTS = [[5, 9, 20, 33, 7, 7, 101, 45], list(range(20, 60))]


def _granite_hybrid(name: str, value: torch.Tensor, config: Any) -> Any:
    for changed, result in rules.permuted(name, value, config):
        for other, rows in rules.halves(changed, result, config):
            yield from rules.mamba(other, rows, config) if "mamba" in other else [(other, rows)]


def _falcon(name: str, value: torch.Tensor, config: Any) -> Any:
    yield from rules.by_group(name, value, config | {"num_kv_heads": 1})


@pytest.mark.parametrize("pooling", [1, 2])
def test_vectors_of_an_encoder(pooling: int, tmp_path: Path) -> None:
    """The mean of all tokens, or the first one, as the file says."""
    folder, file = tmp_path / "source", tmp_path / "model.gguf"
    embedding_models.save(folder, "BertModel")
    keys = {"attention.causal": False, "pooling_type": pooling}
    rules.write(
        folder, file, Converted("bert", "", keys=lambda config: keys, change=rules.bert), num_tokens=64
    )
    texts = [[2, 9, 17, 30, 3], [2, *range(10, 40), 3]]
    vectors = []
    for path in (folder, file):
        config = EngineConfig(kv_dtype="float32", pooling="mean" if pooling == 1 else "cls")
        config = config if path == folder else EngineConfig(kv_dtype="float32")
        with Engine.load(path, config, tokenizer=NoText()) as engine:
            vectors.append(engine.pool(texts))
    assert vectors[1] == [pytest.approx(vector, abs=1e-5) for vector in vectors[0]]


def logprobs(path: Path) -> list[float]:
    """The log-probabilities of the prompts' own tokens."""
    tokenizer: Any = Ids()
    config = EngineConfig(kv_dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    with Engine.load(path, config, tokenizer=tokenizer) as engine:
        return [
            each.logprob
            for answer in engine.generate(PROMPTS, params)
            for each in (answer.prompt_logprobs or ())
            if each is not None
        ]


@pytest.mark.parametrize(
    "kind", ["Q4_K", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q8_0", "Q6_K"))]
)
def test_blocks_reach_over_heads(kind: str, tmp_path: Path) -> None:
    """Qwen3.5's heads of v have 128 columns of the last matrix, in another order than the file's; blocks of
    256 reach over two of them, and 4-bit codes are kept all the same."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
        "linear_value_head_dim": 128, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    folder, file = tmp_path / "source", tmp_path / "model.gguf"
    model: Any = build("Qwen3.5", folder, **sizes)
    blocks = random_blocks(kind, 256, 512) if kind != "Q8_0" else None
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "in_proj_a" not in name and "in_proj_b" not in name:
            parameter.data = stored_as(parameter.data, "Q8_0")
    if blocks is not None:
        heads = decoded(kind, blocks).view(256, 2, 2, 128).transpose(1, 2).reshape(256, 512)
        mixer = model.model.layers[0].linear_attn
        mixer.out_proj.weight.data = (
            heads if kind == "Q4_K" else quantize(heads.contiguous(), 32).dequantize()
        )
    model.save_pretrained(folder)
    words = "token_embd output attn_qkv attn_gate attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
    types = dict.fromkeys([*words.split(), "ssm_out"], in_blocks)
    if blocks is not None:
        types["ssm_out"] = lambda value: (blocks, kind)
    rules.write(folder, file, Converted("qwen35", "Qwen3.5", sizes, rules.delta_keys, rules.qwen35), types)
    matrix = read_layer(open_model(file).store, 0).matrix("mixer_out")
    assert isinstance(matrix, Int4Tensor) == (kind == "Q4_K")
    assert_computes(file, model, is_rounded=True)


def in_blocks(value: torch.Tensor) -> tuple[Any, str]:
    data = value.float().contiguous().numpy()
    return gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0), "Q8_0"


@pytest.mark.parametrize(
    "model", [MUTATED[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MUTATED[1:])]
)
def test_any_header_is_read_or_refused(model: str, tmp_path: Path) -> None:
    """A few bytes of the header changed: a model, or an error of ours."""
    case = next(case for case in CASES if case.model == model)
    build(model, tmp_path / "source", **case.changes)
    rules.write(tmp_path / "source", tmp_path / "model.gguf", case)
    content = (tmp_path / "model.gguf").read_bytes()
    begin, end = content.index(case.arch.encode() + b"."), content.rindex(b".weight")
    draw = random.Random(48)
    for _ in range(40):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randint(begin, end)] = draw.randint(0, 255)
        (tmp_path / "fuzz.gguf").write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            open_model(tmp_path / "fuzz.gguf").store.close()


def test_every_architecture_is_tried_and_documented() -> None:
    """But for one whose files hold the same as those of another: paddleocr is ernie4_5. BERT has a
    test of its own."""
    known = {*ARCHITECTURES, *OF_EXPERTS}
    assert {case.arch for case in CASES} == known - {"paddleocr", "bert"}
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert not {name for name in known if f"`{name}`" not in page}


def test_a_file_that_sees_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj-F16.gguf", "clip")
    writer.add_type("mmproj")
    writer.add_tensor("v.patch_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="mmproj-F16.gguf is the part of a model that reads images"):
        open_model(tmp_path / "mmproj-F16.gguf")


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case.model in QUICK else pytest.mark.slow,
                 id=f"{case.arch}: {case.model}")
    for case in CASES
])  # fmt: skip
def test_as_its_folder(case: Converted, tmp_path: Path) -> None:
    folder, file = tmp_path / "source", tmp_path / "model.gguf"
    model: Any = build(case.model, folder, **case.changes)
    rules.write(folder, file, case)
    given, read = (logprobs(path) for path in (folder, file))
    assert len(given) == len(read) == sum(map(len, PROMPTS)) - 2
    assert given == pytest.approx(read, abs=2e-3)
    mine, theirs = (open_model(path) for path in (file, folder))
    if case.model != "MiniCPM":  # which transformers lacks
        ids = torch.tensor(PROMPTS[1:])
        with torch.inference_mode():
            logits = UnquantizedModel(mine).forward(ids).logits
            torch.testing.assert_close(logits, model(ids).logits, atol=1e-3, rtol=1e-3)
    assert type(mine.spec) is type(theirs.spec)
    for field in dataclasses.fields(mine.spec):
        if field.name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "is_tied"):
            assert getattr(mine.spec, field.name) == getattr(theirs.spec, field.name), field.name


def _with_head(name: str, value: torch.Tensor, config: Any) -> Any:
    """Qwen3.5's head lies behind the layers: blk.3, and its own modules are `nextn`."""
    words = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
             "norm": "shared_head_norm"}  # fmt: skip
    word = words.get(name.removeprefix("mtp.").removesuffix(".weight")) if name.startswith("mtp.") else None
    if word is not None:
        yield f"blk.3.nextn.{word}.weight", value + (word != "eh_proj")
        return
    yield from rules.qwen35(name.replace("mtp.layers.0.", "model.layers.3."), value, config)


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5 MoE"])
def test_a_head_that_guesses_is_read(name: str, tmp_path: Path) -> None:
    """The same head as that of the folder, rounded in the same way."""
    folder, file = tmp_path / "source", tmp_path / "model.gguf"
    save_with_head(name, folder, vocab_size=160)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 4}))
    arch = "qwen35" if name == "Qwen3.5" else "qwen35moe"
    keys = lambda config: rules.delta_keys(config) | {"nextn_predict_layers": 1}  # noqa: E731
    rules.write(folder, file, Converted(arch, name, {}, keys, _with_head))
    (folder / "config.json").write_text(json.dumps(told))
    heads = [open_mtp_head(path) for path in (folder, file)]
    stores = [head.store for head in heads if head is not None]
    assert len(stores) == 2
    for given, read in zip(*(store.tensors.groups for store in stores), strict=True):
        theirs, mine = (
            store.read_resident(beside_shared(tensors)).map(lambda part: part.clone())
            for store, tensors in zip(stores, (given, read), strict=True)
        )
        for (part, expected), (_, found) in zip(theirs.items(), mine.items(), strict=True):
            same = (
                each if isinstance(each, torch.Tensor) else each.dequantize() for each in (found, expected)
            )
            torch.testing.assert_close(*same, atol=1e-6, rtol=1e-6, msg=part)
    for store in stores:
        store.close()
