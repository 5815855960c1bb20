"""Vectors in place of a prompt's first tokens, against transformers' inputs_embeds."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_cpmant
import test_encoder_decoder
import tiny_models
import torch
from safetensors.torch import save
from test_encoder_decoder import load
from test_families import PROMPTS, dequantized
from torch import Tensor

from penstock.engine import Engine
from penstock.errors import ContextOverflow, InvalidParameter
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.requests.prompt_embeds import PromptEmbeds


class Attack:
    """What a pickle may do to a reader that runs it."""

    def __reduce__(self) -> Any:
        return os.system, ("false",)


NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
HIDDEN_SIZE = 64
VECTORS = torch.randn(21, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
IDS = PROMPTS[1]
#: One model for each way in which a family embeds its tokens.
NAMES = ["Llama", "Gemma 2", "GPT-2", "OPT", "BLOOM", "MiniCPM"]


def run(engine: Engine, *requests: GenerationRequest) -> list[list[int]]:
    tokens = {request.request_id: list[int]() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def asked(vectors: Tensor | None, ids: list[int], name: str = "", **options: Any) -> GenerationRequest:
    embeds = None if vectors is None else PromptEmbeds.of(vectors)
    return GenerationRequest(ids, GREEDY, name or f"{len(ids)}", prompt_embeds=embeds, **options)


@torch.inference_mode()
def greedy(logits_of: Callable[[list[int]], Tensor]) -> list[int]:
    tokens: list[int] = []
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_transformers(name: str, tmp_path: Path) -> None:
    """With and without tokens behind the vectors, in one step and in chunks."""
    oracle = dequantized(tiny_models.build(name, tmp_path), tmp_path)
    embedding = oracle.get_input_embeddings()

    def logits_of(ids: list[int]) -> Callable[[list[int]], Tensor]:
        def compute(tokens: list[int]) -> Tensor:
            text = embedding(torch.tensor([ids + tokens], dtype=torch.int64))
            inputs = torch.cat([VECTORS[None], text], dim=1)
            found: Tensor = oracle(inputs_embeds=inputs, use_cache=False).logits[0, -1]
            return found

        return compute

    expected = [greedy(logits_of([])), greedy(logits_of(IDS))]
    for chunk in (96, 10):
        engine = load(tmp_path, kv_dtype="float32", max_num_batched_tokens=chunk)
        assert run(engine, asked(VECTORS, []), asked(VECTORS, IDS)) == expected


def test_ids_below_0_say_where_vectors_stand(tmp_path: Path) -> None:
    """Some vectors twice, others never; a penalty counts tokens alone."""
    oracle = dequantized(tiny_models.build("Llama", tmp_path), tmp_path)
    ids = [*IDS[:3], -3, -2, *IDS[3:20], -21, -3, *IDS[20:], -1]
    table = torch.cat([oracle.get_input_embeddings().weight, VECTORS.flip(0)]).detach()  # -1 is the last row

    def logits_of(tokens: list[int]) -> Tensor:
        found: Tensor = oracle(inputs_embeds=table[[*ids, *tokens]][None], use_cache=False).logits[0, -1]
        seen = [*IDS, *tokens]
        found[seen] = torch.where(found[seen] > 0, found[seen] / 1.5, found[seen] * 1.5)
        return found

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.5)
    request = GenerationRequest(ids, params, "around", prompt_embeds=PromptEmbeds.of(VECTORS))
    for chunk in (96, 10):
        engine = load(tmp_path, kv_dtype="float32", max_num_batched_tokens=chunk)
        assert run(engine, asked(VECTORS, IDS), request)[1] == greedy(logits_of)
    with pytest.raises(InvalidParameter, match=r"0\.\.\d+, or -21\.\.-1 for a vector"):
        engine.validate(asked(VECTORS, [*ids, -22]))


def test_an_encoder_reads_vectors_before_its_tokens(tmp_path: Path) -> None:
    oracle = test_encoder_decoder.build("CPM-2", tmp_path)
    inputs = torch.cat([VECTORS, oracle.shared(torch.tensor(IDS))]).detach()

    def logits_of(tokens: list[int]) -> Tensor:
        start = torch.tensor([[oracle.config.decoder_start_token_id, *tokens]])
        found: Tensor = oracle(inputs_embeds=inputs[None], decoder_input_ids=start).logits[0, -1]
        return found

    engine = load(tmp_path, kv_dtype="float32")
    other = asked(-VECTORS, IDS, "other")
    mine, _, plain = run(engine, asked(VECTORS, IDS), other, asked(None, IDS, "plain"))
    assert mine == greedy(logits_of)
    assert run(load(tmp_path, kv_dtype="float32"), asked(None, IDS)) == [plain]


def test_a_soft_prompt_of_the_models_own_comes_first(tmp_path: Path) -> None:
    """Vectors that are the embedding's rows are those tokens, bit for bit, for CPM-Ant as well."""
    test_cpmant.build("CPM-Ant", tmp_path)
    engine = load(tmp_path, max_num_batched_tokens=64)
    rows = engine.model.executor._embedding.matrix("embedding").look_up(torch.tensor(PROMPTS[2]))
    requests = [asked(rows, [], "all"), asked(rows[:11], PROMPTS[2][11:], "some"), asked(None, PROMPTS[2])]
    one, *others = run(engine, *requests)
    assert others == [one, one]


