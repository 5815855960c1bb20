"""Adapters against transformers' models with weights of W + scale * B A: logits of many families, the same
bits in any company, streamed or not, and with guesses; blocks, memory, and folders that are refused."""

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cpmant
import test_encoder_decoder
import torch
from adapter_folders import ALPHA, PREFIX, RANK, add_adapter, linear_modules, names, save_adapter
from drafters import Oracle
from safetensors.torch import load_file, save_file
from test_convert import Ids
from test_families import Built, Model, oracle_logits
from tiny_models import VOCAB_SIZE, build

from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.engine import Engine
from penstock.errors import CapacityError, CheckpointError, ConfigError, UnsupportedModel, WrongTensor
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.low_rank import LowRank, LowRankPart, PlainLowRank
from penstock.memory.hardware import DeviceProfile, HardwareProfile
from penstock.memory.planning.planner import plan_memory
from penstock.model.footprint import footprint
from penstock.model.registry import open_model
from penstock.weights.adapters.adapter import Adapter
from penstock.weights.adapters.loaded_adapters import LoadedAdapters
from penstock.weights.adapters.targets import Targets
from penstock.weights.conversion.convert import convert

TOLERANCE = 5e-4
#: Families whose products differ: matrices fused by us or in the checkpoint, transposed ones, rows of cores,
#: latents, shared experts, inputs of single layers, recurrences. What follows is left out: it is no module of
#: ours, or refused (test_modules_without_adapters).
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama, tied, biases": (),
    "GPT-2": (),
    "Phi-3": (),
    "CodeGen": (),
    "Falcon": (),
    "GPT-NeoX": (),
    "MiniCPM3": ("kv_b_proj",),
    "Qwen2-MoE": ("shared_expert_gate",),
    "Gemma 4": ("per_layer_model_projection",),
    "Qwen3-Next": ("in_proj_ba", "shared_expert_gate"),
}
SMALL = EngineConfig(max_model_len=96, max_num_batched_tokens=64, adapter_bytes=1 << 20)
PROMPT = [7, 9, 30, 51, 12, 88, 14, 15, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_changed_weights(name: str, tmp_path: Path) -> None:
    built = Built.of(name, tmp_path / "model")
    model = Model(built.folder, EngineConfig(kv_dtype="float32"))
    shapes = linear_modules(built.oracle, *FAMILIES[name])
    targets = Targets(model.store, model.executor.family.unadapted)
    adapter = LoadedAdapters(lambda: targets, 1 << 24).load("a", save_adapter(tmp_path / "a", shapes))
    sequences = model.sequences()
    for sequence in sequences:
        object.__setattr__(sequence.request, "adapter", adapter)
    mine, plain = model.all_logits(sequences), oracle_logits(built.oracle)
    add_adapter(built.oracle, tmp_path / "a")
    expected = oracle_logits(built.oracle)
    span = expected.max() - expected.min()
    assert (plain - expected).abs().max() / span > 20 * TOLERANCE, "the adapter changes nothing"
    assert (mine - expected).abs().max() / span <= TOLERANCE


@pytest.mark.parametrize(
    ("room", "name", "left_out"),
    [
        (test_encoder_decoder, "CPM-2", ("q", "o")),
        (test_encoder_decoder, "BART", ()),
        (test_cpmant, "CPM-Ant", ("w_out",)),
    ],
)
def test_models_that_read_a_prompt_whole(
    room: Any, name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """The encoder's own products, those of its keys and values for the decoder, and inputs of more rows than
    an mlp computes at a time."""
    oracle = room.build(name, tmp_path / "model")
    save_adapter(tmp_path / "a", linear_modules(oracle, *left_out), size=0.2)
    config = {"adapters": (("a", str(tmp_path / "a")),), "kv_dtype": "float32"}
    prompts = [*room.PROMPTS[:2], [8 + index % 50 for index in range(600 if name == "BART" else 40)]]
    with room.load(tmp_path / "model", **config, max_model_len=700, max_num_batched_tokens=700) as engine:
        adapter = engine.adapters.by_name["a"]
        engine.add = with_adapter(engine.add, adapter)
        mine = room.answer(engine, prompts)
    add_adapter(oracle, tmp_path / "a")
    for prompt, tokens, logits in zip(prompts, mine.tokens, mine.logits, strict=True):
        expected = room.oracle_logits(oracle, prompt, tokens)
        assert (logits - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())


def with_adapter(add: Any, adapter: Adapter) -> Any:
    def added(request: GenerationRequest) -> None:
        object.__setattr__(request, "adapter", adapter)
        add(request)

    return added


def answers(
    engine: Engine, asked: list[tuple[list[int], str | None]], params: SamplingParams = GREEDY
) -> list[tuple[list[int], Any]]:
    """Tokens and log-probabilities of prompts with adapters, all at once."""
    found: list[tuple[list[int], Any]] = [([], []) for _ in asked]
    for index, (prompt, name) in enumerate(asked):
        adapter = engine.adapters.by_name[name] if name else None
        engine.add(GenerationRequest(prompt, params, str(index), adapter=adapter))
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)][0].extend(output.token_ids)
            found[int(output.request_id)][1].extend(output.logprobs)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model "int8", and adapters "a" to "d" of different modules, ranks and dtypes."""
    folder = tmp_path_factory.mktemp("llama")
    modules = linear_modules(build("Llama", folder / "made"))
    convert(open_model(folder / "made").store, folder / "int8")
    save_adapter(folder / "a", modules, 1)
    save_adapter(folder / "b", names(modules, ["q_proj", "v_proj"]), 2, torch.bfloat16, r=16, size=1.0)
    save_adapter(folder / "c", names(modules, ["k_proj", "down_proj"]), 3, torch.float16, r=33, size=1.0)
    save_adapter(folder / "d", names(modules, ["up_proj"]), 4, r=1, use_rslora=True, size=2.0)
    return folder


def load(llama: Path, config: EngineConfig = SMALL, **parts: Any) -> Engine:
    """The engine of `llama` with all its adapters."""
    engine = Engine.load(llama / "int8", config, tokenizer=Ids(), **parts)
    for name in "abcd":
        engine.adapters.load(name, llama / name)
    return engine


@pytest.mark.parametrize("num_resident", [0, None])
def test_any_company_gives_the_same_bits(llama: Path, num_resident: int | None) -> None:
    """Adapters of all kinds beside none, in chunks, behind preemptions, streamed, and with guesses that are
    right and wrong."""
    dice = random.Random(str(num_resident))
    asked: list[tuple[list[int], str | None]] = []
    for index in range(14):
        prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((1, 5, 17, 40)))]
        asked.append((prompt, (None, "a", "b", "c", "d")[index % 5]))
    with load(llama) as engine:
        alone = [answers(engine, [each])[0] for each in asked]
    config = EngineConfig(
        max_model_len=96, max_num_batched_tokens=19, max_num_seqs=9, num_resident_layers=num_resident,
        num_kv_tokens=128, adapter_bytes=1 << 20, num_threads=2,
    )  # fmt: skip
    texts = {(None, *prompt): tokens for (prompt, _), (tokens, _) in zip(asked, alone, strict=True)}
    drafter = Oracle(texts, 4, 2, VOCAB_SIZE)
    with load(llama, config, drafter=drafter) as engine:
        together = answers(engine, asked)
        assert engine.metrics.num_preemptions, "nothing was preempted: the cache is too large to test it"
    assert together == alone
    assert drafter.num_proposed


@pytest.mark.parametrize("who", ["draft model", "planes"])
def test_guesses_beside_adapters(llama: Path, who: str) -> None:
    """A draft model knows nothing of adapters; upper planes are changed as the model is."""
    asked: list[tuple[list[int], str | None]] = [([5, 6, 7 + i], (None, "a", "b")[i % 3]) for i in range(6)]
    with load(llama) as engine:
        expected = answers(engine, asked)
    config, draft = SMALL, None
    if who == "planes":
        config = replace(SMALL, weights="planes", draft_with_planes=True)
    else:
        draft = DraftModel.load(llama / "int8", EngineConfig(), tokenizer=Ids())
    with load(llama, config) as engine:
        engine.scheduler._drafter = Speculation(lambda num_tokens: 1.0, draft or engine.draft_model)
        assert answers(engine, asked) == expected
        accepted = engine.metrics.accepted_tokens
        assert accepted > (20 if who == "planes" else 10)
    if draft is not None:
        draft.close()


def answers_differ(alone: list[tuple[list[int], Any]], asked: list[tuple[list[int], str | None]]) -> bool:
    """The adapters change something: one token follows another than without, at least."""
    return len({tuple(tokens) for tokens, _ in alone}) == len(asked)


def test_blocks_belong_to_an_adapter(llama: Path) -> None:
    with load(llama) as engine:
        alone = {name: answers(engine, [(PROMPT, name)])[0] for name in (None, "a", "b")}
        assert engine.metrics.prefix_cache_hits == 0
        for name in ("a", None, "b"):
            before = engine.metrics.prefix_cache_hits
            assert answers(engine, [(PROMPT, name)])[0] == alone[name]
            assert engine.metrics.prefix_cache_hits > before
        # The same numbers under another name.
        engine.adapters.load("again", llama / "a")
        before = engine.metrics.prefix_cache_hits
        assert answers(engine, [(PROMPT, "again")])[0] == alone["a"]
        assert engine.metrics.prefix_cache_hits > before
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 3


@pytest.mark.inner
def test_an_adapter_that_is_unloaded_answers_to_the_end(llama: Path) -> None:
    with Engine.load(llama / "int8", SMALL, tokenizer=Ids()) as engine:
        engine.adapters.load("a", llama / "a")
        (expected,) = answers(engine, [(PROMPT, "a")])
        used = engine.adapters.used_bytes
        assert 0 < used <= SMALL.adapter_bytes
        engine.add(GenerationRequest(PROMPT, GREEDY, adapter=engine.adapters.by_name["a"]))
        tokens = [token for output in engine.step() for token in output.token_ids]
        engine.adapters.unload("a")
        engine.adapters.load("a", llama / "b")
        gc.collect()
        assert engine.adapters.used_bytes > used
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.token_ids]
        assert tokens == expected[0]
        gc.collect()
        assert engine.adapters.used_bytes == engine.adapters.by_name["a"].num_bytes < used
        assert answers(engine, [(PROMPT, "a")]) != [expected]
        with pytest.raises(ConfigError, match="already"):
            engine.adapters.load("a", llama / "a")
        engine.adapters.load("a", llama / "a", replaces=True)
        assert answers(engine, [(PROMPT, "a")]) == [expected]
        with pytest.raises(ConfigError, match="no adapter 'b'"):
            engine.adapters.unload("b")


def test_the_plan_has_the_bytes(llama: Path) -> None:
    given = (("a", str(llama / "a")), ("b", str(llama / "b")))
    config = EngineConfig(max_model_len=96, adapters=given)
    with Engine.load(llama / "int8", config, tokenizer=Ids()) as engine:
        used = engine.adapters.used_bytes
        assert used == sum(each.num_bytes for each in engine.adapters.by_name.values())
        assert used <= engine.plan.adapter_bytes < 3 * used  # blocks of 16 ranks that q, k and v share
        with pytest.raises(CapacityError, match="--lora-memory"):
            engine.adapters.load("c", llama / "c")
        without = Engine.load(llama / "int8", EngineConfig(max_model_len=96), tokenizer=Ids())
        assert engine.plan.host_used_bytes - without.plan.host_used_bytes >= engine.plan.adapter_bytes
        without.close()


def test_a_card_is_refused(llama: Path) -> None:
    opened = open_model(llama / "int8")
    size = footprint(opened.spec, opened.store.tensors, opened.spec.kv_layout("float16"))
    card = DeviceProfile("a card", (8, 6), 1 << 33, 1 << 33, 100, 100, 10, 1 << 33)
    hardware = HardwareProfile(2, 1 << 34, 1 << 34, 1, 1, device=card)
    with pytest.raises(ConfigError, match="--device cpu"):
        plan_memory(size, hardware, EngineConfig(adapter_bytes=1))


def test_scales_and_choices_of_peft(llama: Path, tmp_path: Path) -> None:
    """rank_pattern, alpha_pattern, layers_to_transform and expressions: what an adapter of equal numbers
    with one scale gives."""
    modules = linear_modules(build("Llama", tmp_path / "made"))
    chosen = {name: size for name, size in modules.items() if ".1." in name and "_proj" in name}
    wide = {name: 9 for name in chosen if name.endswith("q_proj")}
    save_adapter(
        tmp_path / "a", chosen, 5, ranks=wide, target_modules=r".*\.(self_attn|mlp)\..*_proj",
        rank_pattern={"q_proj": 9}, alpha_pattern={r"layers.\d+.mlp.up_proj": 40}, layers_to_transform=[1],
    )  # fmt: skip
    # The same: all of rank 9, filled with zeros, and B multiplied by what the scale lacks.
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        is_a, rank = "lora_A" in name, 9 if "q_proj" in name else RANK
        shape = (9, tensor.shape[1]) if is_a else (tensor.shape[0], 9)
        filled = torch.zeros(shape)
        filled[: tensor.shape[0], : tensor.shape[1]] = tensor
        alpha = 40 if "up_proj" in name else ALPHA
        tensors[name] = filled if is_a else filled * (alpha / rank)
    save_adapter(tmp_path / "b", {}, r=9, lora_alpha=9)
    save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
    with Engine.load(llama / "int8", SMALL, tokenizer=Ids()) as engine:
        engine.adapters.load("a", tmp_path / "a")
        engine.adapters.load("b", tmp_path / "b")
        mine, other = answers(engine, [(PROMPT, "a"), (PROMPT, "b")])
        assert mine[0] == other[0] != answers(engine, [(PROMPT, None)])[0][0]
        for ours, theirs in zip(mine[1], other[1], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-3)  # B rounds to float16


def test_names_of_model_center_and_open_delta(tmp_path: Path) -> None:
    """project_q and project_v, as OpenDelta adapts the CPM line."""
    for room, name, layer, own, prompt in (
        (test_cpmant, "CPM-Ant", "encoder.layers.{}.self_att.self_attention.project_{}",
         "cpmant.encoder.layers.{}.self_att.self_attention.project_{}", [9, 10, 40]),
        (test_encoder_decoder, "CPM-2", "decoder.layers.{}.cross_att.cross_attention.project_{}",
         "decoder.block.{}.layer.1.EncDecAttention.{}", [9, 10, 40]),
    ):  # fmt: skip
        modules = linear_modules(room.build(name, tmp_path / name))
        pairs = [(layer.format(i, part), own.format(i, part)) for i in range(3) for part in "qv"]
        delta = {theirs: modules[ours] for theirs, ours in pairs}
        named = "{module}.lora.lora_{letter}"
        save_adapter(tmp_path / name / "delta", delta, name=named, target_modules=["project_q", "project_v"])
        save_adapter(tmp_path / name / "peft", {ours: modules[ours] for _, ours in pairs})
        with room.load(tmp_path / name, adapter_bytes=1 << 20) as engine:
            engine.adapters.load("delta", tmp_path / name / "delta")
            engine.adapters.load("peft", tmp_path / name / "peft")
            by_delta, by_peft, plain = answers(engine, [(prompt, "delta"), (prompt, "peft"), (prompt, None)])
        assert by_delta == by_peft != plain


def changed(folder: Path, target: Path, rename: tuple[str, str] = ("", ""), **config: Any) -> Path:
    """A copy of an adapter with other names or another config."""
    target.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name.replace(*rename) if rename[0] else name: each for name, each in tensors.items()},
        target / "adapter_model.safetensors",
    )
    values = json.loads((folder / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(values))
    return target


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True; DoRA"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"another_idea": 3}, "another_idea is 3; nothing is known"),
    ({"r": 257}, "a rank is 257; it must be 1 to 256"),
    ({"lora_alpha": "much"}, "an alpha is 'much'"),
    ({"target_modules": "("}, "makes no sense"),
    ({"target_modules": ["q_proj"]}, "gives this module none"),
    ({"layers_to_transform": [0, 1]}, "gives this module none"),
    ({"r": 6}, "says that its rank is 6"),
    ({"rename": ("layers.2.", "layers.9.")}, "belongs to another model"),
    ({"rename": ("model.layers.0.mlp.down_proj", "lm_head")}, "the head has no adapter here"),
    ({"rename": ("model.layers.0.mlp.down_proj", "model.embed_tokens")}, "embeddings have no adapters"),
    ({"rename": ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.x")}, "has no such module"),
    ({"rename": ("layers.0.mlp.down_proj.lora_A", "layers.9.mlp.down_proj.lora_A")}, "not the other matrix"),
    ({"rename": ("layers.0.mlp.down_proj.lora_A.weight", "x.lora_magnitude_vector")}, "no matrix of LoRA"),
    ({"rename": ("layers.0.mlp.down_proj", "layers.0.mlp.XX")}, "has no such module"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_computed_is_refused(llama: Path, tmp_path: Path, change: Any, words: str) -> None:
    folder = changed(llama / "a", tmp_path / "a", **change)
    store = open_model(llama / "int8").store
    with pytest.raises(CheckpointError, match=words.replace("(", r"\(")):
        LoadedAdapters(lambda: Targets(store), 1 << 20).load("a", folder)


def test_modules_without_adapters(tmp_path: Path) -> None:
    """Experts and what latents are made of are refused by name."""
    built = build("DeepSeek V2", tmp_path / "model")
    store = open_model(tmp_path / "model").store
    modules = linear_modules(built)
    latent = names(modules, ["kv_b_proj"])
    expert = {"model.layers.1.mlp.experts.0.up_proj": (40, 64)}
    for name, shapes, words in (("latent", latent, "no adapter here"), ("expert", expert, "experts have no")):
        folder = save_adapter(tmp_path / name, shapes)
        with pytest.raises(UnsupportedModel, match=words):
            LoadedAdapters(lambda: Targets(store, ("kv_b",)), 1 << 20).load(name, folder)


def test_folders_that_are_none(llama: Path, tmp_path: Path) -> None:
    adapters = LoadedAdapters(lambda: Targets(open_model(llama / "int8").store), 1 << 20)
    for folder, words in ((tmp_path / "none", "is not a folder"), (llama / "int8", "has no adapter_config")):
        with pytest.raises(CheckpointError, match=words):
            adapters.load("a", folder)
    folder = changed(llama / "a", tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="only as a pickle"):
        adapters.load("a", folder)
    (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")
    raw = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(raw[:-40])
    with pytest.raises(CheckpointError, match="truncated"):
        adapters.load("a", folder)
    shapes = {"model.layers.0.self_attn.q_proj": (64, 63)}
    with pytest.raises(WrongTensor, match="63 inputs and 64 outputs.* has 64 and 64"):
        adapters.load("a", save_adapter(tmp_path / "shapes", shapes))
    (folder / "adapter_model.safetensors").write_bytes(raw)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"][0] = 1e6
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(WrongTensor, match="float16 can't hold"):
        adapters.load("a", folder)
    assert not adapters.by_name and not adapters.used_bytes


@pytest.mark.parametrize("build_name", compiled_builds())
def test_kernels_equal_the_plain_sums(build_name: str) -> None:
    """Odd shapes, ranks up to 256, more rows than are computed at a time; and each row alone has the same
    bits."""
    numbers = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers)

    def share(rank: int, first_output: int, num_outputs: int) -> LowRank:
        whole = LowRankPart.of(drawn(num_outputs, rank).half(), 0, first_output)
        rest = LowRankPart.of(drawn(13, rank - rank // 2).half(), rank // 2, 150)
        return LowRank.of(drawn(rank, 83).half(), drawn(rank), (whole, rest))

    x, y = drawn(300, 83), drawn(300, 170)
    rows = torch.randperm(300, generator=numbers)
    shares = [(share(1, 3, 70), 0, 1), (share(17, 0, 64), 1, 8), (share(256, 9, 141), 8, 290)]
    native, plain, mine = NativeKernels(build=build_name).adapters, y.clone(), y.clone()
    PlainLowRank().add(x, plain, rows, shares)
    native.add(x, mine, rows, shares)
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=2e-2)
    assert torch.equal(mine[rows[290:]], y[rows[290:]]), "rows without an adapter"
    alone = y.clone()
    for each, first, end in shares:
        for place in range(first, end):
            row = int(rows[place])
            own = alone[row : row + 1].clone()
            native.add(x[row : row + 1], own, torch.tensor([0]), [(each, 0, 1)])
            alone[row] = own[0]
    assert torch.equal(alone, mine)
