"""What the engine must take without a line changed in plan, tier, streamer, executor or scheduler. Each thing
is defined here alone and compared with its plain twin: a weight format, a model of two stacks whose layers
ask for experts, and a second lane that computes a share of each product."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_convert import Ids
from tiny_models import build
from torch import Tensor

from penstock.calibrate import Calibration
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.engine_parts import make_parts
from penstock.errors import ConfigError
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import (
    BatchLayout,
    ForwardingKernels,
    Kernels,
    KernelTraits,
    LayerKV,
    Matrix,
    choose_kernels,
)
from penstock.kernels.reference import ReferenceKernels
from penstock.loader import begin_reading, plan_on
from penstock.memory.host_lane import HostLane
from penstock.model.architecture import linear_tensors
from penstock.model.families.llama import Llama, LlamaSpec
from penstock.model.family import LayerFunction
from penstock.model.layers import attend
from penstock.model.registry import OpenModel, open_model
from penstock.spec import DECODER, ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.conversion.convert import convert
from penstock.weights.formats.weight_format import Component, Floats, Loss
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import Stack, TensorSpec

PROMPTS = [[5, 9, 3], [7] * 20, [11, 2], list(range(3, 60))]
CONFIG = EngineConfig(device="cpu", num_kv_tokens=512, max_num_batched_tokens=48)


def engine_of(opened: OpenModel, config: EngineConfig = CONFIG, kernels: Kernels | None = None) -> Engine:
    tokenizer: Any = Ids()
    loaded = begin_reading(plan_on(HostLane(), opened, config, kernels=kernels), tokenizer)
    return Engine(make_parts(loaded))


def answers(engine: Engine) -> list[Completion]:
    """Greedy ones and sampled ones, to the last bit of their log-probabilities."""
    with engine:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
        sampled = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, logprobs=3, seed=5)
        return engine.generate(PROMPTS, greedy) + engine.generate(PROMPTS, sampled)


# ------------------------------------------------------------ a weight format


class HalfMatrix(NamedTuple):
    """Sixteen bits per weight."""

    weight: Tensor  # float16 [out_features, in_features]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def rows(self, start: int, stop: int) -> HalfMatrix:
        return HalfMatrix(self.weight[start:stop])

    def look_up(self, row_ids: Tensor) -> Tensor:
        return self.weight[row_ids].float()

    def map(self, function: Callable[[Tensor], Tensor]) -> HalfMatrix:
        return HalfMatrix(function(self.weight))

    def dequantize(self) -> Tensor:
        return self.weight.float()


@dataclass(frozen=True)
class Half(Floats):
    """A matrix in float16."""

    name = "float16"
    is_matrix = True
    operand_types = (HalfMatrix,)

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        return (Component("", "F16", shape, shape[1:]),)

    def operand(self, arrays: Sequence[Tensor]) -> Any:
        return HalfMatrix(arrays[0])

    def holds(self, entry: TensorEntry) -> bool:
        return entry.dtype == "F16"

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        arrays[0].copy_(torch.cat([source.read(part) for part in tensor.parts]))
        return {}

    def from_rows(self, rows: Tensor) -> Any:
        return HalfMatrix(rows.half())


class HalfLlama(Llama):
    """Llama whose layers are kept in float16."""

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(tensor, format=Half()) if tensor.is_matrix else tensor
            for tensor in super().layer_tensors(spec, index)
        )


class HalfKernels(ForwardingKernels):
    """Row by row, so that a row meets the same operations in any company."""

    @property
    def traits(self) -> KernelTraits:
        known = super().traits
        return replace(known, matrices=(*known.matrices, HalfMatrix))

    def without_arithmetic(self, longest: int) -> Kernels:
        return self

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, HalfMatrix):
            return super().linear(x, weight, bias)
        wide = weight.weight.double().t()
        y = (
            torch.stack([(row.double() @ wide).float() for row in x])
            if len(x)
            else x.new_empty(0, wide.shape[1])
        )
        return y if bias is None else y + bias


def open_half(folder: Path) -> OpenModel:
    checkpoint = Checkpoint.open(folder)
    spec = HalfLlama.read_spec(checkpoint.config)
    return OpenModel(HalfLlama, spec, WeightStore(checkpoint, HalfLlama.model_tensors(spec)))


def test_a_weight_format_of_another_width(tmp_path: Path) -> None:
    """Resident, streamed from the original, and converted and streamed byte for byte: the same bits; and what
    transformers makes of the same weights."""
    model = build("Llama", tmp_path / "original")
    kernels = HalfKernels(choose_kernels(CONFIG))
    resident = answers(engine_of(open_half(tmp_path / "original"), CONFIG, kernels))
    streamed = replace(CONFIG, num_resident_layers=1)
    engine = engine_of(open_half(tmp_path / "original"), streamed, kernels)
    matrices = [t for unit in engine.model.store.units.values() for t in unit.tensors if t.is_matrix]
    assert engine.plan.staging_slot_bytes >= 2 * sum(t.num_elements for t in matrices) / 3
    assert answers(engine) == resident
    convert(open_half(tmp_path / "original").store, tmp_path / "converted")
    converted = open_half(tmp_path / "converted")
    assert all(converted.store.contiguous_unit(key) for key in converted.store.units)
    assert answers(engine_of(converted, streamed, kernels)) == resident

    for name, parameter in model.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            parameter.data = parameter.data.half().float()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[3]])).logits[0].log_softmax(-1)
    found = [each.logprob for each in resident[3].prompt_logprobs or () if each]
    wanted = [float(expected[i, token]) for i, token in enumerate(PROMPTS[3][1:])]
    # INT8 of embedding and head remain.
    assert found == pytest.approx(wanted, abs=0.15)


def test_a_converted_format_is_described_for_other_tools(tmp_path: Path) -> None:
    """transformers reads layers in float16 and the rest in INT8, and computes what the engine computes."""
    build("Llama", tmp_path / "original")
    convert(open_half(tmp_path / "original").store, tmp_path / "converted")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPTS[3]])).logits[0].log_softmax(-1)
    kernels = HalfKernels(choose_kernels(CONFIG))
    found = answers(engine_of(open_half(tmp_path / "converted"), CONFIG, kernels))[3].prompt_logprobs or ()
    wanted = [float(expected[i, token]) for i, token in enumerate(PROMPTS[3][1:])]
    assert [each.logprob for each in found if each] == pytest.approx(wanted, abs=2e-3)


def test_a_format_without_a_name_elsewhere_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("Llama", tmp_path / "original")
    monkeypatch.setattr(Half, "scheme", lambda self: None)
    with pytest.raises(ConfigError, match="kept as float16 can't be converted"):
        convert(open_half(tmp_path / "original").store, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_kernels_are_asked_for_a_format_before_anything_is_computed(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    with pytest.raises(ConfigError, match="no product with a HalfMatrix; they know: QuantizedTensor"):
        engine_of(open_half(tmp_path))


def test_calibration_refuses_another_format_by_name(tmp_path: Path) -> None:
    build("Llama", tmp_path)
    with pytest.raises(
        ConfigError, match=r"q_proj.* is kept as float16, and calibration rounds INT8 and INT4 alone"
    ):
        Calibration(open_half(tmp_path), HalfKernels(choose_kernels(CONFIG)), [3] * 256, 256)


# ------------------------------------------------------------ two stacks, and units that are asked for

NUM_EXPERTS, NUM_CHOSEN = 5, 2


class Mixture(Llama):
    """A stack of layers without attention, then one whose mlp is a mixture of experts."""

    architectures = ("Mixture",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        return replace(
            spec, num_layers=config["num_prelude_layers"] + spec.num_layers, num_experts_per_token=NUM_CHOSEN
        )

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        num_prelude = spec.num_layers - 3
        prelude = tuple(cls._prelude_tensors(spec, index) for index in range(num_prelude))
        layers = tuple(cls.layer_tensors(spec, index) for index in range(3))
        experts = tuple(
            tuple(
                cls._mlp_tensors(spec, f"model.layers.{layer}.experts.{number}.")
                for number in range(NUM_EXPERTS)
            )
            for layer in range(3)
        )
        return Stack("prelude", prelude), Stack(DECODER, layers, experts)

    @classmethod
    def _prelude_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        norm = TensorSpec("norm", (spec.hidden_size,), (f"prelude.{index}.norm.weight",))
        return norm, *cls._mlp_tensors(spec, f"prelude.{index}.")

    @classmethod
    def _mlp_tensors(cls, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        gate_up = linear_tensors(
            "gate_up", (2 * ffn, hidden), (f"{prefix}gate", f"{prefix}up"), has_bias=False
        )
        return *gate_up, *linear_tensors("down", (hidden, ffn), (f"{prefix}down",), has_bias=False)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        router = linear_tensors(
            "router", (NUM_EXPERTS, spec.hidden_size), (f"model.layers.{index}.router",), has_bias=False
        )
        attention = [t for t in super().layer_tensors(spec, index) if t.name not in ("gate_up", "down")]
        return *attention, *router

    def layer_of(self, stack: str) -> LayerFunction:
        return self.layer if stack == DECODER else self.prelude

    def prelude(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        return hidden + self.mlp(weights, self.kernels.rms_norm(hidden, weights.vector("norm"), 1e-5))

    def mlp(self, weights: LayerWeights, x: Tensor) -> Tensor:
        activated = self.kernels.gated_activation(self.project(weights, "gate_up", x), "silu")
        return self.project(weights, "down", activated)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = self.kernels.rms_norm(hidden, weights.vector("input_norm"), 1e-5)
        hidden = hidden + attend(self, index, weights, x, kv, batch)
        x = self.kernels.rms_norm(hidden, weights.vector("post_norm"), 1e-5)
        scores, chosen = routes(self.project(weights, "router", x))
        parts = torch.zeros(len(x), NUM_EXPERTS, x.shape[1])
        for number, expert in weights.experts(sorted(set(chosen.flatten().tolist()))):
            rows = (chosen == number).any(1).nonzero().flatten()
            parts[rows, number] = self.mlp(expert, x[rows]) * scores[rows, number, None]
        for number in range(NUM_EXPERTS):  # in their order, in whatever order they came
            hidden = hidden + parts[:, number]
        return hidden


def routes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of all experts, zero but for the chosen ones, and the chosen ones: row by row."""
    rows = [row.softmax(0) for row in logits]
    chosen = torch.stack([row.topk(NUM_CHOSEN).indices for row in rows])
    return torch.stack(rows), chosen


