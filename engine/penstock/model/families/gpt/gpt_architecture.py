"""GPTSpec: the values in which the families that resemble GPT differ. GPTArchitecture: what their checkpoints
hold. Families differ in the names of modules (Names) and in the words of config.json (Keys)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from penstock.kernels import ActivationFunction
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.family import Family
from penstock.model.layers import PLAIN, AttentionForm, activation_function
from penstock.model.norms import Norm
from penstock.model.rope import context_length, read_rope, rotary_dim
from penstock.spec import ModelSpec, RopeSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import TensorSpec

LAYER_NORM = Norm(is_centred=True, has_bias=True)


@dataclass(frozen=True)
class GPTSpec(ModelSpec):
    """The families that resemble GPT differ in these values. The defaults are GPT-2's."""

    activation: ActivationFunction = "gelu_tanh"
    norm: Norm = LAYER_NORM
    attention: AttentionForm = PLAIN
    has_qkv_bias: bool = True
    has_o_bias: bool = True
    has_mlp_bias: bool = True
    has_head_bias: bool = False
    #: The mlp is down(f(gate x) * up x), otherwise down(f(up x)).
    has_gate: bool = False
    #: Attention and mlp both read the layer's input, and their results are added at once.
    is_parallel: bool = False
    #: The mlp has a norm of its own. Only a parallel layer may have one norm for both.
    has_mlp_norm: bool = True
    #: Norms lie after the sums, and not before attention and mlp.
    is_post_norm: bool = False
    #: The residual stream goes through the norms: a sum adds to the normed hidden state.
    has_normed_residual: bool = False
    has_final_norm: bool = True
    #: Of the embedding; 1 changes nothing.
    embedding_factor: float = 1.0
    #: Of scores; None is head_dim^-0.5.
    attention_scale: float | None = None

    @property
    def projected_head_dim(self) -> int:
        """Dimensions of a head in the rows of "qkv"."""
        return self.head_dim


class Names(NamedTuple):
    """Modules of a checkpoint. Those of a layer follow the layer's prefix."""

    embedding: str = "transformer.wte"
    positions: str = "transformer.wpe"
    layers: str = "transformer.h"
    input_norm: str = "ln_1"
    #: The parts of "qkv", in the order of AttentionForm.
    qkv: tuple[str, ...] = ("attn.c_attn",)
    q_norm: str = ""
    k_norm: str = ""
    o: str = "attn.c_proj"
    mlp_norm: str = "ln_2"
    #: One module, or gate and up.
    up: tuple[str, ...] = ("mlp.c_fc",)
    down: str = "mlp.c_proj"
    final_norm: str = "transformer.ln_f"
    head: str = "lm_head"


class Keys(NamedTuple):
    """What config.json calls a family's numbers. Older words follow newer ones."""

    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    #: Without a value, the mlp is four times as wide as the hidden state.
    ffn: str = "intermediate_size"
    positions: str = "max_position_embeddings"
    eps: str = "layer_norm_eps"
    activation: str = "hidden_act"


#: The words of GPT-2 and its nearest relatives.
GPT2_KEYS = Keys(
    ("n_embd",),
    ("n_head",),
    ("n_layer",),
    "n_inner",
    "n_positions",
    "layer_norm_epsilon",
    "activation_function",
)
#: Separate modules of q, k and v in "self_attn".
SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
#: The names that checkpoints have since Llama.
MODEL_NAMES = Names(
    embedding="model.embed_tokens",
    layers="model.layers",
    input_norm="input_layernorm",
    qkv=SELF_ATTENTION,
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.up_proj",),
    down="mlp.down_proj",
    final_norm="model.norm",
)


def partial_rope(config: dict[str, Any], share: float) -> RopeSpec:
    """Rope on part of each head: on a `share` of it where config.json says nothing."""
    head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
    return read_rope(config, rotary_dim(config, count(config, "head_dim", default=head_dim), share))


