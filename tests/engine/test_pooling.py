"""Vectors and scores against transformers in float32, with the dequantized weights. Pooling is written here
anew, as sentence-transformers' documentation describes it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import GPT2, SMALL, VOCAB_SIZE
from torch import Tensor

from embedding_models import save_tokenizer
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, ContextOverflow, InvalidParameter, UnsupportedModel
from penstock.generation.requests.generation_request import GenerationRequest, PoolingParams, SamplingParams
from penstock.model.pooling.find_pooling import PoolingWish
from penstock.model.registry import open_model
from penstock.text.tokenizer import NoText
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize

ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 192, "initializer_range": 0.14,
}  # fmt: skip
XLM = ENCODER | {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 194}
QWEN = SMALL | {"head_dim": 16, "tie_word_embeddings": False}
ONE = {"num_labels": 1}
NO, YES = 17, 42
#: name -> (transformers' class, config, keys of 1_Pooling/config.json, other parts of modules.json)
VECTORS: dict[str, tuple[str, dict[str, Any], str | None, list[str]]] = {
    "BERT": ("BertModel", ENCODER, None, []),
    "BERT cls": ("BertModel", ENCODER | {"hidden_act": "gelu_new"}, "cls_token", ["Normalize"]),
    "BERT max": ("BertModel", ENCODER, "max_tokens", []),
    "XLM-R": ("XLMRobertaModel", XLM, "mean_tokens", ["Normalize"]),
    "XLM-R sqrt": ("XLMRobertaForMaskedLM", XLM, "mean_sqrt_len_tokens", []),
    "Qwen3": ("Qwen3Model", QWEN, "lasttoken", ["Normalize"]),
    "Qwen3 with a head": ("Qwen3ForCausalLM", QWEN | {"tie_word_embeddings": True}, "lasttoken", []),
    "Qwen2 weighted": ("Qwen2Model", SMALL, "weightedmean_tokens", []),
    "Qwen2 both ways": ("Qwen2Model", SMALL | {"is_causal": False}, "mean_tokens", ["Normalize"]),
    "GPT-2": ("GPT2Model", GPT2, "mean_tokens", []),
}  # fmt: skip
SCORES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "BERT": ("BertForSequenceClassification", ENCODER | ONE, True),
    "XLM-R": ("XLMRobertaForSequenceClassification", XLM | ONE, True),
    "Qwen3": ("Qwen3ForSequenceClassification", QWEN | ONE | {"pad_token_id": 0}, True),
    "MiniLM's function": (
        "BertForSequenceClassification",
        ENCODER | ONE | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        False,
    ),
    "yes and no": ("Qwen3ForCausalLM", QWEN, True),
    "yes and no, tied": ("Qwen3ForCausalLM", QWEN | {"tie_word_embeddings": True}, True),
}
#: 16-bit activations make 1e-4, float16 K and V up to 8e-4; a forgotten norm or position makes far more.
TOLERANCE = {"float32": 5e-4, "float16": 2e-3}
GENERATOR = random.Random(4)
TEXTS = [[GENERATOR.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (1, 2, 17, 64, 130)]
torch.set_num_threads(1)


def build(kind: str, config: dict[str, Any], folder: Path) -> Any:
    """Make a model, save it, and return it with the weights that INT8 leaves."""
    torch.manual_seed(11)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases are ones and zeros
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def dequantize(model: Any, folder: Path) -> Any:
    opened = open_model(folder)
    parameters = dict(model.named_parameters()) | dict(model.state_dict(keep_vars=True))
    prefix = opened.family.optional_prefix
    with torch.no_grad():
        for tensor in (tensor for group in opened.store.tensors.groups for tensor in group):
            for part in tensor.parts if tensor.is_matrix else ():
                own = parameters.get(part, parameters.get(part.removeprefix(prefix)))
                assert own is not None, part
                rows = own.t() if tensor.is_transposed else own
                own.copy_(
                    quantize(rows.contiguous()).dequantize().t()
                    if tensor.is_transposed
                    else quantize(rows).dequantize()
                )
    return model


def write_modules(folder: Path, parts: dict[str, dict[str, Any]]) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (name, config) in enumerate(parts.items(), 1):
        path = f"{number}_{name}"
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(modules))


def load(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(**{"num_threads": 1, "kv_dtype": "float32", "device": "cpu"} | settings)
    return Engine.load(folder, config, tokenizer=NoText())


def pool_as_told(rows: Tensor, key: str | None, normalizes: bool) -> Tensor:
    weights = torch.arange(1.0, len(rows) + 1)[:, None]
    ways: dict[str, Callable[[], Tensor]] = {
        "cls_token": lambda: rows[0],
        "lasttoken": lambda: rows[-1],
        "max_tokens": lambda: rows.amax(0),
        "mean_tokens": lambda: rows.mean(0),
        "mean_sqrt_len_tokens": lambda: rows.sum(0) / len(rows) ** 0.5,
        "weightedmean_tokens": lambda: (rows * weights).sum(0) / weights.sum(),
    }
    vector = ways[key or "mean_tokens"]()
    return vector / vector.norm() if normalizes else vector


def assert_near(found: list[float], expected: Tensor, tolerance: float) -> None:
    difference = (torch.tensor(found) - expected).abs().max()
    assert difference <= tolerance * (expected.max() - expected.min()), float(difference)


@pytest.fixture(scope="module", params=VECTORS)
def embedder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[Tensor]]]:
    """A folder, and the vectors of TEXTS."""
    kind, config, key, others = VECTORS[request.param]
    folder = tmp_path_factory.mktemp("embedder")
    model = build(kind, config, folder)
    if key is not None:
        modes = {f"pooling_mode_{name}": name == key for name in ("cls_token", "mean_tokens", key)}
        write_modules(folder, {"Pooling": modes} | {name: {} for name in others})
    dequantize(model, folder)
    body = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        hidden = [body(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    yield folder, [pool_as_told(rows, key, key is None or bool(others)) for rows in hidden]


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_vectors_equal_transformers(embedder: tuple[Path, list[Tensor]], kv_dtype: str) -> None:
    folder, expected = embedder
    with load(folder, kv_dtype=kv_dtype) as engine:
        for found, vector in zip(engine.pool(TEXTS), expected, strict=True):
            assert_near(found, vector, TOLERANCE[kv_dtype])


def test_a_vector_has_the_same_bits_in_any_company(embedder: tuple[Path, list[Tensor]]) -> None:
    """Together, alone, in chunks, with layers from the disk."""
    folder, _ = embedder
    with load(folder) as engine:
        together = engine.pool(TEXTS)
        assert [engine.pool([text])[0] for text in TEXTS] == together
        assert engine.pool(TEXTS[::-1]) == together[::-1]
    with load(folder, num_resident_layers=0, max_num_batched_tokens=24, max_num_seqs=3) as engine:
        assert engine.pool(TEXTS) == together


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, config, has_sigmoid = SCORES[name]
    model = build(kind, config, tmp_path)
    is_pair, pairs = "Bert" in kind, [([3, 4, 5, 6], 2), (TEXTS[3], 20), (TEXTS[2], 7)]
    if kind.endswith("CausalLM"):
        write_modules(tmp_path, {"LogitScore": {"true_token_id": YES, "false_token_id": NO}})
    dequantize(model, tmp_path)
    expected = []
    for text, second in pairs:
        types = torch.tensor([[int(place >= second) for place in range(len(text))]])
        more = {"token_type_ids": types} if is_pair and kind.startswith("Bert") else {}
        with torch.inference_mode():
            logits = model(torch.tensor([text]), **more).logits[0]
        value = logits[-1, YES] - logits[-1, NO] if kind.endswith("CausalLM") else logits[0]
        expected.append(float(torch.sigmoid(value) if has_sigmoid else value))
    with load(tmp_path) as engine:
        found = [engine.pool([text], PoolingParams(second_from=second))[0] for text, second in pairs]
        requests = [
            GenerationRequest(text, SamplingParams(max_tokens=0), pooling=PoolingParams(second_from=second))
            for text, second in pairs
        ]
        together = {}
        for each in requests:
            engine.add(each)
        while engine.has_work:
            together |= {output.request_id: list(output.pooled or ()) for output in engine.step()}
    assert [together[each.request_id] for each in requests] == found
    assert [len(score) for score in found] == [1, 1, 1]
    spread = max(map(abs, expected))
    assert [score[0] for score in found] == pytest.approx(expected, abs=5e-4 * spread)


def test_the_second_text_of_a_pair_counts(tmp_path: Path) -> None:
    """A test of the test above: types change a score."""
    build("BertForSequenceClassification", ENCODER | ONE, tmp_path)
    with load(tmp_path) as engine:
        scores = {engine.pool([TEXTS[2]], PoolingParams(second_from=n))[0][0] for n in (0, 5, 9)}
    assert len(scores) == 3


def test_dimensions(tmp_path: Path) -> None:
    model = build("Qwen3Model", QWEN | {"matryoshka_dimensions": [16, 32]}, tmp_path)
    dequantize(model, tmp_path)
    with load(tmp_path) as engine:
        whole, part = engine.pool(TEXTS[:1])[0], engine.pool(TEXTS[:1], PoolingParams(dimensions=16))[0]
        beginning = torch.tensor(whole[:16])
        assert_near(part, beginning / beginning.norm(), 1e-6)
        assert len(engine.pool(TEXTS[:1], PoolingParams(dimensions=64))[0]) == 64
        with pytest.raises(InvalidParameter, match="one of 16, 32"):
            engine.pool(TEXTS[:1], PoolingParams(dimensions=17))


def test_length_one(tmp_path: Path) -> None:
    build("BertModel", ENCODER, tmp_path)
    write_modules(tmp_path, {"Pooling": {"pooling_mode": "mean"}})
    with load(tmp_path) as engine:
        raw, unit = engine.pool(TEXTS[:1])[0], engine.pool(TEXTS[:1], PoolingParams(normalizes=True))[0]
        assert_near(unit, torch.tensor(raw) / torch.tensor(raw).norm(), 1e-6)
        with pytest.raises(InvalidParameter, match="is_matryoshka"):
            engine.pool(TEXTS[:1], PoolingParams(dimensions=8))


def test_each_model_does_what_it_is_for(tmp_path: Path) -> None:
    build("Qwen3ForCausalLM", QWEN, tmp_path)
    with load(tmp_path) as engine:
        assert engine.pooling is None
        with pytest.raises(InvalidParameter, match="--runner pooling"):
            engine.pool(TEXTS)
    with load(tmp_path, runner="pooling") as engine:
        assert "head" not in {tensor.name for tensor in engine.model.store.tensors.head}
        with pytest.raises(InvalidParameter, match="gives vectors to texts and writes no text"):
            engine.generate(TEXTS[:1], SamplingParams())
    with load(tmp_path, pooling="mean") as engine:
        assert engine.pooling is not None and engine.pooling.kind == "mean"
    with pytest.raises(ConfigError, match="neither pooled nor scored"):
        EngineConfig(runner="generate", pooling="mean")


def test_what_has_no_place_beside_vectors(tmp_path: Path) -> None:
    build("Qwen3ForCausalLM", QWEN, tmp_path)
    save_tokenizer(tmp_path)  # the draft model reads it
    with pytest.raises(ConfigError, match="--draft-model .* vectors or scores"):
        load(tmp_path, runner="pooling", draft_model=str(tmp_path))
    with pytest.raises(UnsupportedModel, match="--model-impl transformers .*leave it out"):
        load(tmp_path, runner="pooling", model_impl="transformers")
    with pytest.raises(ConfigError, match="--kv-disk .*leave it out"):
        load(tmp_path, pooling="mean", kv_disk=str(tmp_path / "kv"))


def test_long_texts(tmp_path: Path) -> None:
    """The folder's limit counts, and an encoder's step has room for the longest text."""
    build("BertModel", ENCODER, tmp_path)
    write_modules(tmp_path, {"Pooling": {"pooling_mode": "cls"}})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    with load(tmp_path, max_num_batched_tokens=16) as engine:
        assert len(engine.pool([TEXTS[3]])[0]) == 64
        with pytest.raises(ContextOverflow, match="130 tokens; this model's context here is 100"):
            engine.pool([TEXTS[4]])


@pytest.mark.parametrize(
    ("kind", "config", "parts", "message"),
    [
        ("BertModel", ENCODER, {"Pooling": {"pooling_mode": "mean"}, "Dense": {}}, "part Dense"),
        ("BertModel", ENCODER, {"Pooling": {}}, "no kind of pooling"),
        ("BertForSequenceClassification", ENCODER | {"num_labels": 3}, None, "3 classes"),
        ("T5ForConditionalGeneration", {"d_model": 16, "num_layers": 1, "vocab_size": 30}, None, "bge-m3"),
    ],
)
def test_what_is_refused(kind: str, config: dict[str, Any], parts: Any, message: str, tmp_path: Path) -> None:
    build(kind, config, tmp_path)
    if parts is not None:
        write_modules(tmp_path, parts)
    with pytest.raises(UnsupportedModel, match=message):
        open_model(tmp_path, wish=PoolingWish("pooling"))


@pytest.mark.parametrize("kind", ["BertModel", "Qwen3Model"])
def test_a_converted_folder_pools_alike(kind: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    build(kind, ENCODER if kind == "BertModel" else QWEN, source)
    write_modules(source, {"Pooling": {"pooling_mode": "max"}, "Normalize": {}})
    store = open_model(source).store
    with store.checkpoint:
        convert(store, target)
    with load(source) as engine, load(target) as converted:
        assert converted.pooling == engine.pooling
        assert converted.pool(TEXTS) == engine.pool(TEXTS)
