"""Rope tables against those of transformers' own models, for each scaling, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout
from penstock.model.families.dense.phi3 import Phi3
from penstock.model.families.llama import Llama
from penstock.model.rope import RopeTable, read_rope
from penstock.spec import RopeSpec

HEAD_DIM, MAX_LEN = 16, 100
SIZES: dict[str, Any] = {
    "hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 192, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    YARN | {"truncate": False, "attention_factor": None},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    YARN | {"mscale": 0.7},
]
SHORT, LONG = ([start + 0.3 * i for i in range(HEAD_DIM // 2)] for start in (1.0, 2.0))
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}


def oracle(
    embedding: torch.nn.Module, positions: range = range(MAX_LEN)
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at positions. transformers repeats each for the head's second half."""
    cos, sin = embedding(torch.zeros(1), torch.tensor(positions)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def tables(
    rope: RopeSpec, num_prompt: int = MAX_LEN, positions: range = range(MAX_LEN), max_len: int = MAX_LEN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, of tokens of a sequence that ends with the last of these positions."""
    length, nothing = rope.frequency_length(num_prompt, positions.stop), torch.zeros(0)
    lengths = torch.full((len(positions),), length) if length else None
    layout = BatchLayout(torch.tensor(positions), nothing, nothing, nothing, nothing, lengths)
    return RopeTable(rope, max_len).at(layout)


def assert_equal(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """transformers multiplies position and frequency in float32: that is 6e-6 off at position 100."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_tables_equal_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=scaling | {"rope_theta": theta})
    rope = read_rope(config.to_dict(), HEAD_DIM)
    assert rope.theta == theta
    assert_equal(tables(rope), oracle(LlamaRotaryEmbedding(config)))


@pytest.mark.parametrize("max_len", [MAX_LEN, 2 * MAX_LEN, 500])
@pytest.mark.parametrize("original", [MAX_LEN, MAX_LEN - 1])
@pytest.mark.parametrize("more", [{}, {"factor": 6.0}, {"attention_factor": 1.7}])
def test_longrope_equals_transformers(original: int, max_len: int, more: dict[str, float]) -> None:
    """The short list serves up to the original length, the long one from there on, whatever the engine has
    room for."""
    parameters = LONGROPE | more
    config = Phi3Config(**SIZES, rope_parameters=parameters, original_max_position_embeddings=original)
    rope = Phi3.read_spec(config.to_dict()).rope
    assert rope is not None and rope.rotary_dim == HEAD_DIM
    assert_equal(tables(rope, max_len=max_len), oracle(Phi3RotaryEmbedding(config)))


def test_dynamic_ntk_equals_transformers_beyond_the_trained_length() -> None:
    """A prompt has the frequencies of its length, then each token those of the length that it brings."""
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4})
    rope = read_rope(config.to_dict(), HEAD_DIM)
    for num_prompt in (150, 192, 193, 300):
        embedding = LlamaRotaryEmbedding(config)
        prompt = range(num_prompt)
        assert_equal(tables(rope, num_prompt, prompt), oracle(embedding, prompt))
        for position in range(num_prompt, num_prompt + 60):
            token = range(position, position + 1)
            assert_equal(tables(rope, num_prompt, token), oracle(embedding, token))


def test_dynamic_ntk_gives_a_token_the_same_bits_in_any_chunk() -> None:
    rope = RopeSpec(1e4, 96, "dynamic", {"factor": 3.0}, short_length=192)
    whole = tables(rope, 300, range(400))
    for start, stop in ((0, 1), (5, 12), (191, 193), (250, 333), (399, 400)):
        for part, all_of_it in zip(tables(rope, 300, range(start, stop)), whole, strict=True):
            assert torch.equal(part, all_of_it[start:stop])


@pytest.mark.parametrize("max_len", [40, 50, 51, 300])
@pytest.mark.parametrize("scaling", ["default", "longrope", "dynamic"])
def test_tables_take_the_bytes_that_are_planned(scaling: str, max_len: int) -> None:
    parameters = LONGROPE | {"max_position_embeddings": 300, "original_max_position_embeddings": 50}
    border = {"default": 0, "longrope": 50, "dynamic": 50}[scaling]
    rope = RopeSpec(1e4, HEAD_DIM, scaling, parameters, border)
    table = RopeTable(rope, max_len)
    assert rope.table_bytes(max_len) == table._cos.nbytes + table._sin.nbytes


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 3.0}, 192),
        ({"rope_type": "dynamic", "factor": 3.0}, 576),
        (YARN, 192),  # 4 times 48: it has been written into max_position_embeddings
        (YARN | {"original_max_position_embeddings": 192}, 768),  # it has not
        (LLAMA3, 192),
    ],
)
def test_how_long_a_stretched_model_can_be_served(scaling: dict[str, Any], longest: int) -> None:
    """transformers sets no limit; these are vLLM's, but for linear, whose configs mean one or the other."""
    config = LlamaConfig(**SIZES, rope_parameters=scaling | {"rope_theta": 1e4})
    assert Llama.read_spec(config.to_dict()).max_position_embeddings == longest


def test_old_configs_mean_the_same() -> None:
    """rope_theta and rope_scaling beside each other, scalings named by "type"; "su" is longrope."""
    new = read_rope({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "max_position_embeddings": 192}, 16)
    old = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    assert new == read_rope(
        {"rope_theta": 5e5, "rope_scaling": old | {"type": "llama3"}, "max_position_embeddings": 192}, 16
    )
    assert read_rope({"rope_theta": 5e5, "rope_scaling": None}, 16).scaling == "default"
    assert read_rope({"rotary_emb_base": 300}, 16).theta == 300.0
    su = {"rope_scaling": {"type": "su", **LONGROPE} | {"rope_type": None}, "max_position_embeddings": 192}
    assert read_rope(su, 16).scaling == "longrope"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported. Supported are: default, linear"),
        ({"rope_type": "linear"}, "'linear' lacks its parameter factor"),
        ({"rope_type": "dynamic"}, "'dynamic' lacks its parameter factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks its parameter low_freq_factor"),
    ],
)
def test_what_is_not_computed_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        tables(read_rope({"rope_parameters": scaling, "max_position_embeddings": 64}, 16))


def test_phi3_refuses_scalings_of_others() -> None:
    """transformers reads Phi-3's "yarn" as longrope: computing YaRN would be another model."""
    config = Phi3Config(**SIZES).to_dict() | {"rope_parameters": YARN}
    with pytest.raises(UnsupportedModel, match="'yarn'; for phi3 .* only 'default' or 'longrope'"):
        Phi3.read_spec(config)
