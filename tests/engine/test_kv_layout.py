"""Layouts of keys and values that only this file knows: plan, cache, executor and scheduler take them as they
are, and answers are those of a plain twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_features import stores_of
from test_convert import Ids
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import ConfigError
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV
from penstock.kernels import reference as plain
from penstock.kernels.reference import ReferenceKernels
from penstock.loader import planning
from penstock.model.footprint import footprint
from penstock.model.known_shapes import SHAPES
from penstock.model.registry import read_spec
from penstock.spec import FLOAT16, FLOAT32, KV_LAYOUTS, KVLayout, KVPart

#: The tiny model's.
NUM_LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 3, 2, 16, 16

#: Integers, and a scale per head and token: 1.25 bytes a number.
INT8 = KVLayout(
    "int8 with scales",
    (
        KVPart("k", "int8", 1, ("heads", "tokens", "head_dim")),
        KVPart("v", "int8", 1, ("heads", "tokens", "head_dim")),
        KVPart("k_scale", "float32", 4, ("heads", "tokens")),
        KVPart("v_scale", "float32", 4, ("heads", "tokens")),
    ),
)
#: One row of float64 per token, keys before values, and a size that no head has.
ROWS = KVLayout("rows", (KVPart("kv", "float64", 8, ("tokens", 2 * HEADS * HEAD_DIM)),))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., head_dim] -> (int8 of that shape, float32 [...])."""
    scale = x.abs().amax(-1).clamp_min(1e-20) / 127
    return (x / scale[..., None]).round().to(torch.int8), scale


def as_float32(keys: Tensor, values: Tensor) -> LayerKV:
    """Keys and values as FLOAT32 has them, also in their order in memory: on some processors torch's products
    depend on it."""
    return LayerKV(FLOAT32, (keys.contiguous(), values.contiguous()))


class Int8Kernels(ReferenceKernels):
    """They know INT8, and no other layout."""

    traits = replace(ReferenceKernels.traits, kv_layouts=(INT8.name,))

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        assert kv.layout is INT8
        block, offset = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
        for number, x in enumerate((k, v)):
            kv.parts[number][block, :, offset], kv.parts[2 + number][block, :, offset] = quantized(x)

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        k, v, k_scale, v_scale = kv.parts
        keys, values = k * k_scale[..., None], v * v_scale[..., None]
        return plain.paged_attention(q, as_float32(keys.transpose(2, 3), values), batch, spec)


class RoundingKernels(ReferenceKernels):
    """The twin of Int8Kernels: float32 that has been rounded as they round."""

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        super().write_kv(k * k_scale[..., None], v * v_scale[..., None], kv, slot_mapping)


class RowKernels(ReferenceKernels):
    """They know ROWS, and no other layout. Their twin is the reference: float64 holds float32 exactly."""

    traits = replace(ReferenceKernels.traits, kv_layouts=(ROWS.name,))

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        rows = torch.stack((k, v), dim=1).flatten(1)
        kv.parts[0][slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE] = rows.double()

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        k, v = kv.parts[0].float().view(-1, BLOCK_SIZE, 2, HEADS, HEAD_DIM).unbind(2)
        return plain.paged_attention(q, as_float32(k.permute(0, 2, 3, 1), v.transpose(1, 2)), batch, spec)


GENERATOR = random.Random(7)
PROMPTS = [[GENERATOR.randrange(2, 278) for _ in range(size)] for size in (20, 3, 37)]
PROMPTS += [PROMPTS[0]] * 2 + [PROMPTS[2][:33] + [5]]  # prompts that others have computed, and parts of them
PARAMS = [
    SamplingParams(temperature=0.9, seed=seed, max_tokens=14, ignore_eos=True, logprobs=2)
    for seed in range(len(PROMPTS))
]


