"""Every family against transformers' own model with the dequantized weights, in float32.

Run as a script, it prints the table: family, largest difference of logits over their range with K and V in
float32 and float16, and greedy tokens that match (float16: those that follow the oracle's text).
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from emulated_cuda import COMPILER, emulated_kernels
from kernel_cases import RoundedKV
from safetensors.torch import load_file, save_file
from tiny_models import (
    DISTINCT,
    LM_HEAD_MODELS,
    LONGROPE,
    MIXTURES,
    MODELS,
    RECURRENT,
    VOCAB_SIZE,
    WHOLE,
    build,
    in_circles,
)
from torch import Tensor
from units import host_streamer, read_layer

from penstock.cache.kv_cache import KVCache
from penstock.config import EngineConfig
from penstock.cpm.ant import CPMAnt
from penstock.errors import ConfigError, UnsupportedModel
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.draft_blocks import DraftBlocks
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.executor import Executor
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV, choose_kernels, use_processor
from penstock.kernels.reference import ReferenceKernels
from penstock.memory.pools import MemoryPool
from penstock.model.encoder_decoder import EncoderDecoder
from penstock.model.family import Family
from penstock.model.known_families import ENCODERS, FAMILIES, family_at
from penstock.model.layers import ACTIVATION_FUNCTIONS, activation_function
from penstock.model.registry import find_family, open_model
from penstock.weights.layer_weights import LayerWeights, with_head
from penstock.weights.quantize import quantize
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import is_transposed
from penstock.weights.tiers.readers import StoreReader

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 40, 160
NUM_GREEDY, CHUNK = 24, 7
#: Largest difference of logits over their range. 16-bit activations make 1e-4, float16 K and V up to 8e-4;
#: a forgotten norm, bias, window or rope makes 2e-3 to 5e-1. INT8 K and V make up to 4e-2 with random
#: weights, and more where they change which experts are chosen.
TOLERANCE = {"float32": 5e-4, "float16": 2e-3, "int8": 6e-2}
#: Float16 K and V may swap the two best tokens where they are nearer to each other than this share of the
#: logits' range, and that on few of a model's steps.
NEAR_TIE, MAX_NEAR_TIES = 1e-3, 4
# Tiny products gain nothing from threads, and lose much where other work keeps a core busy.
torch.set_num_threads(1)
GENERATOR = random.Random(3)
PROMPTS = [[GENERATOR.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (1, 11, 30, 53)]


class Model:
    """One of our models, driven by hand: no scheduler, no sampler, blocks in shuffled order."""

    def __init__(self, folder: Path, config: EngineConfig, kernels: Kernels | None = None) -> None:
        family_type, self.spec, self.store = open_model(folder)
        embedding = self.store.read_resident(self.store.tensors.embedding)
        tensors = self.store.tensors
        head = with_head(tensors, self.store.read_resident(tensors.head), embedding)
        pool = MemoryPool("test", 1 << 30)
        layout, num_states = self.spec.kv_layout(config.kv_dtype), 2 * len(PROMPTS) if self.spec.states else 0
        self.kv_cache = KVCache(self.spec, NUM_BLOCKS, BLOCK_SIZE, layout, pool, num_states)
        use_processor(config, 2)
        family: Family = family_type(self.spec, kernels or choose_kernels(config), MAX_LEN)
        streamer = host_streamer(tensors, StoreReader(self.store), range(self.spec.num_layers), 0)
        self.executor = Executor(family, embedding, head, streamer, self.kv_cache)
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, states=StatePool(num_states, num_states))
        order = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.blocks.pool._free = OrderedDict.fromkeys(order)

    def sequences(self, prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
        return [Sequence(i, GenerationRequest(p, SamplingParams()), MAX_LEN) for i, p in enumerate(prompts)]

    def batch(self, sequences: list[Sequence], chunk: int = MAX_LEN) -> Batch:
        """All that is pending, or a chunk of it, in one ragged batch."""
        for sequence in sequences:
            assert self.blocks.grow(sequence)
        return Batch(tuple(ScheduledSequence.of(s, min(chunk, s.num_pending_tokens)) for s in sequences))

    def all_logits(self, sequences: list[Sequence], chunk: int = MAX_LEN) -> Tensor:
        """Logits of every token of the batch, not only of those that are sampled."""
        inputs = ModelInputs.of(self.batch(sequences, chunk), BLOCK_SIZE)
        return self.executor.head(self.executor.sweep(inputs))

    def logits_in_chunks(self, sequence: Sequence) -> Tensor:
        """The logits of every token of a sequence that is alone."""
        chunks = []
        while sequence.num_pending_tokens:
            chunks.append(self.all_logits([sequence], CHUNK))
            sequence.advance(len(chunks[-1]))
        return torch.cat(chunks)

    def greedy(self) -> list[list[int]]:
        """The likeliest tokens, NUM_GREEDY for each prompt, all prompts in one batch."""
        sequences, likeliest = self.sequences(), []
        for _ in range(NUM_GREEDY):
            (logits,) = self.executor.forward(ModelInputs.of(self.batch(sequences), BLOCK_SIZE))
            likeliest.append(logits.argmax(-1).tolist())
            for sequence, token in zip(sequences, likeliest[-1], strict=True):
                sequence.advance(sequence.num_pending_tokens)
                sequence.append(token)
        return [list(tokens) for tokens in zip(*likeliest, strict=True)]

    def likeliest(self, answers: list[list[int]]) -> list[list[int]]:
        """The likeliest token at each place of the answers, from one pass over prompts and answers. One
        swapped token has no consequences."""
        texts = [prompt + answer[:-1] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        tokens = self.all_logits(self.sequences(texts)).argmax(-1).split([len(text) for text in texts])
        return [found[-len(answer) :].tolist() for found, answer in zip(tokens, answers, strict=True)]


def dequantized(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """transformers' model with each INT8 tensor replaced by what its integers stand for."""
    store = open_model(folder).store
    tensors = store.tensors
    parameters = dict(model.named_parameters())
    # transformers renames the tensors of Nemotron-H.
    has_other_names = "backbone.embeddings.weight" in tensors.by_part
    if has_other_names or any(unit.key.expert is not None for unit in tensors.units):
        return dequantized_file(model, store)
    with torch.no_grad():
        for tensor in (tensor for group in tensors.groups for tensor in group):
            for part in tensor.parts if tensor.is_matrix else ():
                # transformers 5 saves GPT-NeoX's head under its old name.
                weight = parameters["lm_head.weight" if part == "embed_out.weight" else part]
                rows = weight.t() if tensor.is_transposed else weight
                exact = quantize(rows).dequantize()
                weight.copy_(exact.t() if tensor.is_transposed else exact)
    return model


