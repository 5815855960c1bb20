"""CPM-Ant against transformers: logits, greedy tokens, and the same bits in any company."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cpm_folders import save_ant
from safetensors.torch import load_file, save_file
from test_encoder_decoder import Answers, answer, load
from torch import Tensor, nn

from penstock.calibrate import Calibration
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, InvalidConfig, InvalidParameter, UnsupportedModel
from penstock.evaluate import Window, evaluate
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels.reference import ReferenceKernels
from penstock.model.registry import find_family, open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize

VOCAB_SIZE, MOST = 160, 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 96,
    "num_hidden_layers": 3, "position_bias_num_buckets": 16, "position_bias_max_distance": MOST,
    "prompt_types": 4, "prompt_length": 5, "segment_types": 6, "init_std": 0.5,
}  # fmt: skip
#: name -> (config, whether the head is the embedding's first rows)
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "CPM-Ant": (SMALL, True),
    "compressed, own head": (
        SMALL | {"num_hidden_layers": 5, "mask_modules": [
            [False, True], [True, True], [True, False], [False, False], [True, False]
        ]}, False,
    ),
    "one layer, 3 heads, wide": (
        SMALL | {"num_hidden_layers": 1, "num_attention_heads": 3, "dim_head": 24, "hidden_size": 48}, True,
    ),
}  # fmt: skip
#: The parts of a layer, in the order of mask_modules.
PARTS = ("self_att", "ffn")
TOLERANCE = {"float32": 5e-4, "float16": 2e-3}
#: Inputs of one token and of far more than have a distance of their own. Token 0 is padding to transformers.
GENERATOR = random.Random(5)
PROMPTS = [[GENERATOR.randrange(8, VOCAB_SIZE) for _ in range(size)] for size in (1, 2, 33, 300, 16)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NEVER_FIRST = [4, 7]
SIZES = {"max_model_len": 400, "max_num_batched_tokens": 320}


def build(name: str, folder: Path, **more: int) -> Any:
    """Make a model, save it as transformers does, and return it in float32 with the weights that INT8
    leaves."""
    sizes, is_tied = MODELS[name][0] | more, MODELS[name][1]
    torch.manual_seed(11)
    model = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**sizes)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "bias" not in key:
                parameter.copy_(torch.randn_like(parameter) / (parameter.shape[1] ** 0.5))
        model.cpmant.input_embedding.weight *= 8
        model.lm_head.weight[4] *= 3  # a token with which no answer may begin
        if is_tied:
            model.cpmant.input_embedding.weight[4] *= 3
            model.lm_head.weight = nn.Parameter(
                model.cpmant.input_embedding.weight[: sizes["vocab_size"]].clone()
            )
    model.save_pretrained(folder)
    leave_out(model, folder, sizes.get("mask_modules", []))
    return dequantized(model, folder)


def leave_out(model: Any, folder: Path, lacks: list[list[bool]]) -> None:
    """Take parts of layers out of a saved model. In transformers' model they add nothing to the hidden state,
    as matrices of zeros do."""
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    parts = [(index, part) for index, pair in enumerate(lacks) for part in compress(PARTS, pair)]
    for index, part in parts:
        tensors = {name: value for name, value in tensors.items() if f".{index}.{part}." not in name}
    save_file(tensors, file, {"format": "pt"})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors and name.endswith(("attention_out.weight", "w_out.weight")):
                parameter.zero_()


def dequantized(model: Any, folder: Path) -> Any:
    parameters = dict(model.named_parameters())
    tensors = open_model(folder).store.tensors
    with torch.no_grad():
        for tensor in (tensor for group in tensors.groups for tensor in group):
            for part in tensor.parts if tensor.is_matrix else ():
                parameters[part].copy_(quantize(parameters[part]).dequantize())
        if tensors.is_tied:
            model.lm_head.weight.copy_(model.cpmant.input_embedding.weight[: len(model.lm_head.weight)])
    return model


@torch.inference_mode()
def oracle_logits(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Each token's logits. The prompt is computed whole, then the cache keeps what later tokens see of it;
    transformers wants the whole text each time, and computes its last token."""
    found = model(torch.tensor([prompt]), use_cache=True)
    name = "cache" if "cache" in found else "past_key_values"  # before transformers 5.24
    rows = [found.logits[0, -1]]
    for count in range(1, len(tokens)):
        ids = torch.tensor([prompt + tokens[:count]])
        found = model(ids, **{name: found[name]}, use_cache=True)
        rows.append(found.logits[0, -1])
    return torch.stack(rows)


