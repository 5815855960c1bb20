"""T5, mT5, BART, CPM-2's and EVA's shapes against transformers: logits, greedy tokens, and the same bits in
any company."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import InvalidParameter, UnexpectedTensor
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.model.registry import open_model
from penstock.spec import DECODER, ENCODER, UnitKey
from penstock.text.tokenizer import NoText
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize
from penstock.weights.tiers.readers import StoreReader

VOCAB_SIZE = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0, "initializer_factor": 1.0,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
#: name -> (transformers' class, config, changes of the saved config.json)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "T5 v1.0": ("T5", SMALL | {"feed_forward_proj": "relu"}, {}),
    "T5 v1.1": ("T5", SMALL | GATED, {}),
    "T5, silu": ("T5", SMALL | GATED | {"feed_forward_proj": "gated-silu"}, {}),
    "CPM-2": (
        "MT5",
        SMALL | GATED | {"decoder_start_token_id": 1, "eos_token_id": 7, "pad_token_id": 5,
                         "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
        {},
    ),
    "one layer, 3 heads, wide": (
        "MT5", SMALL | GATED | {"num_layers": 1, "num_heads": 3, "d_kv": 24, "d_model": 48}, {},
    ),
    "more decoder": ("T5", SMALL | {"num_layers": 1, "num_decoder_layers": 4}, {}),
    "EVA 1.0": ("T5", SMALL | GATED, {"architectures": ["EVAModel"], "feed_forward_proj": "relu"}),
    "EVA 2.0": (
        "T5", SMALL | GATED, {"architectures": ["EVAModel"], "feed_forward_proj": "relu", "attn_scale": True},
    ),
}  # fmt: skip
#: The stacks differ in layers and widths. Two tokens begin the answers of "scaled".
BART: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1,
    "max_position_embeddings": 768, "init_std": 0.15, "forced_bos_token_id": None,
}  # fmt: skip
MODELS |= {
    "BART": ("Bart", BART, {}),
    "BART, scaled": (
        "Bart", BART | {"scale_embedding": True, "encoder_layers": 1,
                        "encoder_attention_heads": 1, "decoder_attention_heads": 1},
        {"forced_bos_token_id": 5},
    ),
}  # fmt: skip
TOLERANCE = {"float32": 5e-4, "float16": 2e-3, "int8": 6e-2}
#: Inputs of one token and beyond all distances that have a bucket of their own.
GENERATOR = random.Random(3)
PROMPTS = [[GENERATOR.randrange(8, VOCAB_SIZE) for _ in range(size)] for size in (1, 2, 33, 90, 16)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def build(name: str, folder: Path) -> Any:
    """Make a model, save it as transformers does, and return it in float32 with the weights that INT8
    leaves."""
    kind, sizes, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    if sizes.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB_SIZE, config.d_model) / config.d_model**0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model.forced = [changes["forced_bos_token_id"]] if "forced_bos_token_id" in changes else []
    return dequantized(model, folder, 1 / config.d_kv**0.5 if changes.get("attn_scale") else 1.0)


def dequantized(model: Any, folder: Path, score_scale: float) -> Any:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for group in open_model(folder).store.tensors.groups:
            for tensor in group:
                for part in tensor.parts if tensor.is_matrix else ():
                    parameters[part].copy_(quantize(parameters[part]).dequantize())
        for name, parameter in parameters.items():
            if name.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                parameter *= score_scale
    return model


def load(folder: Path, **config: Any) -> Engine:
    return Engine.load(
        folder,
        EngineConfig(**{"max_model_len": 128, "max_num_batched_tokens": 96} | config),
        tokenizer=NoText(),
    )


@dataclass
class Answers:
    tokens: list[list[int]]
    #: float32 [NUM_TOKENS, vocab_size] of each prompt
    logits: list[Tensor]


def answer(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> Answers:
    """All prompts at once, with the logits by which their tokens were chosen."""
    rows: dict[int, list[Tensor]] = {}
    sample = engine.chooser.choose

    def listen(logits: Any, batch: Any) -> Any:
        parts = list(logits)
        sampled = [item.sequence for item in batch.scheduled if item.is_sampled]
        for sequence, row in zip(sampled, torch.cat(parts), strict=True):
            rows.setdefault(sequence.sequence_id, []).append(row.clone())
        return sample(parts, batch)

    engine.chooser.choose = listen  # type: ignore[method-assign]
    try:
        tokens = [each.token_ids for each in engine.generate(prompts, params)]
    finally:
        engine.chooser.choose = sample  # type: ignore[method-assign]
    return Answers(tokens, [torch.stack(rows[key]) for key in sorted(rows)])


@torch.inference_mode()
def oracle_logits(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Each token's logits, computed without a cache."""
    begin = [model.config.decoder_start_token_id, *model.forced]
    ids = torch.tensor([begin + tokens[:-1]])
    found = model(input_ids=torch.tensor([prompt]), decoder_input_ids=ids, use_cache=False)
    return found.logits[0, len(begin) - 1 :]