def dequantized_file(model: transformers.PreTrainedModel, store: WeightStore) -> transformers.PreTrainedModel:
    """The same for a model whose experts transformers merges when it loads them: the file's numbers are
    replaced, and the file is loaded."""
    folder = store.checkpoint.folder
    twin = folder.with_name(f"{folder.name}-dequantized")
    shutil.copytree(folder, twin)
    matrices = {part: tensor for part, tensor in store.tensors.by_part.items() if tensor.is_matrix}
    entries = {part: store.source.entry(part) for part in matrices}
    with (twin / "model.safetensors").open("r+b") as file:
        for part, tensor in matrices.items():
            if entries[part].decode is None:
                rows = quantize(store.source.rows(tensor, part).float().contiguous()).dequantize()
                file.seek(entries[part].offset)
                is_turned = is_transposed(tensor, entries[part])
                file.write((rows.t() if is_turned else rows).contiguous().numpy().tobytes())
    if any(entry.decode is not None for entry in entries.values()):  # merged experts, with inputs first
        tensors = load_file(twin / "model.safetensors")
        for name, merged in tensors.items():
            if merged.dim() == 3:
                exact = [quantize(matrix.t().contiguous()).dequantize().t() for matrix in merged]
                tensors[name] = torch.stack(exact)
        save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval()