def facts(completions: list[Completion]) -> list[object]:
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize(
    ("layout", "kernels", "twin", "token_bytes"),
    [(INT8, Int8Kernels, RoundingKernels, 2 * 2 * (16 + 4)), (ROWS, RowKernels, ReferenceKernels, 64 * 8)],
    ids=lambda value: value.name if isinstance(value, KVLayout) else "",
)
def test_a_layout_of_another_width_goes_through_the_engine(
    layout: KVLayout,
    kernels: Callable[[], Kernels],
    twin: Callable[[], Kernels],
    token_bytes: int,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks of prompts, shared and copied blocks, preemptions and streamed layers; the twin has none of
    them."""
    monkeypatch.setattr(planning, "choose_kernels", lambda *_: twin())
    config = EngineConfig(
        kv_dtype="float32",
        enable_prefix_caching=False,
        max_model_len=96,
        max_num_batched_tokens=64,
        num_threads=1,
    )
    with Engine.load(tiny_llama, config) as engine:
        expected = [
            engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    monkeypatch.setattr(planning, "choose_kernels", lambda *_: kernels())
    monkeypatch.setitem(KV_LAYOUTS, "float32", layout)
    num_bytes = 7 * BLOCK_SIZE * NUM_LAYERS * token_bytes
    config = EngineConfig(
        kv_dtype="float32",
        kv_cache_bytes=num_bytes + 1,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        num_resident_layers=1,
        max_model_len=96,
        num_threads=1,
    )
    with Engine.load(tiny_llama, config) as engine:
        assert (engine.plan.kv_bytes, engine.plan.num_kv_tokens) == (num_bytes, 7 * BLOCK_SIZE)
        assert facts(engine.generate(PROMPTS, PARAMS)) == facts(expected)
        assert engine.metrics.num_preemptions and engine.metrics.prefix_cache_hits


def test_a_layout_that_the_kernels_do_not_know_is_refused_by_name(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KV_LAYOUTS, "float16", INT8)
    with pytest.raises(ConfigError, match="keys and values as int8 with scales; choose --kv"):
        Engine.load(tiny_llama)


ODD: list[tuple[str, dict[str, int], str]] = [
    ("DeepSeek V2", {"kv_lora_rank": 23}, "float16"),
    ("DeepSeek V3", {"kv_lora_rank": 25}, "float16"),
    ("DeepSeek V2", {"kv_lora_rank": 23}, "float32"),
    ("OPT", {"hidden_size": 63, "num_attention_heads": 9}, "int8"),
    ("OPT", {"hidden_size": 63, "num_attention_heads": 9}, "float16"),
    ("GPT-2", {"n_embd": 63, "n_head": 7}, "int8"),
]


@pytest.mark.parametrize(("name", "sizes", "dtype"), ODD)
@pytest.mark.parametrize("num_blocks", [3, 4])
def test_numbers_of_a_token_that_are_odd(
    name: str, sizes: dict[str, int], dtype: Any, num_blocks: int, tmp_path: Path
) -> None:
    """A block is then no multiple of a cache line, and neither is a layer with an odd number of blocks. The
    answers are those of keys and values in float32 by plain kernels, also with blocks from a disk."""
    build(name, tmp_path / "model", **sizes)
    config = EngineConfig(
        num_kv_tokens=16 * num_blocks, max_model_len=48, kv_dtype=dtype, num_threads=1, device="cpu"
    )
    prompts = [[5, 9, 3] * 11, [7] * 20]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    plain = replace(config, kernels="reference", kv_dtype="float32")
    with Engine.load(tmp_path / "model", plain, tokenizer=Ids()) as engine:
        expected = engine.generate(prompts, params)
        exact = [parts[-1].flatten()[:1].dtype for parts in engine.model.executor.kv_cache.layers]
        assert set(exact) == {torch.float32}
    kept = replace(config, kv_disk=str(tmp_path / "kv"), kv_disk_bytes=1 << 24)
    written = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    again = []
    for settings in (config, kept, kept):
        with Engine.load(tmp_path / "model", settings, tokenizer=Ids()) as engine:
            again.append([facts(engine.generate([prompt], written)) for prompt in prompts])
            for found, wanted in zip(engine.generate(prompts, params), expected, strict=True):
                assert found.prompt_logprobs is not None and wanted.prompt_logprobs is not None
                for one, other in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
                    assert one is not None and other is not None
                    assert one.logprob == pytest.approx(other.logprob, abs=3e-2)
            if (store := stores_of(engine).get("disk")) is not None:
                store.flush()
                num_read = store.stats.reads.num_blocks
    assert again[0] == again[1] == again[2] and num_read


def test_a_token_takes_the_bytes_of_all_parts() -> None:
    assert FLOAT16.bytes_per_token(8, 128) == 2 * 8 * 128 * 2
    assert FLOAT32.bytes_per_token(8, 128) == 2 * 8 * 128 * 4
    assert INT8.bytes_per_token(8, 128) == 2 * 8 * (128 + 4)
    assert ROWS.bytes_per_token(8, 128) == 64 * 8


def test_a_plan_counts_latents_and_not_the_heads_that_they_stand_for() -> None:
    """DeepSeek V3 has 61 layers, whose rows have 512 + 64 numbers; its heads would have 128 * (192 + 128)."""
    config = SHAPES["deepseek-v3"]
    family, spec = read_spec(config)
    tensors = family.model_tensors(spec)
    assert footprint(spec, tensors).kv_bytes_per_token == 61 * 576 * 2
    assert footprint(spec, tensors, spec.kv_layout("float32")).kv_bytes_per_token == 61 * 576 * 4