@pytest.fixture(scope="module", params=MODELS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("ant")
    yield folder, build(request.param, folder)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("usual")
    build("CPM-Ant", folder)
    return folder


@pytest.mark.parametrize(
    ("kernels", "kv_dtype"), [("native", "float16"), ("native", "float32"), ("torch", "float32")]
)
def test_logits_equal_transformers(built: tuple[Path, Any], kernels: str, kv_dtype: str) -> None:
    folder, oracle = built
    engine = load(folder, kernels=kernels, kv_dtype=kv_dtype, num_threads=1, **SIZES)
    assert engine.model.store.tensors.is_tied == torch.equal(
        oracle.lm_head.weight, oracle.cpmant.input_embedding.weight[:VOCAB_SIZE]
    )
    # torch's kernels attend token by token, which takes long.
    prompts = PROMPTS if kernels == "native" else [*PROMPTS[:3], PROMPTS[3][: MOST + 9]]
    mine = answer(engine, prompts)
    for prompt, tokens, logits in zip(prompts, mine.tokens, mine.logits, strict=True):
        expected = oracle_logits(oracle, prompt, tokens).clone()
        difference = float((logits - expected).abs().max() / (expected.max() - expected.min()))
        assert difference <= TOLERANCE[kv_dtype]
        if kv_dtype == "float32":
            expected[0, NEVER_FIRST] = -torch.inf
            assert tokens == expected.argmax(-1).tolist()


def test_any_company_gives_the_same_bits(built: tuple[Path, Any], tmp_path: Path) -> None:
    """Alone, together, beside answers, streamed, converted, preempted, with and without prefix cache."""
    folder, _ = built
    engine = load(folder, **SIZES)
    alone = [answer(engine, [prompt]) for prompt in PROMPTS]
    convert(open_model(folder).store, tmp_path)
    variants = {
        "together": (folder, {}),
        "no cache": (folder, {"enable_prefix_caching": False}),
        "few at a time": (folder, {"max_num_batched_tokens": 306, "max_num_seqs": 2}),
        "time": (folder, {"step_time_target_s": 1e-9}),
        "streamed": (folder, {"num_resident_layers": 0}),
        "converted": (tmp_path, {"num_resident_layers": 1}),
        "preempted": (folder, {"num_kv_tokens": 384, "max_model_len": 330}),
    }
    for name, (source, settings) in variants.items():
        other = load(source, **SIZES | settings)
        together = answer(other, PROMPTS * 2)
        check_equal(name, alone * 2, together)
        assert (other.metrics.num_preemptions > 0) == (name == "preempted")
        assert other.scheduler.block_manager.pool.num_free == other.plan.num_kv_blocks
        other.close()


def check_equal(name: str, alone: list[Answers], together: Answers) -> None:
    for mine, tokens, logits in zip(alone, together.tokens, together.logits, strict=True):
        assert mine.tokens == [tokens], name
        if name != "preempted":  # whose listener meets some rows twice
            assert torch.equal(mine.logits[0], logits), name


def test_prompts_come_while_others_answer(usual: Path) -> None:
    """Also a prompt as long as a step: it comes in beside the tokens of the others."""
    engine = load(usual, **SIZES | {"max_num_batched_tokens": 305})
    expected = [answer(engine, [prompt]).tokens[0] for prompt in PROMPTS]
    engine = load(usual, **SIZES | {"max_num_batched_tokens": 305})
    tokens: dict[str, list[int]] = {}
    counts = []
    for index, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(prompt, GREEDY, str(index)))
        for _ in range(2):
            outputs = engine.step()
            counts.append(len(outputs))
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                assert output.num_prompt_tokens == len(PROMPTS[int(output.request_id)])
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tokens[str(index)] for index in range(len(PROMPTS))] == expected


def test_only_equal_prompts_are_shared(usual: Path) -> None:
    """A prompt that begins as another one has other keys and values from its first token on."""
    engine = load(usual, **SIZES)
    cached = {}
    longer = [*PROMPTS[2], 9]
    for name, prompt in {"first": PROMPTS[2], "again": PROMPTS[2], "longer": longer}.items():
        engine.add(GenerationRequest(prompt, GREEDY, name))
        while engine.has_work:
            for output in engine.step():
                cached[name] = output.num_cached_tokens
    # Two blocks of 16 tokens, of which 5 are the soft prompt's. The answer has filled the third.
    assert cached == {"first": 0, "again": 2 * 16 - 5, "longer": 0}
    # Prompt and answer of the first are the beginning of nothing else either.
    text = PROMPTS[2] + answer(engine, [PROMPTS[2]]).tokens[0]
    other = load(usual, enable_prefix_caching=False, **SIZES)
    assert torch.equal(answer(engine, [text]).logits[0], answer(other, [text]).logits[0])


