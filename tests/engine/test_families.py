"""Every family against transformers' own model with the dequantized weights, in float32.

Run as a script, it prints the table: family, largest difference of logits over their range with K and V in
float32 and float16, and greedy tokens that match (float16: those that follow the oracle's text).
"""

from __future__ import annotations

import functools
import json
import random
import re
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
from safetensors.torch import load_file, save_file
from tiny_models import LONGROPE, MODELS, VOCAB_SIZE, build
from torch import Tensor
from units import host_streamer, read_layer

from penstock.config import EngineConfig
from penstock.errors import UnsupportedModel
from penstock.generation.executor import Executor
from penstock.generation.generation_request import GenerationRequest, SamplingParams
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.scheduling.block_manager import BlockManager
from penstock.generation.sequence import Sequence
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV, choose_kernels
from penstock.kernels.reference import ReferenceKernels
from penstock.memory.kv_cache import KVCache
from penstock.memory.pools import MemoryPool
from penstock.model.encoder_decoder import EncoderDecoder
from penstock.model.families.cpmant import CPMAnt
from penstock.model.family import Family
from penstock.model.layers import ACTIVATION_FUNCTIONS, activation_function
from penstock.model.registry import FAMILIES, find_family, open_model
from penstock.spec import KV_LAYOUTS
from penstock.weights.layer_weights import LayerWeights, with_head
from penstock.weights.quantize import quantize
from penstock.weights.tiers.readers import StoreReader

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 40, 160
NUM_GREEDY = 64
#: Largest difference of logits over their range. 16-bit activations make 1e-4, float16 K and V up to 8e-4;
#: a forgotten norm, bias, window or rope makes 2e-3 to 5e-1.
TOLERANCE = {"float32": 5e-4, "float16": 2e-3}
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
        self.kv_cache = KVCache(self.spec, NUM_BLOCKS, BLOCK_SIZE, KV_LAYOUTS[config.kv_dtype], pool)
        family: Family = family_type(self.spec, kernels or choose_kernels(config, 2), MAX_LEN)
        streamer = host_streamer(tensors, StoreReader(self.store), range(self.spec.num_layers), 0)
        self.executor = Executor(family, embedding, head, streamer, self.kv_cache)
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        order = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.blocks.pool._free = OrderedDict.fromkeys(order)

    def sequences(self) -> list[Sequence]:
        return [Sequence(i, GenerationRequest(p, SamplingParams()), MAX_LEN) for i, p in enumerate(PROMPTS)]

    def batch(self, sequences: list[Sequence]) -> Batch:
        """All that is pending, in one ragged batch."""
        for sequence in sequences:
            assert self.blocks.grow(sequence)
        return Batch(tuple(ScheduledSequence.of(s, s.num_pending_tokens) for s in sequences))

    def all_logits(self, sequences: list[Sequence]) -> Tensor:
        """Logits of every token of the batch, not only of those that are sampled."""
        return self.executor.head(self.executor.sweep(ModelInputs.of(self.batch(sequences), BLOCK_SIZE)))

    def greedy(self, given: list[list[int]] | None = None) -> list[list[int]]:
        """The likeliest tokens, NUM_GREEDY for each prompt, all prompts in one batch. With `given` answers
        the text goes on with those, so that one swapped token has no consequences."""
        sequences, likeliest = self.sequences(), []
        for step in range(NUM_GREEDY):
            batch = self.batch(sequences)
            (logits,) = self.executor.forward(ModelInputs.of(batch, BLOCK_SIZE))
            likeliest.append(logits.argmax(-1).tolist())
            next_tokens = likeliest[-1] if given is None else [answer[step] for answer in given]
            for sequence, token in zip(sequences, next_tokens, strict=True):
                sequence.advance(sequence.num_pending_tokens)
                sequence.append(token)
        return [list(tokens) for tokens in zip(*likeliest, strict=True)]


