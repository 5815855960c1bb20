"""Layers with experts in one call, as far as their experts are in memory: the bits of the layers one by one,
with experts that are there, missing, or on their way."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_convert import Ids
from test_expert_kernels import form
from test_int4_kernels import BUILDS
from test_int4_kernels import kernels as fast
from test_sublayers import CONFIG, DIM, GO_ON, HEADS, KV_HEADS, WIDTH, copy_of, step, weights_of
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import ForwardingKernels, Kernels
from penstock.kernels.expert_records import scratch_bytes
from penstock.kernels.sublayers import native_mixture
from penstock.kernels.sublayers.mixture_layer import ExpertsForRun
from penstock.kernels.sublayers.native_mixture import NativeMixture
from penstock.memory import direct_io
from penstock.memory.reads.ordered_reads import OrderedReads
from penstock.model.families.mixture_frame import MixtureFamily
from penstock.model.families.mixtures import Mixtral, Qwen3Moe
from penstock.model.mixture.drawn_routing import DrawnRouters
from penstock.model.norms import HeadNorms
from penstock.model.registry import open_model
from penstock.spec import DECODER, UnitKey
from penstock.weights.conversion.convert import convert
from penstock.weights.expert_table import ExpertRun, ExpertTable
from penstock.weights.layer_weights import ExpertGroup, LayerWeights, NextExperts

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN, SIZE = 4, 8, 3, 128
MOE: dict[str, Any] = CONFIG | {
    "num_hidden_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": SIZE, "norm_topk_prob": True, "head_dim": DIM,
}  # fmt: skip
#: What says whether a read has ended; C calls it.
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
#: What the memory does with an expert.
THERE, MISSING, COMES, STILL_COMES, FAILS = range(5)


class Memory:
    """Stands for an ExpertLender: all experts are there for whoever asks for them; kernels that look find
    what `states` say."""

    def __init__(
        self,
        kind: str,
        states: Sequence[Sequence[int]],
        others: Callable[[int], dict[str, Any]] = lambda layer: {},
    ) -> None:
        """`others`: what a layer has beside experts and attention."""
        self.others = others
        self.states = [list(each) for each in states]
        self.tables = [ExpertTable(NUM_EXPERTS) for _ in states]
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.guessed: list[tuple[int, tuple[int, ...]]] = []
        self.is_running, self.num_runs = False, 0
        self.experts = [
            [expert(kind, layer, number) for number in range(NUM_EXPERTS)] for layer in range(len(states))
        ]
        self.layers = [self._layer(kind, layer) for layer in range(len(states))]
        for layer, own in enumerate(self.layers[:-1]):
            behind = NextExperts(
                partial(self.layers.__getitem__, layer + 1), partial(self._expect, layer + 1)
            )
            own.next_experts = behind
        for layer, number in self._with(THERE):
            self._put(layer, number)
        self.wait = WAIT(lambda reads, ticket, is_patient: {COMES: 1, STILL_COMES: 0, FAILS: -1}[ticket])

    def _layer(self, kind: str, layer: int) -> LayerWeights:
        random_ = torch.Generator().manual_seed(layer)
        own, router = weights_of(kind), torch.randn(NUM_EXPERTS, WIDTH, generator=random_)
        factor = 1.0 + layer
        weights = LayerWeights(
            dict(own.items())
            | {"router": router, "input_norm": own.vector("input_norm") * factor}
            | self.others(layer),
            partial(self._groups, layer),
        )
        key = UnitKey(DECODER, layer, None)
        weights.expert_run = ExpertRun(self.tables[layer], self._begin, self._end, key)
        return weights

    def _with(self, *states: int) -> Iterator[tuple[int, int]]:
        for layer, row in enumerate(self.states):
            yield from ((layer, number) for number, state in enumerate(row) if state in states)

    def _put(self, layer: int, number: int) -> None:
        weights = self.experts[layer][number]
        assert weights.gated.native is not None
        self.tables[layer].put(number, weights, weights.gated.native)

    def _groups(self, layer: int, numbers: Sequence[int], num_tokens: Sequence[int]) -> Iterator[ExpertGroup]:
        assert not self.is_running
        self.asked.append((layer, tuple(numbers)))
        for number in numbers:
            yield [(number, self.experts[layer][number])]

    def _expect(self, layer: int, numbers: Sequence[int]) -> None:
        assert not self.is_running
        self.guessed.append((layer, tuple(numbers)))
        for number in numbers:  # what was guessed is read at once
            if self.states[layer][number] == MISSING:
                self.states[layer][number] = THERE
                self._put(layer, number)

    def _begin(self) -> ExpertsForRun:
        assert not self.is_running
        self.is_running, records = True, [self.experts[0][0].gated.native]
        coming = []
        for layer, number in self._with(COMES, STILL_COMES, FAILS):
            native = self.experts[layer][number].gated.native
            assert native is not None
            records.append(native)
            table, state = self.tables[layer].address, self.states[layer][number]
            coming.append((table, number, native.address, state))
        row_bytes = max(record.row_bytes for record in records if record is not None)
        return ExpertsForRun(row_bytes, coming, ctypes.cast(self.wait, ctypes.c_void_p).value or 0, 1)

    def _end(self, asked: Sequence[tuple[UnitKey, Sequence[int]]]) -> None:
        self.is_running, self.num_runs = False, self.num_runs + 1
        self.asked += [(key.layer, tuple(numbers)) for key, numbers in asked]


def expert(kind: str, layer: int, number: int) -> LayerWeights:
    seed = 100 * layer + 2 * number + 7
    return LayerWeights(
        {"gate_up": form(kind, 2 * SIZE, WIDTH, seed), "down": form(kind, WIDTH, SIZE, seed + 1)}
    )


def family(kernels: Kernels, **differences: Any) -> MixtureFamily:
    return Qwen3Moe(replace(Qwen3Moe.read_spec(MOE), **differences), kernels, 3000)


def one_by_one(
    memory: Memory, kernels: Kernels, context: int, **differences: Any
) -> tuple[Tensor, list[Tensor]]:
    """The plain twin: the hidden state, and what is in the caches."""
    hidden, kv, batch = step([(context, 1)], torch.float16)
    plain = family(ForwardingKernels(kernels), **differences)
    caches = [copy_of(kv) for _ in memory.layers]
    for index, (weights, cache) in enumerate(zip(memory.layers, caches, strict=True)):
        hidden = plain.layer(index, weights, hidden, cache, batch)
    return hidden, [part for cache in caches for part in cache.parts]


def together(
    memory: Memory, kernels: Kernels, context: int, **differences: Any
) -> tuple[Tensor, list[Tensor]]:
    hidden, kv, batch = step([(context, 1)], torch.float16)
    caches = [copy_of(kv) for _ in memory.layers]
    own = family(kernels, **differences)
    found = own.layers(range(len(memory.layers)), memory.layers, hidden, caches, batch, GO_ON)
    assert found is not None
    return found, [part for cache in caches for part in cache.parts]


def all_in(state: int) -> list[list[int]]:
    return [[state] * NUM_EXPERTS for _ in range(NUM_LAYERS)]


@pytest.mark.inner
@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("build_name", BUILDS)
@pytest.mark.parametrize("kind", ["int8", "steps", "planes"])
def test_one_call_has_the_bits_of_layers_one_by_one(kind: str, build_name: str) -> None:
    kernels, dice = fast(build_name, "int16"), random.Random(kind)
    cases = [all_in(state) for state in range(5)]
    cases += [
        [[dice.choice((THERE, THERE, MISSING, COMES, STILL_COMES, FAILS)) for _ in row] for row in cases[0]]
        for _ in range(12)
    ]
    for number, states in enumerate(cases):
        context = 2500 if number % 4 == 3 else 1 + 13 * number  # threads share the keys of a long one
        plain, mine = Memory(kind, states), Memory(kind, states)
        expected, parts = one_by_one(plain, kernels, context)
        found, own_parts = together(mine, kernels, context)
        assert torch.equal(found, expected) and all(map(torch.equal, own_parts, parts)), states
        assert mine.asked == plain.asked and set(mine.guessed) <= set(plain.guessed)


#: What is added to Qwen3-MoE: a shared expert with a gate of its own, or without one and wider than all
#: experts of a token together, with norms of all heads together. And the forms of experts and of shared ones.
ADDED = [
    ("gate", "int8", "planes"), ("gate", "steps", "steps"),
    ("wide, whole norms", "int8", "mxfp4"), ("wide, whole norms", "steps", "int8 groups"),
]  # fmt: skip


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("build_name", BUILDS)
@pytest.mark.parametrize(("added", "kind", "shared_kind"), ADDED)
def test_shared_experts_have_the_bits_of_layers_one_by_one(
    added: str, kind: str, shared_kind: str, build_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, spec, dice = fast(build_name, "int16"), family(fast(build_name, "int16")).spec, random.Random(1)
    size = SIZE if added == "gate" else 16 * SIZE
    mixture, attention = replace(spec.mixture, shared_size=size), spec.attention
    if added == "gate":
        mixture = replace(mixture, has_shared_gate=True)
    else:
        attention = replace(attention, norms=HeadNorms(is_whole=True))

    def others(layer: int) -> dict[str, Any]:
        random_, found = torch.Generator().manual_seed(layer), dict[str, Any]()
        found["gate_up"] = form(shared_kind, 2 * size, WIDTH, 50 + layer)
        found["down"] = form(shared_kind, WIDTH, size, 60 + layer)
        if added == "gate":
            return found | {"shared_gate": torch.randn(1, WIDTH, generator=random_) / WIDTH**0.5}
        found["q_norm"] = torch.randn(HEADS * DIM, generator=random_)
        return found | {"k_norm": torch.randn(KV_HEADS * DIM, generator=random_)}

    asked_bytes, scratch = list[int](), native_mixture.scratch
    monkeypatch.setattr(native_mixture, "scratch", lambda size: asked_bytes.append(size) or scratch(size))
    some = (THERE, THERE, THERE, MISSING, COMES, STILL_COMES)
    for number in range(8):
        states = all_in(THERE if number == 0 else STILL_COMES)
        if number > 1:
            states = [[dice.choice(some) for _ in row] for row in states]
        plain, mine = (Memory(kind, states, others) for _ in range(2))
        expected, parts = one_by_one(plain, kernels, 40, mixture=mixture, attention=attention)
        found, own_parts = together(mine, kernels, 40, mixture=mixture, attention=attention)
        assert torch.equal(found, expected) and all(map(torch.equal, own_parts, parts)), states
        assert mine.asked == plain.asked
        assert number > 1 or mine.num_runs == (1 if number == 0 else NUM_LAYERS)
        record = mine.layers[0].gated.native
        assert record is not None and min(asked_bytes) >= scratch_bytes(1, 1, record.row_bytes)


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_layers_stop_where_experts_are_missing() -> None:
    """What is there takes one run. A layer of which something is missing, or that guesses something that is
    missing, ends a run, and a guess is told once."""
    kernels = fast(BUILDS[0], "int16")
    for state in (THERE, COMES):
        memory = Memory("int8", all_in(state))
        together(memory, kernels, 5)
        assert memory.num_runs == 1 and not memory.guessed
        assert memory.asked == [(layer, numbers) for layer, (_, numbers) in enumerate(memory.asked)]
    for state in (STILL_COMES, FAILS):
        memory = Memory("int8", all_in(state))
        together(memory, kernels, 5)
        assert [layer for layer, _ in memory.guessed] == [1, 2, 3] and memory.num_runs == NUM_LAYERS
    memory = Memory("int8", [[THERE] * NUM_EXPERTS] * 2 + [[MISSING] * NUM_EXPERTS] + [[THERE] * NUM_EXPERTS])
    together(memory, kernels, 5)
    is_right = set(dict(memory.asked)[2]) <= set(dict(memory.guessed)[2])
    assert [layer for layer, _ in memory.guessed] == ([2] if is_right else [2, 3])
    assert memory.num_runs == (2 if is_right else 3)


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_other_steps_come_one_by_one() -> None:
    """Several tokens, kernels that see every operation, experts that nobody finds by themselves, matrices
    that no call knows, families with other layers."""
    kernels, memory = fast(BUILDS[0], "int16"), Memory("int8", all_in(THERE))

    def layers(own: MixtureFamily, weights: Sequence[LayerWeights], num_tokens: int = 1) -> Tensor | None:
        hidden, kv, batch = step([(40, num_tokens)], torch.float16)
        return own.layers(range(len(weights)), weights, hidden, [kv] * len(weights), batch, GO_ON)

    assert layers(family(kernels), memory.layers) is not None
    assert layers(family(kernels), memory.layers, 2) is None
    hidden, kv, batch = step([(40, 1)], torch.float16)
    copied = replace(batch, copied_rows=torch.tensor([0]), copied_slots=torch.tensor([0]))
    caches = [kv] * NUM_LAYERS
    own = family(kernels)
    assert own.layers(range(NUM_LAYERS), memory.layers, hidden, caches, copied, GO_ON) is None
    assert layers(family(ForwardingKernels(kernels)), memory.layers) is None
    assert layers(family(kernels), [LayerWeights(dict(each.items())) for each in memory.layers]) is None
    stacked = LayerWeights(dict(memory.layers[0].items()) | {"o": form("stacked", WIDTH, WIDTH, 3)})
    stacked.expert_run = memory.layers[0].expert_run
    assert layers(family(kernels), [stacked]) is None
    assert layers(family(kernels, is_parallel=True), memory.layers) is None
    mixture = family(kernels).spec.mixture
    for other in ({"narrow_size": 64}, {"scales_inputs": True}, {"has_gate": False}):
        assert layers(family(kernels, mixture=replace(mixture, **other)), memory.layers) is None
    unknown = LayerWeights(dict(memory.layers[0].items()) | {"down": form("stacked", WIDTH, SIZE, 3)})
    unknown.expert_run = memory.layers[0].expert_run
    shared = replace(mixture, shared_size=SIZE)
    assert layers(family(kernels, mixture=shared), [unknown]) is None
    assert layers(family(kernels), [unknown]) is not None
    assert layers(Mixtral(family(kernels).spec, kernels, 3000), memory.layers) is not None


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_drawn_experts_are_computed_and_guessed() -> None:
    """The first layers of a sweep and the last ones: a guess for the first of the last ones is what it
    chooses."""
    weights = tuple(1.0 + number for number in range(NUM_EXPERTS))
    drawn = DrawnRouters(fast(BUILDS[0], "int16"), weights, share_guessed=1.0)
    own, right = family(drawn), 0
    for turn in range(20):
        memory = Memory("int8", all_in(FAILS if turn % 2 else THERE))
        hidden, kv, batch = step([(7, 1)], torch.float16)
        for indices in (range(2), range(2, NUM_LAYERS)):
            found = own.layers(
                indices, memory.layers[indices.start : indices.stop], hidden, [kv] * 2, batch, GO_ON
            )
            assert found is not None
            hidden = found
        chosen = {layer: set(numbers) for layer, numbers in memory.asked}
        assert sorted(chosen) == list(range(NUM_LAYERS))
        if turn % 2:
            assert {layer: set(numbers) for layer, numbers in memory.guessed} == {
                layer: chosen[layer] for layer in range(1, NUM_LAYERS)
            }
            right += 1
    assert right == 10


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_keys_that_are_clamped_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    memory, (hidden, kv, batch) = Memory("int8", all_in(THERE)), step([(3, 1)], torch.float16)
    layers = memory.layers[:1]
    layers[0] = LayerWeights(dict(layers[0].items()) | {"k_norm": torch.full((DIM,), 1e6)})
    layers[0].expert_run = memory.layers[0].expert_run
    found = family(fast(BUILDS[0], "int16")).layers(range(1), layers, hidden, [kv], batch, GO_ON)
    assert found is not None and "largest float16" in caplog.text


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
def test_a_step_is_given_up_between_two_calls() -> None:
    memory, (hidden, kv, batch) = Memory("int8", all_in(FAILS)), step([(3, 1)], torch.float16)

    def give_up() -> None:
        assert not memory.is_running
        raise InterruptedError

    own = family(fast(BUILDS[0], "int16"))
    with pytest.raises(InterruptedError):
        own.layers(range(NUM_LAYERS), memory.layers, hidden, [kv] * NUM_LAYERS, batch, give_up)
    assert memory.num_runs == 1 and not memory.asked


class Watched:
    """Counts calls of several layers, and experts that were coming when one began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_runs = self.num_coming = 0
        self._run = NativeMixture.run
        monkeypatch.setattr(NativeMixture, "run", lambda *arguments: self.run(*arguments))

    def run(
        self, sweep: NativeMixture, first: int, hidden: Tensor, experts: ExpertsForRun, begun: bool
    ) -> Any:
        self.num_runs += 1
        self.num_coming += len(experts.coming)
        return self._run(sweep, first, hidden, experts, begun)


