"""Mixtures of experts: what routers choose, sums that do not depend on the order in which experts come, and
experts in the forms of other checkpoints. test_families.py compares logits with transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import random_matrix
from safetensors.torch import load_file, save_file
from test_convert import Ids
from test_families import PROMPTS, TOLERANCE, Model, dequantized, oracle_logits
from test_formats_in import edit_config
from test_invariance import arriving, requests
from tiny_models import DISTINCT, MIXTURES, build, in_circles
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from penstock.config import EngineConfig, KernelChoice
from penstock.engine import Engine
from penstock.errors import InvalidConfig, UnsupportedModel, WrongTensor
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import Kernels, Routed, Router, Routing, choose_kernels, use_processor
from penstock.kernels.reference import ReferenceKernels
from penstock.model.families.gemma import gemma4
from penstock.model.mixture import mixture as mixtures
from penstock.model.mixture.mixture import Mixture, blend
from penstock.model.mixture.sparse_mixer import sparse_mixer
from penstock.model.registry import open_model, read_spec
from penstock.weights.conversion.convert import convert
from penstock.weights.layer_weights import ExpertGroup, LayerWeights
from penstock.weights.store import WeightStore

#: Modules of transformers that give (logits, scores, experts). Llama 4's gives scores of all experts, and
#: logits.
ROUTERS = ("Router", "Gate")
#: What ends so and chooses no experts.
OTHER_GATES = ("ForgetGate",)


def chosen(output: tuple[Tensor, ...]) -> Tensor:
    """The experts that transformers' router chose, by number."""
    return output[2].sort(-1).values if len(output) == 3 else output[0].argmax(-1, keepdim=True)


@pytest.mark.parametrize("name", in_circles(MIXTURES, DISTINCT))
def test_routers_choose_as_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, expected, mine = dequantized(build(name, tmp_path / "model"), tmp_path / "model"), [], []
    for module in oracle.modules():
        if (kind := type(module).__name__).endswith(ROUTERS) and not kind.endswith(OTHER_GATES):
            module.register_forward_hook(lambda *seen: expected.append(chosen(seen[2])))
    with torch.inference_mode():
        for prompt in PROMPTS:
            oracle(torch.tensor([prompt]))

    def recorded(kernels: Kernels, weights: LayerWeights, x: Tensor, routed: Routed, *others: Any) -> Tensor:
        mine.append(routed.experts.sort(-1).values)
        return blend(kernels, weights, x, routed, *others)

    for module in (mixtures, gemma4):
        monkeypatch.setattr(module, "blend", recorded)
    model = Model(tmp_path / "model", EngineConfig(kv_dtype="float32"))
    model.all_logits(model.sequences())
    num_layers = len(mine)
    assert num_layers
    for layer, found in enumerate(mine):
        assert torch.equal(found, torch.cat(expected[layer::num_layers]))


@pytest.mark.inner
@pytest.mark.parametrize(("name", "num_slots"), [("Qwen2-MoE", 4), ("Mixtral", 3), ("GLM-4.5", 11)])
def test_missing_and_evicted_experts_change_no_bit(name: str, num_slots: int, tmp_path: Path) -> None:
    """In any company, with few slots for experts and streamed layers: what a request gets alone, with
    everything in memory."""
    build(name, tmp_path / "made")
    convert(open_model(tmp_path / "made").store, tmp_path / "int8")
    dice = random.Random(name)
    asked = requests(dice)
    plain = EngineConfig(max_model_len=96, max_num_batched_tokens=128, enable_prefix_caching=False)
    with Engine.load(tmp_path / "int8", plain, tokenizer=Ids()) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt, params in asked]
    small = EngineConfig(
        max_num_batched_tokens=33, num_resident_layers=1, max_model_len=96, num_kv_tokens=300
    )
    with Engine.load(tmp_path / "int8", small, tokenizer=Ids()) as engine:
        plan = engine.plan
    spared = (plan.num_expert_slots - num_slots) * plan.expert_slot_bytes
    small = replace(small, host_memory_bytes=plan.host_used_bytes - spared)
    with Engine.load(tmp_path / "int8", small, tokenizer=Ids()) as engine:
        assert engine.plan.num_expert_slots == num_slots
        together = arriving(engine, dice, asked)
        num_asked, num_missed, *_ = engine.streamer.tiers.expert_counts
        assert engine.plan.num_expert_slots < num_missed <= num_asked  # some came more than once
    for mine, expected in zip(together, alone, strict=True):
        assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs)