#: For what is the same in every model.
ONE = pytest.mark.parametrize("built", ["CPM-2"], indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("encoder")
    oracle = build(request.param, folder)
    if "EVA" in request.param:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 0}))
    yield folder, oracle


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "int8"])
def test_logits_equal_transformers(
    built: tuple[Path, Any], kv_dtype: str, kernels: str = "native", prompts: list[list[int]] = PROMPTS
) -> None:
    folder, oracle = built
    mine = answer(load(folder, kernels=kernels, kv_dtype=kv_dtype, num_threads=1), prompts)
    for prompt, tokens, logits in zip(prompts, mine.tokens, mine.logits, strict=True):
        expected = oracle_logits(oracle, prompt, tokens)
        difference = float((logits - expected).abs().max() / (expected.max() - expected.min()))
        assert difference <= TOLERANCE[kv_dtype]
        if kv_dtype == "float32":
            assert tokens == expected.argmax(-1).tolist()


@pytest.mark.inner
@pytest.mark.parametrize("built", ["EVA 2.0"], indirect=True)
def test_logits_of_plain_kernels_equal_transformers(built: tuple[Path, Any]) -> None:
    """Plain kernels are slow: they get short inputs. test_kernels.py compares them with the native ones."""
    test_logits_equal_transformers(built, "float32", "torch", PROMPTS[:3])


@pytest.mark.parametrize("built", ["CPM-2"], indirect=True)
def test_a_long_input(built: tuple[Path, Any]) -> None:
    """More tokens than the MLP computes at a time, beside a short input."""
    folder, oracle = built
    prompts = [[GENERATOR.randrange(8, VOCAB_SIZE) for _ in range(700)], PROMPTS[1]]
    sizes = {"max_model_len": 768, "max_num_batched_tokens": 768}
    engine = load(folder, kv_dtype="float32", enable_prefix_caching=False, **sizes)
    mine = answer(engine, prompts)
    for prompt, tokens, logits in zip(prompts, mine.tokens, mine.logits, strict=True):
        expected = oracle_logits(oracle, prompt, tokens)
        difference = float((logits - expected).abs().max() / (expected.max() - expected.min()))
        assert difference <= TOLERANCE["float32"] and tokens == expected.argmax(-1).tolist()
    alone = answer(engine, prompts[:1])
    assert torch.equal(alone.logits[0], mine.logits[0])