class GPTArchitecture(Family):
    """The tensors of a layer follow from GPTSpec, Names and Keys."""

    optional_prefix = "transformer."
    names: ClassVar[Names] = Names()
    keys: ClassVar[Keys] = GPT2_KEYS
    #: What transformers takes where config.json says nothing.
    default_activation: ClassVar[str] = "gelu_new"
    is_tied_by_default: ClassVar[bool] = True
    #: The row of the first position in the table of learned positions; None: there is no table.
    position_offset: ClassVar[int | None] = None
    #: Matrices lie in files as [in_features, out_features].
    is_transposed: ClassVar[bool] = False
    spec: GPTSpec

    @classmethod
    def _spec(cls, config: dict[str, Any], **differences: Any) -> GPTSpec:
        """The numbers that all families have, and a family's `differences`."""
        keys, rope = cls.keys, differences.get("rope")
        hidden_size, num_heads = count(config, *keys.hidden), count(config, *keys.heads)
        positions = count(config, keys.positions)
        numbers: dict[str, Any] = {
            "architecture": cls.architectures[0],
            "hidden_size": hidden_size,
            "num_layers": num_layers_of(config, *keys.layers),
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_dim": hidden_size // num_heads,
            "intermediate_size": count(config, keys.ffn, default=4 * hidden_size),
            "vocab_size": count(config, "vocab_size"),
            "max_position_embeddings": context_length(rope, positions) if rope else positions,
            "norm_eps": number(config, keys.eps, 1e-5),
            "is_tied": flag(config, "tie_word_embeddings", cls.is_tied_by_default),
            "activation": activation_function(config.get(keys.activation, cls.default_activation)),
        }
        return GPTSpec(**(numbers | differences))

    @classmethod
    def names_of(cls, spec: GPTSpec) -> Names:
        """The names of a variant."""
        return cls.names

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, GPTSpec)
        names, hidden = cls.names_of(spec), spec.hidden_size
        words = TensorSpec("embedding", (spec.vocab_size, hidden), (f"{names.embedding}.weight",), INT8)
        if cls.position_offset is None:
            return (words,)
        shape = (spec.max_position_embeddings + cls.position_offset, hidden)
        return words, TensorSpec("positions", shape, (f"{names.positions}.weight",))

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, GPTSpec)
        names = cls.names_of(spec)
        prefix, hidden, ffn = f"{names.layers}.{index}.", spec.hidden_size, spec.intermediate_size

        def norm(name: str, part: str) -> tuple[TensorSpec, ...]:
            return spec.norm.tensors(name, (hidden,), prefix + part)

        up = ("gate_up", 2 * ffn) if spec.has_gate else ("up", ffn)
        return (
            *norm("input_norm", names.input_norm),
            *cls.attention_tensors(spec, prefix),
            *(norm("mlp_norm", names.mlp_norm) if spec.has_mlp_norm else ()),
            *cls.linear(*up, hidden, prefix, names.up, spec.has_mlp_bias),
            *cls.linear("down", hidden, ffn, prefix, (names.down,), spec.has_mlp_bias),
        )

    @classmethod
    def attention_tensors(cls, spec: GPTSpec, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of attend(), whose names begin with `prefix`."""
        names, hidden = cls.names_of(spec), spec.hidden_size
        q_rows, kv_rows = (heads * spec.projected_head_dim for heads in (spec.num_heads, spec.num_kv_heads))
        return (
            *cls.linear("qkv", q_rows + 2 * kv_rows, hidden, prefix, names.qkv, spec.has_qkv_bias),
            *cls.head_norm_tensors(spec, prefix),
            *cls.linear("o", hidden, q_rows, prefix, (names.o,), spec.has_o_bias),
        )

    @classmethod
    def head_norm_tensors(cls, spec: GPTSpec, prefix: str) -> tuple[TensorSpec, ...]:
        """The norms of q and k."""
        names, norms = cls.names_of(spec), spec.attention.norms
        return norms.tensors(spec, prefix + names.q_norm, prefix + names.k_norm) if norms else ()

    @classmethod
    def linear(
        cls, name: str, rows: int, columns: int, prefix: str, parts: tuple[str, ...], has_bias: bool
    ) -> tuple[TensorSpec, ...]:
        """A matrix of a layer, and its bias."""
        modules = tuple(prefix + part for part in parts)
        return linear_tensors(name, (rows, columns), modules, has_bias, cls.is_transposed)

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, GPTSpec)
        names = cls.names_of(spec)
        norm = spec.norm.tensors("final_norm", (spec.hidden_size,), names.final_norm)
        head, bias = linear_tensors("head", (spec.vocab_size, spec.hidden_size), (names.head,))
        return (
            *(norm if spec.has_final_norm else ()),
            *(() if spec.is_tied else (head,)),
            *((bias,) if spec.has_head_bias else ()),
        )