def test_guessed_experts_change_no_bit(tmp_path: Path) -> None:
    """One sequence: each layer guesses the next layer's experts, which are read early."""
    build("Mixtral", tmp_path / "made")
    convert(open_model(tmp_path / "made").store, tmp_path / "int8")
    config = EngineConfig(max_model_len=96, num_kv_tokens=300, enable_prefix_caching=False)
    params, answers = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3), []
    for is_small in (False, True):
        with Engine.load(tmp_path / "int8", config, tokenizer=Ids()) as engine:
            plan = engine.plan
            answers.append(engine.generate([[5, 6, 7]], params)[0])
            tier = engine.streamer.tiers.nearest_experts
            assert tier is not None and tier.holds_all != is_small
            assert (tier.expected.num_read > 0) == is_small
        spared = plan.num_expert_slots // 2 * plan.expert_slot_bytes
        config = replace(config, host_memory_bytes=plan.host_used_bytes - spared)
    assert answers[0].token_ids == answers[1].token_ids and answers[0].logprobs == answers[1].logprobs


# ------------------------------------------------------------ routing


def routed_by(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> Routed:
    """What a router makes of logits: its matrix is the identity."""
    return ReferenceKernels().route(logits, Router(torch.eye(logits.shape[1]), None, correction), routing)


def test_a_softmax_over_the_chosen_is_a_renormalized_one() -> None:
    logits = torch.tensor([[3.0, -1.0, 2.5, 0.0], [-50.0, -51.0, -90.0, -49.0]])
    routed = routed_by(Routing(4, 2, is_renormalized=True), logits)
    assert routed.experts.tolist() == [[0, 2], [3, 0]]
    assert torch.allclose(routed.scores, logits.gather(1, routed.experts).softmax(1), atol=1e-6)


def test_a_correction_chooses_and_does_not_count() -> None:
    routing = Routing(3, 1, "sigmoid", scaling=2.0, has_correction=True)
    routed = routed_by(routing, torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([9.0, 0.0, 0.0]))
    assert routed.experts.tolist() == [[0]] and routed.scores.tolist() == [[1.0]]


@pytest.mark.parametrize(("num_counted", "expected"), [(1, [0, 1]), (2, [2, 3])])
def test_experts_come_from_the_best_groups(num_counted: int, expected: list[int]) -> None:
    """The first group has the best expert, the second group the best sum of two."""
    routing = Routing(6, 2, "sigmoid", num_groups=3, num_chosen_groups=1, num_counted=num_counted)
    routed = routed_by(routing, torch.tensor([[4.0, -9.0, 1.0, 0.9, -9.0, -9.0]]))
    assert routed.experts.tolist() == [expected]


def test_of_equal_scores_the_lower_number_wins() -> None:
    logits = torch.zeros(40, 64)
    for rows in (1, 40):
        assert routed_by(Routing(64, 3), logits[:rows]).experts.tolist() == [[0, 1, 2]] * rows


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
def test_sparse_mixer_equals_transformers(spread: float) -> None:
    """Also where an expert is so far behind the first that its share of a softmax over all is 0."""
    logits = spread * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    weights = LayerWeights({"router": torch.eye(16)})
    routed = sparse_mixer(ReferenceKernels(), weights, logits, 2, 0.02)
    scores, experts = sparsemixer(logits, jitter_eps=0.01, training=False)
    assert torch.equal(routed.experts, experts)
    assert torch.allclose(routed.scores, scores, rtol=1e-5)


class Arriving(LayerWeights):
    """A layer whose experts come in a given order, in groups of up to `at_once`."""

    def __init__(self, experts: Sequence[LayerWeights], order: Sequence[int], at_once: int = 1) -> None:
        super().__init__({})
        self._experts, self._order, self._at_once = experts, order, at_once

    def expert_groups(self, numbers: Sequence[int], _: Sequence[int]) -> Iterator[ExpertGroup]:
        there = [(number, self._experts[number]) for number in self._order if number in numbers]
        yield from (there[i : i + self._at_once] for i in range(0, len(there), self._at_once))


def random_expert(seed: int) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (96, 32), "down": (32, 48)}
    return LayerWeights(
        {name: random_matrix(*shape, generator) for name, shape in shapes.items()}  # an expert of 48 neurons
    )


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("choice", ["reference", "auto"])
def test_the_order_in_which_experts_come_changes_no_bit(choice: KernelChoice, is_gated: bool) -> None:
    torch.manual_seed(0)
    use_processor(EngineConfig(), 2)
    kernels = choose_kernels(EngineConfig(kernels=choice))
    x, experts = torch.randn(33, 32), [random_expert(seed) for seed in range(7)]
    routed = Routed(torch.randn(33, 7).topk(3).indices, torch.rand(33, 3))

    def plain(expert: LayerWeights, rows: Tensor) -> Tensor:
        inner = kernels.gated_activation(kernels.linear(rows, expert.matrix("gate_up")), "silu")
        return kernels.linear(inner, expert.matrix("down"))

    mixture = Mixture(Routing(7, 3), 32, 48, frozenset())
    compute = mixture.compute if is_gated else mixtures.one_by_one(plain)
    alone = [
        [plain(experts[number], row[None])[0] for number in chosen]
        for row, chosen in zip(x, routed.experts, strict=True)
    ]
    for scales_inputs in (False, True):
        expected = blend(kernels, Arriving(experts, range(7), 7), x, routed, compute, scales_inputs)
        for at_once in (1, 2, 3):
            order = random.Random(at_once).sample(range(7), 7)
            layer = Arriving(experts, order, at_once)
            assert torch.equal(blend(kernels, layer, x, routed, compute, scales_inputs), expected)
            for token in (0, 17):
                own = Routed(routed.experts[token : token + 1], routed.scores[token : token + 1])
                one = blend(kernels, layer, x[token : token + 1], own, compute, scales_inputs)
                assert torch.equal(one[0], expected[token])
        if not scales_inputs:  # ranks are added one after the other, and every operation rounds
            for row, parts, scores in zip(expected, alone, routed.scores, strict=True):
                first, second, third = (part * score for part, score in zip(parts, scores, strict=True))
                assert torch.equal(row, first + second + third)