def test_penalties_count_the_vocabularys_tokens_alone(usual: Path) -> None:
    """The soft prompt's rows are behind the vocabulary."""
    engine = load(usual, **SIZES)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=50.0, no_repeat_ngram_size=1
    )
    (found,) = engine.generate([PROMPTS[2]], params)
    assert not set(found.token_ids[:1]) & set(NEVER_FIRST)
    assert len(set(found.token_ids)) == 8 and not set(found.token_ids) & set(PROMPTS[2])


def test_what_has_no_meaning_is_refused(usual: Path) -> None:
    engine = load(usual, **SIZES)
    with pytest.raises(InvalidParameter, match="both ways"):
        engine.validate(GenerationRequest([9], SamplingParams(prompt_logprobs=1)))
    engine.validate(GenerationRequest([9] * 315, SamplingParams(max_tokens=1)))
    with pytest.raises(InvalidParameter, match="room for 315 tokens.*--max-num-batched-tokens"):
        engine.validate(GenerationRequest([9] * 316, SamplingParams(max_tokens=1)))
    with pytest.raises(InvalidParameter, match="0..159"):
        engine.validate(GenerationRequest([VOCAB_SIZE], GREEDY))
    with pytest.raises(ConfigError, match="both ways"):
        evaluate(engine, None, [Window((8, 9, 10), 2)])
    opened = open_model(usual)
    with pytest.raises(UnsupportedModel, match="both ways"):
        UnquantizedModel(opened)
    with pytest.raises(ConfigError, match="both ways"):
        Calibration(opened, ReferenceKernels(), [9] * 512, 512)


def test_files_of_other_versions_load(usual: Path, tmp_path: Path) -> None:
    """Older versions of transformers write a head with all rows of the embedding, or none; the bare model has
    no prefix."""
    tensors = load_file(usual / "model.safetensors")
    head, embedding = tensors.pop("lm_head.weight"), tensors["cpmant.input_embedding.weight"]
    expected = answer(load(usual, **SIZES), PROMPTS[1:3])
    for name, found in {
        "none": tensors,
        "all rows": tensors | {"lm_head.weight": embedding.clone()},
        "bare": {key.removeprefix("cpmant."): value for key, value in tensors.items()},
        "other head": tensors | {"lm_head.weight": -head},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(found, folder / "model.safetensors")
        (folder / "config.json").write_text((usual / "config.json").read_text())
        mine = answer(load(folder, **SIZES), PROMPTS[1:3])
        assert (mine.tokens == expected.tokens) == (name != "other head")


def test_a_published_folder(tmp_path: Path) -> None:
    """Pickled weights, and vocab.txt: a prompt has <s> in front and no <unk>, and </s> ends an answer."""
    lines = (save_ant(tmp_path) / "vocab.txt").read_text().splitlines()
    build("CPM-Ant", tmp_path, vocab_size=len(lines))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    engine = Engine.load(tmp_path, EngineConfig(allow_pickle=True, **SIZES))
    prompt = engine.tokenizer.encode("今天 天气😀\n很好")
    assert [lines[token_id] for token_id in prompt] == ["<s>", "今天", "</_>", "天气", "</n>", "很", "好"]
    assert engine.tokenizer.eos_token_ids == {lines.index("</s>")}
    (found,) = engine.generate([prompt], GREEDY)
    assert len(found.token_ids) == NUM_TOKENS and found.token_ids[0] not in NEVER_FIRST
    assert found.text == engine.tokenizer.decode(found.token_ids)
    beams = SamplingParams(beams=BeamParams(3), max_tokens=6)
    (best,) = engine.generate([prompt], beams)
    assert best.token_ids[0] not in NEVER_FIRST
    alone = load(tmp_path, allow_pickle=True, num_kv_tokens=96, **SIZES | {"max_model_len": 32})
    assert alone.generate([prompt], beams)[0].token_ids == best.token_ids


def test_configs(usual: Path) -> None:
    config = json.loads((usual / "config.json").read_text())
    read = find_family(config).read_spec
    published = {key: config[key] for key in config if not key.startswith(("prompt_", "segment_", "pos"))}
    spec = read(published | {"vocab_size": 30720})
    assert spec.soft_prompt == tuple(range(30720 + 64, 30720 + 96)) and spec.vocab_size == 30720
    for change in ({"prompt_types": 2}, {"segment_types": 2}):
        with pytest.raises(UnsupportedModel):
            read(config | change)
    for wrong in ([[True, False]], [[0, 1]] * 3, [[True, True]] * 3, {"0": [True, False]}):
        with pytest.raises(InvalidConfig, match="mask_modules"):
            read(config | {"mask_modules": wrong})
    with pytest.raises(UnsupportedModel, match="CPM-Bee is not supported.*openbmb/cpm-ant-10b"):
        find_family({"architectures": ["CpmBeeForCausalLM"], "model_type": "cpmbee"})