@torch.inference_mode()
def oracle_logits(model: transformers.PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> Tensor:
    """Each prompt alone, whole."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


@torch.inference_mode()
def oracle_likeliest(model: transformers.PreTrainedModel, answers: list[list[int]]) -> list[list[int]]:
    """The likeliest token at each place of the answers. Each prompt with its answer is computed alone and
    whole: no cache can be wrong. Answers that come back unchanged are the oracle's own greedy answers, since
    each token is the oracle's choice after the tokens before."""
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        found.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return found


@dataclass(frozen=True)
class Built:
    """A model as we load it and as transformers computes it."""

    folder: Path
    oracle: transformers.PreTrainedModel

    @classmethod
    def of(cls, name: str, folder: Path) -> Built:
        return cls(folder, dequantized(build(name, folder), folder))

    @functools.cached_property
    def answers(self) -> list[list[int]]:
        """Our greedy answers with K and V in float32."""
        return Model(self.folder, EngineConfig(kv_dtype="float32")).greedy()


@torch.inference_mode()
def losses(built: Built, mine: list[list[int]]) -> list[float]:
    """How much less likely than the token of `built.answers` ours is to the oracle, in logits over their
    range, at each step where they differ."""
    lost = []
    for prompt, answer, tokens in zip(PROMPTS, built.answers, mine, strict=True):
        logits = built.oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        span = logits.max() - logits.min()
        for row, theirs, ours in zip(logits, answer, tokens, strict=True):
            if theirs != ours:
                lost.append(float((row[theirs] - row[ours]) / span))
    return lost


def difference(
    built: Built, config: EngineConfig, kernels: Kernels | None = None, prompts: list[list[int]] = PROMPTS
) -> float:
    """Largest difference of logits over the range of the oracle's."""
    expected = oracle_logits(built.oracle, prompts)
    model = Model(built.folder, config, kernels)
    mine = model.all_logits(model.sequences(prompts))
    return float((mine - expected).abs().max() / (expected.max() - expected.min()))


#: Models that show kernels other shapes, attention or activations. No card computes recurrent states.
ON_CARDS = [name for name in WHOLE if name not in RECURRENT]
ON_CARDS += ["Llama, wide heads", "Apertus", "Cohere 2", "Falcon, ALiBi", "GPT-J", "Nemotron"]


@pytest.fixture(
    scope="module",
    params=in_circles(list(MODELS), DISTINCT),
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    yield Built.of(request.param, tmp_path_factory.mktemp("family"))


class NoAttention(ReferenceKernels):
    """Attention and recurrences look at numbers, of which the meta device has none; they refuse to be mixed
    with others."""

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        return x * weight[-1] + states[0, -1]

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        batch: BatchLayout,
    ) -> Tensor:
        return v * decay[..., None] + (q * k * states[0, 0, :, 0]).sum()

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        assert spec.alibi_slopes is None or spec.alibi_slopes.device == q.device
        return q.new_empty(q.shape[0], q.shape[1] * (spec.latent_dim or q.shape[2]))


# Mixtures look at numbers.
@pytest.mark.parametrize("name", in_circles([name for name in DISTINCT if name not in MIXTURES]))
def test_layer_and_head_stay_on_their_device(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    model, device = Model(tmp_path, EngineConfig()), torch.device("meta")
    family = find_family(model.store.checkpoint.config)(model.spec, NoAttention(), MAX_LEN, device)
    tensors = model.store.tensors
    embedding, head = (model.store.read_resident(group) for group in (tensors.embedding, tensors.head))
    head = with_head(tensors, head, embedding)

    def moved(weights: LayerWeights) -> LayerWeights:
        return weights.map(lambda tensor: tensor.to(device))

    inputs = ModelInputs.of(model.batch(model.sequences()), BLOCK_SIZE)
    layer = read_layer(model.store)
    parts, states = (
        tuple(part.to(device) for part in parts[0])
        for parts in (model.kv_cache.layers, model.kv_cache.states)
    )
    kv = LayerKV(model.kv_cache.layout, parts, states)
    hidden = torch.empty(inputs.layout.num_tokens, model.spec.row_size, device=device)
    layout = inputs.layout.to(device)
    hidden = family.layer(0, moved(layer), hidden, kv, layout)
    logits = family.head(moved(head), hidden)
    assert logits.device == device and logits.shape == (layout.num_tokens, model.spec.vocab_size)
    with pytest.raises((RuntimeError, NotImplementedError)):
        family.layer(0, layer, hidden, kv, layout)


def test_logits_equal_transformers(built: Built) -> None:
    assert difference(built, EngineConfig(kernels="native", kv_dtype="float16")) <= TOLERANCE["float16"]


@pytest.mark.parametrize("built", in_circles(DISTINCT), indirect=True)
def test_logits_of_torch_kernels_equal_transformers(built: Built) -> None:
    assert difference(built, EngineConfig(kernels="torch", kv_dtype="float32")) <= TOLERANCE["float32"]


def test_logits_are_the_same_in_company_and_in_chunks(built: Built) -> None:
    """Bit for bit. test_invariance.py goes through whole engines with DISTINCT models."""
    model = Model(built.folder, EngineConfig())
    together = model.all_logits(model.sequences())
    alone = [model.logits_in_chunks(sequence) for sequence in model.sequences()]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("built", in_circles(DISTINCT), indirect=True)
def test_int8_keys_and_values(built: Built) -> None:
    """The bits are the same in company and in chunks. The logits are near to those of float32 K and V that
    were rounded as INT8, and less near to transformers'. Latents are refused."""
    config = EngineConfig(kv_dtype="int8")
    if open_model(built.folder)[1].latent_dim:
        with pytest.raises(ConfigError, match=r"latent is not stored as int8; choose --kv-dtype float16 or"):
            Model(built.folder, config)
        return
    model = Model(built.folder, config)
    together = model.all_logits(model.sequences())
    alone = [model.logits_in_chunks(sequence) for sequence in model.sequences()]
    assert torch.equal(torch.cat(alone), together)
    twin = Model(built.folder, EngineConfig(kv_dtype="float32"), RoundedKV())
    spread = together.max() - together.min()
    assert (twin.all_logits(twin.sequences()) - together).abs().max() <= TOLERANCE["float16"] * spread
    if not model.spec.num_experts_per_token:
        assert difference(built, config) <= TOLERANCE["int8"]


@pytest.mark.parametrize("built", in_circles(list(MODELS)), indirect=True)
def test_guesses_beside_guesses_compute_what_a_text_does(built: Built) -> None:
    """Bit for bit, behind a prompt whose end is in the same step: each family writes what leads to a branch
    into the branch's blocks."""
    model = Model(built.folder, EngineConfig())
    if model.spec.states:
        pytest.skip("states have no branches")
    prompt = [*PROMPTS[0], *range(3, 3 + BLOCK_SIZE)][: BLOCK_SIZE + 7]
    (sequence,) = model.sequences([prompt])
    model.all_logits([sequence], len(prompt) - 2)
    sequence.advance(len(prompt) - 2)
    drafts = DraftTree((3, 4, 5, 6, 7), (-1, 0, 1, 0, -1))
    item = DraftBlocks(model.blocks).place(model.batch([sequence]).scheduled[0], drafts)
    assert len(item.branches) == 2
    inputs = ModelInputs.of(Batch((item,), model.blocks.take_copies()), BLOCK_SIZE)
    rows = model.executor.head(model.executor.sweep(inputs))[2:]
    for node in range(drafts.num_nodes):
        text = [*prompt, *(drafts.token_ids[each] for each in drafts.path(node))]
        assert torch.equal(rows[node], model.all_logits(model.sequences([text]))[-1]), node


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to run the CUDA sources with")
@pytest.mark.parametrize("built", ON_CARDS, indirect=True)
def test_logits_of_cuda_kernels_equal_transformers(built: Built) -> None:
    """They meet every family's shapes and strides, run on the CPU."""
    config = EngineConfig(kv_dtype="float16")
    kernels = emulated_kernels(finds_races=False)
    assert difference(built, config, kernels, PROMPTS[:3]) <= TOLERANCE["float16"]


@pytest.mark.parametrize("built", in_circles(list(MODELS)), indirect=True)
def test_greedy_tokens_equal_transformers(built: Built) -> None:
    assert oracle_likeliest(built.oracle, built.answers) == built.answers


@pytest.mark.parametrize("built", in_circles(list(MODELS)), indirect=True)
def test_greedy_tokens_with_half_kv_differ_only_in_near_ties(built: Built) -> None:
    lost = losses(built, Model(built.folder, EngineConfig(kv_dtype="float16")).likeliest(built.answers))
    assert len(lost) <= MAX_NEAR_TIES
    assert max(lost, default=0.0) <= NEAR_TIE


def test_a_family_is_known_by_all_its_names() -> None:
    for name, place in (FAMILIES | ENCODERS).items():
        assert name in family_at(place).architectures
    named = {
        name for place in {*FAMILIES.values(), *ENCODERS.values()} for name in family_at(place).architectures
    }
    assert named == FAMILIES.keys() | ENCODERS.keys()


def test_every_family_is_tested() -> None:
    classes = {
        f"{kind}LMHeadModel" if kind in LM_HEAD_MODELS else f"{kind.removesuffix('Text')}ForCausalLM"
        for kind, _ in MODELS.values()
    }
    # test_encoder_decoder.py and test_cpmant.py have the others.
    families = set(map(family_at, FAMILIES.values()))
    decoders = [family for family in families if not issubclass(family, EncoderDecoder | CPMAnt)]
    # transformers makes a Llama of InternLM3, which test_config_spellings.py has, and has Muse-Glimmer as a
    # multimodal model alone (test_text_part.py).
    elsewhere = {"InternLM3ForCausalLM", "MuseGlimmerForCausalLM"}
    assert classes == {family.architectures[0] for family in decoders} - elsewhere


@pytest.mark.parametrize(
    "name",
    ["Llama, tied, biases", "Gemma 2", "GPT-2", "OPT", "GPT-NeoX, tied, whole heads", "BLOOM", "Falcon"]
    + ["BioGPT", "StarCoder2"],
)
def test_the_bare_model_without_its_prefix_loads(name: str, tmp_path: Path) -> None:
    """Checkpoints of GPT2Model, saved without a head, name their tensors without "transformer."."""
    model = build(name, tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    bare, whole = (Model(tmp_path / folder, EngineConfig()) for folder in ("bare", "whole"))
    assert bare.store.checkpoint.entries.keys().isdisjoint(whole.store.checkpoint.entries)
    assert torch.equal(bare.all_logits(bare.sequences()), whole.all_logits(whole.sequences()))


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("GPT-2", ["transformer.h.0.attn.bias", "transformer.h.2.attn.masked_bias", "lm_head.weight"]),
        ("BLOOM", ["lm_head.weight"]),
        ("GPT-J", ["transformer.h.0.attn.bias", "transformer.h.2.attn.masked_bias"]),
        ("GPT-Neo", ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"]),
        ("XGLM", ["model.embed_positions.weights"]),
        (
            "GPT-NeoX",
            ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"]
            + ["gpt_neox.layers.1.attention.rotary_emb.inv_freq"],
        ),
    ],
)
def test_buffers_of_old_checkpoints_are_ignored(name: str, buffers: list[str], tmp_path: Path) -> None:
    """Causal masks, inverse frequencies and copies of tied matrices follow from the rest."""
    copied = build(name, tmp_path).get_input_embeddings().weight
    tensors = load_file(tmp_path / "model.safetensors")
    expected = Model(tmp_path, EngineConfig())
    assert not set(buffers) & set(tensors)
    idle = {name: copied.clone() if "head" in name else torch.ones(1, 1) for name in buffers}
    save_file(tensors | idle, tmp_path / "model.safetensors")
    model = Model(tmp_path, EngineConfig())
    assert torch.equal(model.all_logits(model.sequences()), expected.all_logits(expected.sequences()))


REFUSED = {
    "Llama": [{"pretraining_tp": 2}, {"hidden_act": "laurel"}],
    "GPT-2": [{"add_cross_attention": True}],
    "GPT-BigCode": [{"add_cross_attention": True}],
    "CodeGen": [{"n_head": 2}],
    "MPT, clip": [
        {"expansion_ratio": 2},
        {"no_bias": False},
        {"logit_scale": "inv_sqrt_d_model"},
        {"norm_type": "rmsnorm"},
    ],
    "XGLM": [{"pad_token_id": 5}, {"add_cross_attention": True}],
    "GPT-NeoX": [{"attention_bias": False}],
    "Gemma 2": [{"use_bidirectional_attention": True}],
    "MiniCPM": [
        {"num_experts": 8},
        {"q_lora_rank": 768},
        {"kv_lora_rank": 256},
        {"mixer_types": ["minicpm4", "lightning-attn"]},
        {"kv_channels": 128},
        {"qk_norm": True},
        {"hidden_act": "fatrelu", "hidden_act_param": 0.01},
        {"hidden_act_param": 0.01, "hidden_act": "relu"},
        {"use_mup": False},
    ],
    "Falcon": [
        {"num_ln_in_parallel_attn": 2},
        {"apply_residual_connection_post_layernorm": True},
    ],
    "Falcon, ALiBi": [{"multi_query": True}],
    "Falcon, groups": [{"num_ln_in_parallel_attn": 3}, {"parallel_attn": False}],
}


@pytest.mark.parametrize("name", REFUSED)
def test_variants_that_we_do_not_compute_are_refused(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    family = find_family(config)
    family.read_spec(config)
    for change in REFUSED[name]:
        with pytest.raises(UnsupportedModel, match=re.escape(str(next(iter(change.values()))))):
            family.read_spec(config | change)


@pytest.mark.parametrize(
    "change",
    [{"alibi": False}, {"attn_type": "multiquery_attention"}, {"qk_ln": True}, {"prefix_lm": True}],
)
def test_variants_of_mpt_that_we_do_not_compute_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    build("MPT, clip", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ((name, value),) = change.items()
    with pytest.raises(UnsupportedModel, match=f"{name} = {value!r}"):
        find_family(config).read_spec(config | {"attn_config": config["attn_config"] | change})


@pytest.mark.parametrize("name", ["GPT-NeoX", "Phi", "StableLM, biases", "Nemotron", "Persimmon"])
def test_old_and_new_spellings_of_partial_rope_mean_the_same(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    family, rope = find_family(config), config.pop("rope_parameters")
    share = "rotary_pct" if name == "GPT-NeoX" else "partial_rotary_factor"
    old = config | {share: rope["partial_rotary_factor"], "rope_theta": rope["rope_theta"]}
    expected = family.read_spec(config | {"rope_parameters": rope}).rope
    found = family.read_spec(old).rope
    assert found is not None and expected is not None
    assert (found.theta, found.rotary_dim) == (expected.theta, expected.rotary_dim)
    silent = family.read_spec(config).rope
    default = {"GPT-NeoX": 0.25, "StableLM, biases": 0.25}.get(name, 0.5)
    assert silent is not None and silent.rotary_dim == default * family.read_spec(config).head_dim


#: What openbmb's folders say: MiniCPM-2B, and MiniCPM4-8B with the sparse attention that its page describes.
PUBLISHED_MINICPM = {
    "2B": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 96},
    "4": {
        "rope_scaling": {
            "rope_type": "longrope", "original_max_position_embeddings": 192,
            "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"],
        },
        "sparse_config": {"kernel_size": 32, "topk": 64, "dense_len": 8192}, "mup_denominator": 32,
        "eos_token_id": [2, 3], "hidden_act_param": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_MINICPM)
def test_published_configs_of_minicpm(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old-style rope, remote code that nobody runs, no word of the tied head, and what changes nothing."""
    remote = {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModel": "modeling_minicpm.MiniCPMModel",
    }
    published = PUBLISHED_MINICPM[name] | {"rope_theta": 10000.0, "auto_map": remote}
    oracle = build("MiniCPM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | published
    for added in ("rope_parameters", "tie_word_embeddings", "head_dim", "attention_bias", "mlp_bias"):
        del config[added]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        model = Model(tmp_path, EngineConfig(kv_dtype="float32"))
    assert ("dense attention" in caplog.text) == ("sparse_config" in config)
    expected = oracle_logits(dequantized(with_rope(oracle, config), tmp_path))
    worst = float((model.all_logits(model.sequences()) - expected).abs().max())
    assert worst <= TOLERANCE["float32"] * float(expected.max() - expected.min())


def with_rope(oracle: transformers.PreTrainedModel, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """The same weights with another rope."""
    names = ("rope_scaling", "rope_theta", "max_position_embeddings", "vocab_size")
    values = oracle.config.to_dict() | {name: config[name] for name in names}
    del values["rope_parameters"]
    twin = type(oracle)(type(oracle.config)(**values, attn_implementation="eager")).float().eval()
    twin.load_state_dict(oracle.state_dict())
    return twin


@pytest.mark.parametrize("missing", ["scale_emb", "scale_depth", "dim_model_base"])
def test_a_config_without_a_constant_of_minicpm_is_refused(missing: str, tmp_path: Path) -> None:
    build("MiniCPM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[missing]
    with pytest.raises(UnsupportedModel, match=missing):
        find_family(config).read_spec(config)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_activations_equal_transformers(name: str) -> None:
    """Logits hardly show which of the two gelus it is."""
    x = torch.linspace(-12, 12, 4801)
    try:
        expected = transformers.activations.ACT2FN[name](x)
    except KeyError:
        pytest.skip(f"this version of transformers has no {name}")
    mine = ReferenceKernels().activation(x, activation_function(name))
    torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GPT2", "gelu_tanh"),
        ("GPTNeoX", "gelu"),
        ("Falcon", "gelu"),
        ("OPT", "relu"),
        ("Gemma", "gelu_tanh"),
        ("Gemma2", "gelu_tanh"),
    ]
    + [("Llama", "silu"), ("Phi3", "silu"), ("GPTBigCode", "gelu_tanh"), ("GPTJ", "gelu_tanh")]
    + [("GPTNeo", "gelu_tanh"), ("CodeGen", "gelu_tanh"), ("Phi", "gelu_tanh"), ("Starcoder2", "gelu_tanh")]
    + [("Nemotron", "relu2"), ("Jais2", "relu2"), ("Persimmon", "relu2"), ("StableLm", "silu")]
    + [("XGLM", "gelu"), ("BioGpt", "gelu")],
)
def test_activations_of_families(kind: str, expected: str) -> None:
    """As transformers has them where config.json says nothing, and as it says."""
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{kind}Config")().to_dict() | {"architectures": [kind + suffix]}
    family = find_family(config)
    names = [name for name in config if "act" in name and config[name] in ACTIVATION_FUNCTIONS]
    silent = {name: value for name, value in config.items() if name not in names}
    assert family.read_spec(config).activation == expected  # type: ignore[attr-defined]
    assert family.read_spec(silent).activation == expected  # type: ignore[attr-defined]
    changed = config | dict.fromkeys(names, "relu")
    assert family.read_spec(changed).activation == "relu"  # type: ignore[attr-defined]


def test_layer_weights_know_what_they_lack() -> None:
    assert LayerWeights({}).optional("bias") is None


def print_row(name: str, folder: Path) -> None:
    built = Built.of(name, folder)
    single, half = (EngineConfig(kv_dtype=dtype) for dtype in ("float32", "float16"))
    worst = [difference(built, config) for config in (single, half)]
    pairs = zip(built.answers, oracle_likeliest(built.oracle, built.answers), strict=True)
    num_equal = sum(a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    num_total = NUM_GREEDY * len(PROMPTS)
    num_swapped = len(losses(built, Model(folder, half).likeliest(built.answers)))
    row = f"{name:30} {worst[0]:9.1e} {worst[1]:9.1e}"
    print(f"{row}   {num_equal} and {num_total - num_swapped} of {num_total} equal", flush=True)


if __name__ == "__main__":
    NUM_GREEDY = 64
    print(f"{'model':30} {'float32':>9} {'float16':>9}   greedy tokens")
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            print_row(name, Path(directory))
