"""Recurrent layers in one call of the kernels, alone and in runs with other layers: the bits of the
operations one by one, in every family and every build."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_expert_kernels import form as matrix
from test_families import BLOCK_SIZE, PROMPTS, Model
from test_int4_kernels import BUILDS
from test_int4_kernels import kernels as fast
from test_recurrence import Chunk
from test_recurrence import layout as layout_of
from tiny_models import RECURRENT, build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.generation.model_inputs import ModelInputs
from penstock.kernels import ForwardingKernels, Kernels, LayerKV, Matrix
from penstock.kernels.recurrent.plain import PlainRecurrences
from penstock.model.families.llama import Llama
from penstock.model.recurrent.delta_net import GatedDeltaNet
from penstock.model.recurrent.form import RecurrentForm
from penstock.model.recurrent.kimi_delta import KimiDeltaAttention
from penstock.model.recurrent.mamba2 import Mamba2
from penstock.model.recurrent.mixer_calls import MixerCalls
from penstock.model.recurrent.short_conv import GatedConv
from penstock.spec import FLOAT32
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

pytestmark = pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
WIDTH = 256
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 128,
    "vocab_size": 64, "max_position_embeddings": 3000, "rms_norm_eps": 1e-5,
}  # fmt: skip
FACTORS = (0.7, 1.3, 0.9, 1.1, 0.8, 1.2)
FORMS: dict[str, RecurrentForm] = {
    "delta net": GatedDeltaNet(2, 4, 32, 64, 4),
    "delta net in groups": GatedDeltaNet(2, 4, 32, 64, 3, is_grouped=True, beta_factor=2.0, norm_eps=1e-4),
    "kimi delta": KimiDeltaAttention(2, 128, 4),
    "kimi delta with a bound": KimiDeltaAttention(2, 128, 4, is_narrow=False, lower_bound=-5.0),
    "mamba2": Mamba2(4, 64, 2, 24, 4),
    "mamba2, norm before, factors": Mamba2(
        8, 32, 1, 16, 4, False, True, True, "before", (0.01, 0.5), FACTORS
    ),
    "mamba2 without norm": Mamba2(4, 64, 4, 16, 2, norm=None),
    "short conv": GatedConv(WIDTH, 3, has_bias=True),
}
FORMATS = ("int8", "int8 groups", "planes", "steps", "minima")
#: One token; the last of a sequence and one that begins; a chunk whose state is kept in the middle.
STEPS = (
    [Chunk(3, 0, 1)],
    [Chunk(3, 1, 1), Chunk(0, 0, 4)],
    [Chunk(3, 2, 40, ((16, 1), (32, 2))), Chunk(0, 4, 1), Chunk(4, 0, 7)],
)


def tensor(spec: TensorSpec, kind: str, seed: int) -> Matrix | Tensor:
    random = torch.Generator().manual_seed(seed)
    if spec.name.startswith("mixer_") and len(spec.shape) == 2:
        return matrix(kind, *spec.shape, seed)
    if spec.name == "a_log":
        return torch.randn(spec.shape, generator=random) - 1.0
    return torch.randn(spec.shape, generator=random) * (0.1 if len(spec.shape) == 2 else 1.0)


@pytest.mark.parametrize("build_name", BUILDS)
@pytest.mark.parametrize("name", FORMS)
def test_one_call_has_the_bits_of_the_operations(name: str, build_name: str) -> None:
    form, kernels = FORMS[name], fast(build_name, "int16")
    spec = Llama._spec(CONFIG)
    for kind in FORMATS:
        tensors = form.tensors(spec, "")
        weights = LayerWeights({each.name: tensor(each, kind, i) for i, each in enumerate(tensors)})
        family, plain = (Llama(spec, each, 3000) for each in (kernels, ForwardingKernels(kernels)))
        caches = [empty(form) for _ in range(2)]
        for number, chunks in enumerate(STEPS):
            batch, random = layout_of(chunks), torch.Generator().manual_seed(number)
            x = torch.randn(sum(each.number for each in chunks), WIDTH, generator=random)
            assert kernels.sublayers is not None
            mixer = MixerCalls(form).mixer(family, weights)
            y = kernels.sublayers.mix(mixer, x, caches[0], batch)
            expected = form.mix(plain, weights, x, caches[1], batch)
            assert y is not None and torch.equal(y, expected) and y.isfinite().all(), (kind, number)
            for mine, other in zip(caches[0].states, caches[1].states, strict=True):
                assert torch.equal(mine, other), (kind, number)


def empty(form: RecurrentForm) -> LayerKV:
    """States of which none was written."""
    return LayerKV(FLOAT32, (), tuple(torch.zeros(5, *part.shape) for part in form.layout.parts))


class Counted:
    """Sublayers of kernels, and the layers and mixers that they computed in one call."""

    def __init__(self, kernels: Any) -> None:
        self.inner, self.num_layers, self.num_mixers = kernels.sublayers, 0, 0
        kernels.sublayers = self

    def mix(self, *arguments: Any) -> Tensor | None:
        y: Tensor | None = self.inner.mix(*arguments)
        self.num_mixers += y is not None
        return y

    def layers(self, layers: Any, *others: Any) -> Tensor | None:
        y: Tensor | None = self.inner.layers(layers, *others)
        self.num_layers += 0 if y is None else len(layers)
        return y

    def mixture(self, layers: Any, *others: Any) -> Any:
        sweep = self.inner.mixture(layers, *others)
        self.num_layers += 0 if sweep is None else len(layers)
        return sweep

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        build(name, folder)
        return folder

    return made


def steps_of(folder: Path, kernels: Kernels) -> list[Tensor]:
    """Logits of a prompt, of a chunk of few tokens, of one token, and of one of each sequence; then the
    states."""
    model = Model(folder, EngineConfig(kv_dtype="float32"), kernels)
    found = list[Tensor]()
    first, second, third = model.sequences(PROMPTS[1:])
    for sequences, chunk in (([third], 30), ([first], 7), ([third], 1), ([first, second, third], 1)):
        inputs = ModelInputs.of(model.batch(sequences, chunk), BLOCK_SIZE)
        found.append(model.executor.head(model.executor.sweep(inputs)))
        for sequence in sequences:
            sequence.advance(min(chunk, sequence.num_pending_tokens))
    return [*found, *(state for layer in model.kv_cache.states for part in layer for state in part)]


#: Families whose layers come one by one, with a call for each recurrence.
APART = ("Falcon-H1", "Nemotron-H", "OLMo Hybrid")


@pytest.mark.parametrize(
    "name", [name for name in RECURRENT if name != "DeepSeek V4"]
)  # a state, no recurrence
@pytest.mark.parametrize("build_name", BUILDS)
def test_families_in_few_calls_have_the_bits_of_layers_one_by_one(
    name: str, build_name: str, folder_of: Callable[[str], Path]
) -> None:
    kernels: Any = fast(build_name, "int16")
    plain = steps_of(folder_of(name), ForwardingKernels(kernels))
    counted = Counted(kernels)
    try:
        found = steps_of(folder_of(name), kernels)
    finally:
        kernels.sublayers = counted.inner
    for mine, other in zip(found, plain, strict=True):
        assert torch.equal(mine, other)
    assert counted.num_mixers, "of the prompt, at least"
    assert bool(counted.num_layers) != name.startswith(APART)


@pytest.mark.parametrize("build_name", BUILDS)
def test_decays_and_gates_are_those_of_float64(build_name: str) -> None:
    kernels, random = fast(build_name, "int16"), torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, 11, generator=random) * 12
    x[0, 0, :5] = torch.tensor([-800.0, 800.0, 20.0, -20.0, 0.0])
    bias, rates = torch.randn(33, generator=random), torch.randn(3, generator=random)
    for shape, own in (((50, 3, 11), None), ((50, 33), bias)):
        of_head = rates if own is None else torch.randn(33, generator=random)
        limits = (0.01, 3.0) if own is None else (0.0, float("inf"))
        mine = kernels.decays(x.view(shape), own, of_head, limits)
        theirs = PlainRecurrences().decays(x.view(shape), own, of_head, limits)
        assert all(map(torch.equal, mine, theirs))
    assert torch.equal(kernels.gates(x[:, 1], 2.0), PlainRecurrences().gates(x[:, 1], 2.0))
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf")]])
    for one, other in zip(
        (*kernels.decays(odd, None, rates), kernels.gates(odd)),
        (*PlainRecurrences().decays(odd, None, rates), PlainRecurrences().gates(odd)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    bounded = kernels.decays(x, bias, rates, bound=-5.0)[1]
    assert torch.equal(bounded, PlainRecurrences().decays(x, bias, rates, bound=-5.0)[1])