def dequantized(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """transformers' model with each INT8 tensor replaced by what its integers stand for."""
    tensors = open_model(folder).store.tensors
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in (tensor for group in tensors.groups for tensor in group):
            for part in tensor.parts if tensor.is_matrix else ():
                # transformers 5 saves GPT-NeoX's head under its old name.
                weight = parameters["lm_head.weight" if part == "embed_out.weight" else part]
                rows = weight.t() if tensor.is_transposed else weight
                exact = quantize(rows).dequantize()
                weight.copy_(exact.t() if tensor.is_transposed else exact)
    return model


@torch.inference_mode()
def oracle_logits(model: transformers.PreTrainedModel) -> Tensor:
    """Each prompt alone, whole."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


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


def difference(built: Built, config: EngineConfig, kernels: Kernels | None = None) -> float:
    """Largest difference of logits over the range of the oracle's."""
    expected = oracle_logits(built.oracle)
    model = Model(built.folder, config, kernels)
    mine = model.all_logits(model.sequences())
    return float((mine - expected).abs().max() / (expected.max() - expected.min()))


#: Models, but for those that differ from another one in rope's frequencies or in the head alone: they show
#: kernels the same shapes and strides.
OTHER_SHAPES = [name for name in MODELS if ", rope" not in name and not name.endswith(", untied")]


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    yield Built.of(request.param, tmp_path_factory.mktemp("family"))


class NoAttention(ReferenceKernels):
    """Attention looks at numbers, of which the meta device has none; it refuses to be mixed with others."""

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        assert spec.alibi_slopes is None or spec.alibi_slopes.device == q.device
        return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@pytest.mark.parametrize("name", MODELS)
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
    kv = LayerKV(model.kv_cache.layout, tuple(part.to(device) for part in model.kv_cache.layers[0]))
    hidden = torch.empty(inputs.layout.num_tokens, model.spec.hidden_size, device=device)
    layout = inputs.layout.to(device)
    hidden = family.layer(0, moved(layer), hidden, kv, layout)
    logits = family.head(moved(head), hidden)
    assert logits.device == device and logits.shape == (layout.num_tokens, model.spec.vocab_size)
    with pytest.raises((RuntimeError, NotImplementedError)):
        family.layer(0, layer, hidden, kv, layout)


@pytest.mark.parametrize(("kernels", "kv_dtype"), [("native", "float16"), ("torch", "float32")])
def test_logits_equal_transformers(built: Built, kernels: str, kv_dtype: str) -> None:
    assert difference(built, EngineConfig(kernels=kernels, kv_dtype=kv_dtype)) <= TOLERANCE[kv_dtype]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to run the CUDA sources with")
@pytest.mark.parametrize("built", OTHER_SHAPES, indirect=True)
def test_logits_of_cuda_kernels_equal_transformers(built: Built) -> None:
    """They meet every family's shapes and strides, run on the CPU."""
    config = EngineConfig(kv_dtype="float16")
    assert difference(built, config, emulated_kernels(finds_races=False)) <= TOLERANCE["float16"]


def test_greedy_tokens_equal_transformers(built: Built) -> None:
    assert oracle_likeliest(built.oracle, built.answers) == built.answers


def test_greedy_tokens_with_half_kv_differ_only_in_near_ties(built: Built) -> None:
    lost = losses(built, Model(built.folder, EngineConfig(kv_dtype="float16")).greedy(built.answers))
    assert len(lost) <= MAX_NEAR_TIES
    assert max(lost, default=0.0) <= NEAR_TIE


def test_every_family_is_tested() -> None:
    classes = {
        f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM" for kind, _ in MODELS.values()
    }
    # test_encoder_decoder.py and test_cpmant.py have the others.
    decoders = [family for family in FAMILIES if not issubclass(family, EncoderDecoder | CPMAnt)]
    assert classes == {name for family in decoders for name in family.architectures}


@pytest.mark.parametrize(
    "name",
    ["Llama, tied, biases", "Gemma 2", "GPT-2", "OPT", "GPT-NeoX, tied, whole heads", "BLOOM", "Falcon"],
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
    "GPT-2": [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}],
    "OPT": [{"do_layer_norm_before": False}, {"word_embed_proj_dim": 32}],
    "BLOOM": [{"apply_residual_connection_post_layernorm": True}],
    "GPT-NeoX": [{"attention_bias": False}],
    "Gemma 2": [{"attention_bias": True}, {"use_bidirectional_attention": True}],
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
        {"new_decoder_architecture": True},
        {"multi_query": False},
        {"parallel_attn": False},
        {"num_ln_in_parallel_attn": 2},
        {"alibi": True},
    ],
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
    [("GPT2", "gelu_tanh"), ("GPTNeoX", "gelu"), ("Falcon", "gelu"), ("OPT", "relu"), ("Gemma2", "gelu_tanh")]
    + [("Llama", "silu"), ("Phi3", "silu")],
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
    num_swapped = len(losses(built, Model(folder, half).greedy(built.answers)))
    row = f"{name:30} {worst[0]:9.1e} {worst[1]:9.1e}"
    print(f"{row}   {num_equal} and {num_total - num_swapped} of {num_total} equal", flush=True)


if __name__ == "__main__":
    print(f"{'model':30} {'float32':>9} {'float16':>9}   greedy tokens")
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            print_row(name, Path(directory))