def test_only_equal_vectors_are_shared(tmp_path: Path) -> None:
    tiny_models.build("Llama", tmp_path)
    engine, alone = load(tmp_path), load(tmp_path, enable_prefix_caching=False)
    changed = VECTORS.clone()
    changed[0, 0] += 1
    for number, (vectors, cached) in enumerate([(VECTORS, 0), (VECTORS, 31), (changed, 0), (None, 0)]):
        request = asked(vectors, IDS, str(number))
        engine.add(request)
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
                assert output.num_cached_tokens == cached
                assert output.num_prompt_tokens == request.num_prompt_tokens
        assert run(alone, request) == [tokens]
    engine.add(asked(VECTORS, IDS, "salted", cache_salt="mine"))
    assert engine.step()[0].num_cached_tokens == 0


def test_other_settings_with_vectors(tmp_path: Path) -> None:
    """Penalties know tokens alone; a preempted sequence computes its vectors again."""
    tiny_models.build("Llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.5, no_repeat_ngram_size=2)
    embeds = PromptEmbeds.of(VECTORS)
    requests = [GenerationRequest([], params, str(number), prompt_embeds=embeds) for number in range(3)]
    expected = run(load(tmp_path), requests[0])
    engine = load(tmp_path, num_kv_tokens=80, max_model_len=64, enable_prefix_caching=False)
    assert run(engine, *requests) == expected * 3
    assert engine.metrics.num_preemptions > 0


def torch_saved(value: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        save({"any name": VECTORS}),
        save({"half": VECTORS.half()}),
        torch_saved(VECTORS),
        torch_saved(VECTORS.bfloat16()),
        torch_saved(VECTORS, _use_new_zipfile_serialization=False),
        torch_saved(torch.nn.Parameter(VECTORS)),
        torch_saved({"prompt": VECTORS}),
        torch_saved(VECTORS.t().contiguous().t()),
        torch_saved(torch.cat([VECTORS, VECTORS])[21:]),
    ],
)
def test_files(raw: bytes) -> None:
    found = PromptEmbeds.read(raw)
    torch.testing.assert_close(found.vectors, VECTORS, rtol=0.01, atol=0.01)
    assert found.digest == PromptEmbeds.of(found.vectors).digest


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "neither"),
        (b"PK\x03\x04 and nothing", "prompt_embeds can't be read"),
        (save({"one": VECTORS, "two": VECTORS.clone()}), "2 tensors"),
        (save({"one": torch.tensor([[1, 2]])}), "int64"),
        (save({"one": VECTORS[0]}), r"\[64\]"),
        (save({"one": VECTORS[None]}), "shape"),
        (save({"one": VECTORS[:0]}), "shape"),
        (save({"one": VECTORS * torch.inf}), "infinite"),
        (save({"one": VECTORS.double() * 1e300}), "infinite"),
        (save({"one": VECTORS})[:-8], "can't be read"),
        (torch_saved({"a": VECTORS, "b": VECTORS}), "no tensor"),
        (torch_saved(VECTORS.long()), "I64"),
        (torch_saved(VECTORS)[:-200], "can't be read"),
        (pickle.dumps(Attack()), "prompt_embeds"),
        (torch_saved(Attack()), "nothing of the file was run"),
    ],
)
def test_files_that_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        PromptEmbeds.read(raw)
    assert caught.value.param == "prompt_embeds"


def test_requests_that_are_refused(tmp_path: Path) -> None:
    tiny_models.build("Llama", tmp_path)
    engine = load(tmp_path)
    with pytest.raises(InvalidParameter, match="embedding has size 64"):
        engine.validate(asked(VECTORS[:, :32], IDS))
    with pytest.raises(InvalidParameter, match="empty"):
        engine.validate(asked(None, []))
    with pytest.raises(ContextOverflow, match="127 tokens"):
        engine.validate(asked(torch.zeros(127, HIDDEN_SIZE), []))
    params = SamplingParams(prompt_logprobs=1)
    with pytest.raises(InvalidParameter, match="prompt_logprobs"):
        engine.validate(GenerationRequest(IDS, params, prompt_embeds=PromptEmbeds.of(VECTORS)))
