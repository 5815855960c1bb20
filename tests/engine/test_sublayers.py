"""Attention with what lies around it in one call, and a gated mlp: the bits of the operations one by one, in
every build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import paged_batch
from test_expert_kernels import form
from test_int4_kernels import BUILDS, FAST
from test_int4_kernels import kernels as fast
from torch import Tensor

from penstock.kernels import BatchLayout, ForwardingKernels, Kernels, LayerKV
from penstock.kernels.sublayers.native import MOST_TOKENS
from penstock.model.families.llama import MOST_TOGETHER, Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import PLAIN, AttentionForm
from penstock.model.norms import HeadNorms, Norm
from penstock.spec import INT8
from penstock.weights.layer_weights import LayerWeights

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 64, 256
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 3000,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
#: For steps that nobody cancels.
GO_ON: Callable[[], object] = bool
#: What LlamaSpec has in place of Llama's values, and the matrices' form.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "int8"),
    "planes": ({}, "planes"),
    "qwen3": ({"attention": AttentionForm(norms=HeadNorms())}, "steps"),
    "groups, norms behind rope": (
        {"attention": AttentionForm(norms=HeadNorms(Norm(offset=1.0), is_after_rope=True))},
        "int8 groups",
    ),
    "olmoe": ({"attention": AttentionForm(norms=HeadNorms(is_whole=True))}, "int8"),
    "gpt-oss": (
        {"attention": AttentionForm(has_sinks=True), "has_qkv_bias": True, "has_o_bias": True}
        | {"sliding_windows": (19,)},
        "mxfp4",
    ),
    "gates after the heads of q, a factor": (
        {"attention": AttentionForm(norms=HeadNorms(Norm(offset=1.0)), has_gate=True), "branch_factor": 0.22},
        "steps",
    ),
    "no rope, a cap": ({"rope": None, "norm": Norm(offset=1.0), "attention_softcap": 3.0}, "minima"),
}
#: (context, new tokens) of sequences: one token, one behind a context that threads share, and several.
STEPS = ([(1, 1)], [(2500, 1)], [(40, 3), (7, 7), (90, 1)])


def weights_of(kind: str, has_gate: bool = False) -> LayerWeights:
    random = torch.Generator().manual_seed(1)
    rows = (HEADS * (1 + has_gate) + 2 * KV_HEADS) * DIM
    sizes = {
        "input_norm": WIDTH, "post_norm": WIDTH, "q_norm": DIM, "k_norm": DIM, "sinks": HEADS,
        "qkv.bias": rows, "o.bias": WIDTH,
    }  # fmt: skip
    return LayerWeights(
        {name: torch.randn(size, generator=random) for name, size in sizes.items()}
        | {"qkv": form(kind, rows, WIDTH, 2), "o": form(kind, WIDTH, HEADS * DIM, 3)}
        | {"gate_up": form(kind, 256, WIDTH, 4), "down": form(kind, WIDTH, 128, 5)}
    )


def weights_for(case: str) -> LayerWeights:
    differences, matrices = CASES[case]
    form = differences.get("attention", PLAIN)
    weights, norms = weights_of(matrices, form.has_gate), form.norms
    if norms is None or not norms.is_whole:
        return weights
    random = torch.Generator().manual_seed(6)
    whole = {"q_norm": torch.randn(HEADS * DIM, generator=random)}
    return LayerWeights(weights._tensors | whole | {"k_norm": torch.randn(KV_HEADS * DIM, generator=random)})


def step(sequences: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, LayerKV, BatchLayout]:
    """Hidden states, a cache that has all tokens but the new ones, and the layout."""
    random = torch.Generator().manual_seed(len(sequences))
    _, kv, layout = paged_batch(random, sequences, (HEADS, KV_HEADS), DIM, dtype)
    kv = replace(kv, parts=tuple(part.nan_to_num(0.25) for part in kv.parts))
    slots, first = [], 0
    for row, (_, count) in enumerate(sequences):
        positions = layout.positions[first : first + count]
        slots.append(layout.block_tables[row, positions // 16].long() * 16 + positions % 16)
        first += count
    hidden = torch.randn(first, WIDTH, generator=random)
    return hidden, kv, replace(layout, slot_mapping=torch.cat(slots))


def as_int8(kv: LayerKV) -> LayerKV:
    """An INT8 cache of the same size, whose earlier tokens are 0."""
    num_blocks, _, _, block_size = kv.parts[0].shape
    shapes = (part.shape(num_blocks, block_size, KV_HEADS, DIM) for part in INT8.parts)
    return LayerKV(INT8, tuple(torch.zeros(shape, dtype=torch.int8) for shape in shapes))


def copy_of(kv: LayerKV) -> LayerKV:
    return replace(kv, parts=tuple(part.clone() for part in kv.parts))


def layer(
    spec: LlamaSpec, kernels: Kernels, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
) -> tuple[Tensor, ...]:
    """What a layer gives, and what it leaves in the cache."""
    kv = copy_of(kv)
    return Llama(spec, kernels, 3000).layer(0, weights, hidden, kv, batch), *kv.parts


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("case", CASES)
def test_one_call_has_the_bits_of_many(kind: str, case: str) -> None:
    spec, weights, kernels = Llama._spec(CONFIG, **CASES[case][0]), weights_for(case), fast(kind, "int16")
    for sequences in STEPS:
        for dtype in (torch.float16, torch.float32, torch.int8):
            hidden, kv, batch = step(sequences, torch.float16 if dtype == torch.int8 else dtype)
            kv = as_int8(kv) if dtype == torch.int8 else kv
            together = layer(spec, kernels, weights, hidden, kv, batch)
            apart = layer(spec, ForwardingKernels(kernels), weights, hidden, kv, batch)
            assert all(map(torch.equal, together, apart)), (sequences, dtype)


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("case", CASES)
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(kind: str, case: str) -> None:
    differences, _ = CASES[case]
    windows = {"sliding_windows": (19, 0, 19)} if "sliding_windows" in differences else {}
    config = CONFIG | {"num_hidden_layers": 3}
    spec, kernels = Llama._spec(config, **differences | windows), fast(kind, "int16")
    own = weights_for(case)
    weights = [
        LayerWeights(own._tensors | {"input_norm": own.vector("input_norm") * factor})
        for factor in (1.0, 2.0, -1.0)
    ]
    for sequences in STEPS:
        hidden, kv, batch = step(sequences, torch.float16)
        caches, others = [copy_of(kv) for _ in weights], [copy_of(kv) for _ in weights]
        together = Llama(spec, kernels, 3000).layers(range(3), weights, hidden, caches, batch, GO_ON)
        plain, expected = Llama(spec, ForwardingKernels(kernels), 3000), hidden
        for index, (each, cache) in enumerate(zip(weights, others, strict=True)):
            expected = plain.layer(index, each, expected, cache, batch)
        assert together is not None and torch.equal(together, expected), sequences
        for mine, other in zip(caches, others, strict=True):
            assert all(map(torch.equal, mine.parts, other.parts)), sequences


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_layers_that_no_call_computes_come_one_by_one() -> None:
    """Too many tokens, a layer with what the call doesn't have, kernels that see every operation."""
    spec, kernels = Llama._spec(CONFIG | {"num_hidden_layers": 2}), fast(BUILDS[0], "int16")
    weights = [weights_of("int8")] * 2
    hidden, kv, batch = step([(40, MOST_TOKENS + 1)], torch.float16)
    assert Llama(spec, kernels, 3000).layers(range(2), weights, hidden, [kv] * 2, batch, GO_ON) is None
    hidden, kv, batch = step([(40, MOST_TOKENS)], torch.float16)
    assert Llama(spec, kernels, 3000).layers(range(2), weights, hidden, [kv] * 2, batch, GO_ON) is not None
    parallel = Llama._spec(CONFIG | {"num_hidden_layers": 2}, is_parallel=True)
    assert Llama(parallel, kernels, 3000).layers(range(2), weights, hidden, [kv] * 2, batch, GO_ON) is None
    forwarding = Llama(spec, ForwardingKernels(kernels), 3000)
    assert forwarding.layers(range(2), weights, hidden, [kv] * 2, batch, GO_ON) is None
    assert (forwarding.most_together, Llama(spec, kernels, 3000).most_together) == (1, MOST_TOGETHER)