# ------------------------------------------------------------ experts in files


def expert_bytes(store: WeightStore) -> dict[Any, bytes]:
    """Each expert's buffer."""
    return {key: read_unit(store, key) for key in store.units if key.expert is not None}


def read_unit(store: WeightStore, key: Any) -> bytes:
    buffer = torch.zeros(store.units[key].num_bytes, dtype=torch.uint8)
    store.read_unit(key, buffer)
    return buffer.numpy().tobytes()


def merge_experts(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Qwen3-MoE's folder, with the experts of each layer as transformers merges them."""
    tensors = load_file(folder / "model.safetensors")
    apart = {name: tensors.pop(name) for name in sorted(tensors) if ".experts." in name}
    for layer in {name.split(".experts.")[0] for name in apart}:
        experts = range(len({name.split(".")[5] for name in apart if name.startswith(f"{layer}.")}))
        prefix = f"{layer}.experts."
        gate, up, down = (
            torch.stack([apart[f"{prefix}{number}.{part}_proj.weight"] for number in experts])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}down_proj"] = down
    return tensors


@pytest.mark.parametrize("is_transposed", [False, True])
def test_merged_experts_are_read_as_experts_apart(
    is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("Qwen3-MoE", tmp_path / "apart")
    tensors = merge_experts(tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "merged")
    if is_transposed:
        merged = {name for name, tensor in tensors.items() if tensor.dim() == 3}
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in merged}
        monkeypatch.setattr(mixtures, "separate_experts", lambda *given: SEPARATE(*given[:-1], True))
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    expected = expert_bytes(open_model(tmp_path / "apart").store)
    assert len(expected) == 16
    assert expert_bytes(open_model(tmp_path / "merged").store) == expected


SEPARATE = mixtures.separate_experts


@pytest.mark.parametrize("name", ["Mixtral", "Phi-3.5-MoE", "MiniMax-M2", "Granite MoE", "ERNIE 4.5 MoE"])
def test_names_of_transformers_memory(name: str, tmp_path: Path) -> None:
    """Files that transformers saves without turning its names back."""
    model = build(name, tmp_path / "usual")
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    names = load_file(tmp_path / "memory" / "model.safetensors").keys()
    assert names != load_file(tmp_path / "usual" / "model.safetensors").keys()
    stores = [open_model(tmp_path / folder).store for folder in ("usual", "memory")]
    expected, found = ({key: read_unit(store, key) for key in store.units} for store in stores)
    assert found == expected


def fp8_experts(tensors: dict[str, Tensor], block: int) -> dict[str, Tensor]:
    """The tensors with merged experts in FP8 whose blocks, of `block` rows and columns, have scales."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            scales = 2.0 ** torch.randint(-9, -6, (len(tensor), *(-(-n // block) for n in tensor.shape[1:])))
            found[name] = (tensor * 100).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scales
    return found


def test_merged_experts_in_fp8_are_read_as_experts_apart(tmp_path: Path) -> None:
    """Blocks of 16, of which gate's last one has rows of up, too."""
    build("Qwen3-MoE", tmp_path / "merged", moe_intermediate_size=40)
    tensors = fp8_experts(merge_experts(tmp_path / "merged"), 16)
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    shutil.copytree(tmp_path / "merged", tmp_path / "floats")
    edit_config(
        tmp_path / "merged", quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, stored = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
        wide = scale.repeat_interleave(16, 1).repeat_interleave(16, 2)
        tensors[name.removesuffix("_scale_inv")] = (
            stored.float() * wide[:, : stored.shape[1], : stored.shape[2]]
        )
    save_file(tensors, tmp_path / "floats" / "model.safetensors")
    store, plain = (open_model(tmp_path / folder).store for folder in ("merged", "floats"))
    assert store.checkpoint.requantized.startswith("FP8")
    part = "model.layers.2.mlp.experts.5.up_proj.weight"
    assert torch.equal(store.read_exact(part), plain.read_exact(part))
    assert torch.equal(store.source.read(part, 3, 19), plain.source.read(part, 3, 19))


def test_merged_experts_in_fp8_with_inputs_first_are_read_as_experts_apart(tmp_path: Path) -> None:
    """As transformers' FbgemmFp8Llama4TextExperts holds them: the scales of gate and up are a row, those of
    down a column."""
    build("Llama 4", tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    floats = dict(tensors)
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 3]:
        stored = (tensors[name] * 100).to(torch.float8_e4m3fn)
        scale = 0.001 + 0.01 * torch.rand(len(stored), 1, stored.shape[2])
        floats[name], tensors[name] = stored.float() * scale, stored
        tensors[f"{name}_scale"] = scale.mT.contiguous() if "down" in name else scale
    shutil.copytree(tmp_path / "merged", tmp_path / "floats")
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    edit_config(tmp_path / "merged", quantization_config={"quant_method": "fbgemm_fp8"})
    store, plain = (open_model(tmp_path / folder).store for folder in ("merged", "floats"))
    assert store.checkpoint.requantized.startswith("FP8")
    for part in ("up_proj", "down_proj"):
        name = f"model.layers.1.feed_forward.experts.3.{part}.weight"
        assert torch.equal(store.read_exact(name), plain.read_exact(name))
        assert torch.equal(store.source.read(name, 3, 19), plain.source.read(name, 3, 19))
    wrong = next(name for name in tensors if name.endswith("_scale"))
    save_file(tensors | {wrong: torch.ones(5, 3)}, tmp_path / "merged" / "model.safetensors")
    with pytest.raises(WrongTensor, match="needs a scale for each output"):
        open_model(tmp_path / "merged")


def test_merged_experts_of_another_form_are_refused(tmp_path: Path) -> None:
    build("Qwen3-MoE", tmp_path)
    tensors = merge_experts(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="holds a layer's experts in a quantized form"):
        open_model(tmp_path)
    save_file(tensors | {name: tensors[name][0].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(WrongTensor, match="three axes"):
        open_model(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"group_size": 32}, {"weights": "int4", "group_size": 32}])
def test_converted_experts_are_one_read_each(changes: dict[str, Any], tmp_path: Path) -> None:
    """One file for the experts of a layer, with each expert on pages of its own, byte for byte as the
    original makes it."""
    build("Qwen3-MoE", tmp_path / "made", hidden_size=128, moe_intermediate_size=64)
    store = open_model(tmp_path / "made", **changes).store
    convert(store, tmp_path / "converted")
    converted = open_model(tmp_path / "converted").store
    assert all(converted.contiguous_unit(key) is not None for key in converted.units)
    assert expert_bytes(converted) == expert_bytes(store)
    files = sorted(path.name for path in (tmp_path / "converted").glob("*experts*"))
    assert files == [f"model-layer-{layer:05d}-experts-00000.safetensors" for layer in (0, 2)]


@pytest.mark.parametrize("name", MIXTURES)
def test_more_experts_than_a_list_has_room_for_are_refused(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    many = config | {key: 10**9 for key in names if key in config}
    with pytest.raises(InvalidConfig, match="from 1 to 10000"):
        read_spec(many, "penstock")


class _Opened(NamedTuple):
    """silu(gate), at most `limit`, which meets up within the same limit (Ling 3)."""

    gate: Tensor
    limit: float

    def __mul__(self, up: Tensor) -> Tensor:  # type: ignore[override]
        opened = torch.nn.functional.silu(self.gate)
        return opened.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class _Limited(torch.nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: Tensor) -> _Opened:
        return _Opened(gate, self.limit)


def test_gates_have_the_limits_of_their_layer(tmp_path: Path) -> None:
    """transformers' Ling 3 leaves the limits out; its layers get them here. Some have none."""
    oracle: Any = dequantized(build("Ling 3", tmp_path), tmp_path)
    edit_config(
        tmp_path,
        expert_swiglu_limit_list=[0, 0, 0.03],
        share_expert_swiglu_limit_list=[0, 0.05, None],
    )
    model = Model(tmp_path, EngineConfig(kv_dtype="float32"))
    mine, without = model.all_logits(model.sequences()), oracle_logits(oracle)
    oracle.model.layers[1].mlp.shared_experts.act_fn = _Limited(0.05)
    oracle.model.layers[2].mlp.experts.act_fn = _Limited(0.03)
    expected = oracle_logits(oracle)
    tolerance = TOLERANCE["float32"] * float(expected.max() - expected.min())
    assert float((mine - expected).abs().max()) <= tolerance < float((expected - without).abs().max()) / 4
    edit_config(tmp_path, expert_swiglu_limit_list=[-1.0] * 3)
    with pytest.raises(InvalidConfig, match="expert_swiglu_limit_list"):
        open_model(tmp_path)


def test_lightning_attention_is_not_taken_for_kimis(tmp_path: Path) -> None:
    """Ling 2.5 has the same model type as Ling 3."""
    build("Ling 3", tmp_path)
    edit_config(tmp_path, kda_safe_gate=None, kda_lower_bound=None)
    with pytest.raises(UnsupportedModel, match="lightning attention"):
        open_model(tmp_path, model_impl="penstock")