def test_any_company_gives_the_same_bits(built: tuple[Path, Any], tmp_path: Path) -> None:
    """Alone, together, encoded while others decode, streamed, preempted, with few tokens a step."""
    folder = tmp_path / "converted"  # so that streamed layers are not quantized in each step
    convert(open_model(built[0]).store, folder)
    engine = load(folder)
    alone = [answer(engine, [prompt]) for prompt in PROMPTS]
    num_layers = len(engine.plan.layers)
    variants = {
        "together": load(folder),
        "no cache": load(folder, enable_prefix_caching=False),
        "few a step": load(folder, max_num_batched_tokens=40, max_num_seqs=2),
        "streamed": load(folder, num_resident_layers=num_layers // 2),
        "one by one": load(folder, num_resident_layers=0),
        "preempted": load(folder, num_kv_tokens=160),
    }
    for name, other in variants.items():
        together = answer(other, PROMPTS)
        for mine, tokens, logits in zip(alone, together.tokens, together.logits, strict=True):
            assert mine.tokens == [tokens], name
            if name != "preempted":
                assert torch.equal(mine.logits[0], logits), name
        other.close()


@ONE
def test_a_decoding_step_reads_no_layer_of_the_encoder(
    built: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even ahead of time: the next step may have nothing to encode."""
    submit, read = StoreReader.submit, []

    def watch(self: StoreReader, key: UnitKey, buffer: Tensor) -> Any:
        read.append(key.stack)
        return submit(self, key, buffer)

    monkeypatch.setattr(StoreReader, "submit", watch)
    engine = load(built[0], num_resident_layers=0)
    for request_id in ("first", "second"):
        read.clear()
        engine.add(GenerationRequest(PROMPTS[3], GREEDY, request_id, cache_salt=request_id))
        engine.step()
        assert ENCODER in read or request_id == "first"  # the loader may have read all of them ahead
        read.clear()
        for _ in range(4):
            assert engine.step()
        engine.streamer.tiers.wait_until_loaded()
        assert set(read) == {DECODER}
        engine.abort(request_id)
    engine.close()


@ONE
def test_equal_inputs_are_encoded_once(built: tuple[Path, Any]) -> None:
    """In one step, and later from the cache; another salt finds nothing."""
    folder, _ = built
    engine = load(folder)
    family, encoded = engine.model.executor._family, []
    embed = family.embed

    def watch(weights: Any, input_ids: Tensor, positions: Tensor, given: Any) -> Tensor:
        encoded.append(len(input_ids))
        return embed(weights, input_ids, positions, given)

    family.embed = watch
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = []
    for name, salt in (("a", ""), ("b", ""), ("c", ""), ("later", ""), ("salted", "mine")):
        engine.add(GenerationRequest(PROMPTS[3], params, name, cache_salt=salt))
        if name >= "c":
            found += engine.step()
    assert encoded == [90, 3, 1, 90, 1]
    # The decoder's first token is no part of the prompt.
    assert [each.num_cached_tokens for each in found] == [0, 90, 90, 90, 0]
    assert {each.num_prompt_tokens for each in found} == {91}
    metrics = engine.metrics
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (5 * 90, 3 * 90)


@ONE
def test_clients_pay_for_what_is_encoded(built: tuple[Path, Any]) -> None:
    """After one client's long input it is the other client's turn, until its short inputs cost as much."""
    engine = load(built[0], max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for name, prompt in (("long", PROMPTS[3]), ("long 2", PROMPTS[3][1:]), ("short", [9]), ("short 2", [10])):
        engine.add(GenerationRequest(prompt, params, name, client=name.split()[0]))
    order = [output.request_id for _ in range(4) for output in engine.step()]
    assert order == ["long", "short", "short 2", "long 2"]


@ONE
def test_requests_come_and_go(built: tuple[Path, Any]) -> None:
    """New inputs are encoded in steps in which others decode; afterwards every block is free."""
    folder, _ = built
    engine = load(folder)
    expected = [answer(engine, [prompt]).tokens[0] for prompt in PROMPTS]
    engine = load(folder)
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(prompt, GREEDY, str(index)))
        for _ in range(2):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.abort("3")
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            assert output.num_prompt_tokens == len(PROMPTS[int(output.request_id)]) + 1
    assert [tokens[str(index)] for index in (0, 1, 2, 4)] == [expected[index] for index in (0, 1, 2, 4)]
    assert engine.scheduler.block_manager.pool.num_free == engine.plan.num_kv_blocks


@ONE
def test_what_has_no_meaning_is_refused(built: tuple[Path, Any]) -> None:
    engine = load(built[0])
    with pytest.raises(InvalidParameter, match="encodes the prompt"):
        engine.validate(GenerationRequest([9], SamplingParams(prompt_logprobs=1)))


def test_a_bart_with_three_matrices_of_words_is_refused(tmp_path: Path) -> None:
    """transformers gives encoder, decoder and head matrices of their own if nothing is tied."""
    config = transformers.BartConfig(**BART | {"tie_word_embeddings": False})
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnexpectedTensor, match=r"embed_tokens"):
        open_model(tmp_path)