class Counted(ForwardingKernels):
    """Counts sublayers that were computed in one call."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.inner, self.sublayers, self.number, self.num_mlps = kernels.sublayers, self, 0, 0

    def attend(self, *arguments: Any) -> tuple[Tensor, Tensor] | None:
        assert self.inner is not None
        found = self.inner.attend(*arguments)
        self.number += found is not None
        return found

    def gated_mlp(self, *arguments: Any) -> Tensor | None:
        assert self.inner is not None
        found = self.inner.gated_mlp(*arguments)
        self.num_mlps += found is not None
        return found


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("case", CASES)
def test_few_tokens_take_one_call(case: str) -> None:
    spec, kernels = Llama._spec(CONFIG, **CASES[case][0]), Counted(fast(BUILDS[0], "int16"))
    weights = weights_for(case)
    layer(spec, kernels, weights, *step([(40, MOST_TOKENS)], torch.float16))
    assert kernels.number == kernels.num_mlps == 1
    layer(spec, kernels, weights, *step([(40, MOST_TOKENS + 1)], torch.float16))
    assert kernels.number == kernels.num_mlps == 1


OTHERS: dict[str, dict[str, Any]] = {
    "parallel": {"is_parallel": True},
    "a limit of q, k and v": {"attention": AttentionForm(clip=0.5)},
    "gates without norms": {"attention": AttentionForm(has_gate=True)},
    "norms of each head": {"attention": AttentionForm(norms=HeadNorms(has_own_weights=True))},
    "layer norms": {"norm": Norm(is_centred=True)},
}


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("case", OTHERS)
def test_other_layers_are_computed_one_by_one(case: str) -> None:
    """With what AttentionSublayer doesn't have."""
    spec, kernels = Llama._spec(CONFIG, **OTHERS[case]), Counted(fast(BUILDS[0], "int16"))
    weights = weights_of("int8", OTHERS[case].get("attention", PLAIN).has_gate)
    if case.startswith("norms of each"):
        own = {"q_norm": torch.ones(HEADS, DIM), "k_norm": torch.ones(KV_HEADS, DIM)}
        weights = LayerWeights(weights._tensors | own)
    hidden, _, _ = layer(spec, kernels, weights, *step([(40, 2)], torch.float16))
    assert hidden.isfinite().all() and kernels.number == 0