@pytest.mark.inner
@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize(
    ("name", "kv_dtype", "overrides"),
    [
        ("Mixtral", "float16", {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8}),
        ("gpt-oss", "int8", {}),
        ("Qwen3-MoE", "float16", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("Qwen2-MoE", "float16", {"decoder_sparse_step": 1}),
        ("OLMoE", "float16", {}),
        ("GLM-4.5", "float16", {}),
    ],
)
def test_an_engine_counts_and_answers_as_layer_by_layer(
    name: str, kv_dtype: Any, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots for a share of the experts, which are read from a file one after the other, slowly."""
    try:
        OrderedReads().close()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(direct_io, "is_queued", lambda descriptor: True)
    monkeypatch.setattr(OrderedReads.__init__, "__defaults__", (4096, 1))
    build(name, tmp_path / "made", **({"num_hidden_layers": 6} | overrides))
    convert(open_model(tmp_path / "made").store, tmp_path / "int8")
    config = EngineConfig(max_model_len=96, num_kv_tokens=300, enable_prefix_caching=False, kv_dtype=kv_dtype)
    _compare_engines(tmp_path / "int8", config, monkeypatch, is_ordered=True)


@pytest.mark.skipif(not BUILDS, reason="no C kernels were compiled")
@pytest.mark.parametrize("name", ["Mixtral", "GLM-4.5"])
def test_an_engine_finds_experts_that_it_has_converted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint as people publish it: threads of Python bring its experts, in any order. Kernels find
    them where each has a slot."""
    build(name, tmp_path, num_hidden_layers=6)
    config = EngineConfig(max_model_len=96, num_kv_tokens=300, enable_prefix_caching=False)
    _compare_engines(tmp_path, config, monkeypatch, is_ordered=False)


@pytest.mark.parametrize("layers", [(1, 3, 5), (0, 1, 2, 4, 5)])
def test_experts_in_files_of_which_some_can_not_be_queued(
    layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where some of a model's files are on another file system: reads of all experts are of one kind."""
    build("Mixtral", tmp_path / "made", num_hidden_layers=6)
    convert(open_model(tmp_path / "made").store, tmp_path / "int8")
    names = [f"model-layer-{number:05}-experts-00000.safetensors" for number in layers]
    queued = {(tmp_path / "int8" / name).stat().st_ino for name in names}
    monkeypatch.setattr(direct_io, "is_queued", lambda descriptor: os.fstat(descriptor).st_ino in queued)
    config = EngineConfig(max_model_len=96, num_kv_tokens=300, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3, speculation=False)
    with Engine.load(tmp_path / "int8", config, tokenizer=Ids()) as engine:
        plan, expected = engine.plan, engine.generate([[5, 6, 7], [9] * 20], params)
    spared = int(plan.num_expert_slots * 0.6) * plan.expert_slot_bytes
    small, found = replace(config, host_memory_bytes=plan.host_used_bytes - spared), list[Any]()

    def answer() -> None:
        with Engine.load(tmp_path / "int8", small, tokenizer=Ids()) as engine:
            tier = engine.streamer.tiers.nearest_experts
            assert tier is not None and not tier.is_ordered and not tier.holds_all
            found.extend(engine.generate([[5, 6, 7], [9] * 20], params))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(60)
    assert found == expected


def _compare_engines(
    model: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    with Engine.load(model, config, tokenizer=Ids()) as engine:
        plan = engine.plan
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3, speculation=False)
    watched = Watched(monkeypatch)
    for share in (0.4, 0.8, 1.0) if is_ordered else (1.0,):
        spared = int(plan.num_expert_slots * (1 - share)) * plan.expert_slot_bytes
        small, found = replace(config, host_memory_bytes=plan.host_used_bytes - spared), list[Any]()
        for is_together in (False, True):
            num_before = watched.num_runs
            with Engine.load(model, small, tokenizer=Ids()) as engine:
                tier = engine.streamer.tiers.nearest_experts
                assert tier is not None and tier.holds_all == (share == 1.0)
                if not is_together:
                    engine.model.executor.family.__dict__["_calls_mixtures"] = None
                answers = [engine.generate([prompt], params)[0] for prompt in ([5, 6, 7], [9] * 20)]
                found.append([(answer.token_ids, answer.logprobs) for answer in answers])
                found[-1].append((tier.num_asked, tier.uses.num_uses))
                assert (watched.num_runs > num_before) == is_together and tier.is_ordered == is_ordered
                for place, table in tier.slots.tables.items():
                    keys = [UnitKey(*place, number) for number in range(tier.num_units[place])]
                    assert all(key in tier.arrivals.units for key in keys if (key.expert or 0) in table)
        assert found[0] == found[1]
    assert (watched.num_coming > 0) == is_ordered