def write_mixture(folder: Path, num_prelude: int = 2) -> None:
    config = {
        "architectures": ["Mixture"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 160,
        "max_position_embeddings": 192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "num_prelude_layers": num_prelude,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    declared = Mixture.model_tensors(Mixture.read_spec(config))
    for tensor in (tensor for group in declared.groups for tensor in group):
        sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "gate": 96, "up": 96}
        for part in tensor.parts:
            rows = (
                sizes.get(part.split(".")[-2], tensor.shape[0]) if len(tensor.parts) > 1 else tensor.shape[0]
            )
            random = torch.randn(rows, *tensor.shape[1:], generator=generator)
            tensors[part] = random * 0.14 if tensor.is_matrix else 1 + 0.1 * random
    save_file(tensors, folder / "model.safetensors")


def open_mixture(folder: Path) -> OpenModel:
    checkpoint = Checkpoint.open(folder)
    spec = Mixture.read_spec(checkpoint.config)
    return OpenModel(Mixture, spec, WeightStore(checkpoint, Mixture.model_tensors(spec)))


def plain_logprobs(folder: Path, token_ids: list[int]) -> list[float]:
    """Of a prompt's tokens: the whole model in float64 with all its weights in memory, as a textbook has
    it."""
    store = open_mixture(folder).store
    units = {
        key: store.read_unit(key, torch.empty(unit.num_bytes, dtype=torch.uint8))
        for key, unit in store.units.items()
    }
    embedding = store.read_resident(store.tensors.embedding).matrix("embedding")
    head = store.read_resident(store.tensors.head)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    def times(weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        return x @ weights.matrix(name).dequantize().double().t()

    def mlp(weights: LayerWeights, x: Tensor) -> Tensor:
        gate, up = times(weights, "gate_up", x).chunk(2, -1)
        return times(weights, "down", torch.nn.functional.silu(gate) * up)

    x = embedding.dequantize()[token_ids].double()
    for key, weights in units.items():
        if key.stack == "prelude":
            x = x + mlp(weights, norm(x, weights.vector("norm")))
        elif key.expert is None:
            q, k, v = times(weights, "qkv", norm(x, weights.vector("input_norm"))).split((64, 32, 32), -1)
            q, k, v = (part.view(len(x), -1, 16).transpose(0, 1) for part in (q, k, v))
            q, k = rotated(q), rotated(k)
            k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + times(weights, "o", mixed.transpose(0, 1).flatten(1))
            normed = norm(x, weights.vector("post_norm"))
            scores = times(weights, "router", normed).softmax(-1)
            chosen = torch.zeros_like(scores).scatter_(1, scores.topk(NUM_CHOSEN).indices, 1.0)
            experts = [mlp(units[key._replace(expert=number)], normed) for number in range(NUM_EXPERTS)]
            x = x + (torch.stack(experts, 1) * (scores * chosen)[..., None]).sum(1)
    logits = times(head, "head", norm(x, head.vector("final_norm"))).log_softmax(-1)
    return [float(logits[i, token]) for i, token in enumerate(token_ids[1:])]


def rotated(x: Tensor) -> Tensor:
    """Rope of [num_heads, num_tokens, 16]."""
    angles = torch.outer(torch.arange(x.shape[1]).double(), 10000.0 ** -(torch.arange(8).double() / 8))
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.inner
def test_two_stacks_and_experts_that_are_asked_for(tmp_path: Path) -> None:
    """With room for all and for a few experts; from the original and from a converted folder."""
    write_mixture(tmp_path / "original")
    roomy = engine_of(open_mixture(tmp_path / "original"))
    plan = roomy.plan
    assert plan.num_expert_slots == 15 and len(plan.layers) == 5
    expected = answers(roomy)
    for prompt, answer in zip(PROMPTS, expected, strict=False):
        found = [each.logprob for each in answer.prompt_logprobs or () if each]
        assert found == pytest.approx(plain_logprobs(tmp_path / "original", prompt), abs=5e-3)
    convert(open_mixture(tmp_path / "original").store, tmp_path / "converted")
    for folder in ("original", "converted"):
        for num_resident, num_slots in ((5, 7), (1, 4), (0, 5)):
            config = replace(
                CONFIG,
                num_resident_layers=num_resident,
                host_memory_bytes=_least_budget(open_mixture(tmp_path / folder), num_resident, num_slots),
            )
            engine = engine_of(open_mixture(tmp_path / folder), config)
            assert engine.plan.num_expert_slots == num_slots
            assert len(engine.plan.resident) == num_resident
            assert engine.plan.host_used_bytes <= config.host_memory_bytes
            assert answers(engine) == expected
            assert engine.streamer.tiers.streamed_bytes > 0


def test_the_memory_of_a_step_with_experts_is_no_lottery(tmp_path: Path) -> None:
    """The warm-up's weights are garbage. Whoever decides by them who goes where measures each time another
    number; the largest is that of a step whose tokens all choose the same experts."""
    write_mixture(tmp_path / "model")
    found = set()
    for number in range(6):
        garbage = [torch.full((1 << 16,), number * 41 % 256, dtype=torch.uint8) for _ in range(40)]
        del garbage  # memory that the warm-up's weights find
        with engine_of(open_mixture(tmp_path / "model")) as engine:
            found.add(engine.plan.workspace_bytes)
    assert len(found) == 1


def _least_budget(opened: OpenModel, num_resident: int, num_slots: int) -> int:
    """A budget that has room for so many experts."""
    config = replace(CONFIG, num_resident_layers=num_resident)
    with engine_of(opened, config) as engine:
        plan = engine.plan
    return plan.host_used_bytes - (plan.num_expert_slots - num_slots) * plan.expert_slot_bytes


# ------------------------------------------------------------ a second lane


class SharedKernels(ForwardingKernels):
    """The first lane computes some output channels of each product, a second lane, on a thread of its own and
    with kernels of its own, the rest. Sums are exact, so nobody can tell."""

    def __init__(self, first: Kernels, second: Kernels, share: float) -> None:
        super().__init__(first)
        self._second, self._share = second, share
        self._thread = ThreadPoolExecutor(1)
        self.num_shared = 0

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        border = int(self._share * weight.out_features)
        biases = (None, None) if bias is None else (bias[:border], bias[border:])
        theirs = self._thread.submit(
            self._second.linear, x, weight.rows(border, weight.out_features), biases[1]
        )
        mine = self._kernels.linear(x, weight.rows(0, border), biases[0])
        self.num_shared += 1
        return torch.cat([mine, theirs.result()], dim=1)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "BLOOM"])
def test_a_second_lane_computes_a_share_of_each_product(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    expected = answers(engine_of(open_model(tmp_path)))
    kernels = SharedKernels(choose_kernels(CONFIG), ReferenceKernels(), 0.4)
    config = replace(CONFIG, num_resident_layers=1)
    assert answers(engine_of(open_model(tmp_path), config, kernels)) == expected
    assert kernels.num_shared > 100
