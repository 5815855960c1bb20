"""LlamaSpec: the values in which the families that resemble Llama differ, from norms to factors.
LlamaArchitecture: what their checkpoints hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.kernels import ActivationFunction
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.family import Family
from penstock.model.layers import PLAIN, AttentionForm, activation_function
from penstock.model.norms import RMS, Norm
from penstock.model.rope import context_length, read_rope
from penstock.spec import ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import TensorSpec

if TYPE_CHECKING:
    from penstock.model.attention.latent import LatentForm
    from penstock.model.heads.mtp import MTPHead
    from penstock.model.recurrent.form import RecurrentForm


@dataclass(frozen=True)
class LlamaSpec(ModelSpec):
    """Llama's numbers, and the switches of the families that resemble it. A factor of 1 and a cap of 0 change
    nothing."""

    activation: ActivationFunction = "silu"
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    #: The mlp is down(f(gate x) * up x), otherwise down(f(up x)).
    has_gate: bool = True
    attention: AttentionForm = PLAIN
    #: Attention over latents in place of `attention`.
    latent: LatentForm | None = None
    norm: Norm = RMS
    #: Attention and mlp have a norm before them, a norm after them (before the sum), or both.
    norm_places: Literal["before", "after", "both"] = "before"
    #: Attention and mlp read the same normed hidden state.
    is_parallel: bool = False
    #: Of scores; None is head_dim^-0.5.
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_factor: float = 1.0
    #: Of what attention adds to the hidden state, and of what the mlp adds.
    branch_factor: float = 1.0
    #: Of the hidden state after the final norm, and so of logits.
    head_factor: float = 1.0
    #: What layers with a state compute in place of attention: recurrent_spec().
    recurrent: RecurrentForm | None = None
    #: Layers that a checkpoint holds after those of the model: heads of multi-token prediction, of which the
    #: first is computed where guesses are wanted.
    num_extra_layers: int = 0
    #: This is not the model, but its head of multi-token prediction: LlamaArchitecture.mtp_spec().
    mtp: MTPHead | None = None


class LlamaArchitecture(Family):
    """The tensors of a layer follow from LlamaSpec, and from the names that a family gives them."""

    #: The checkpoint's modules that make up our fused matrices.
    qkv_parts: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_up_parts: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    head_norm_parts: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    o_part: ClassVar[str] = "o_proj"
    down_part: ClassVar[str] = "down_proj"
    mlp_part: ClassVar[str] = "mlp."
    final_norm_part: ClassVar[str] = "model.norm"
    #: The modules of a layer's norms: before and after attention, before and after the mlp.
    norm_parts: ClassVar[dict[str, str]] = {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "post_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    spec: LlamaSpec

    @classmethod
    def _spec(cls, config: dict[str, Any], **differences: Any) -> LlamaSpec:
        """Llama's reading of a config.json, with `differences`."""
        num_heads = count(config, "num_attention_heads")
        hidden_size, num_layers = (
            count(config, "hidden_size"),
            num_layers_of(config, "num_hidden_layers"),
        )
        head_dim = count(config, "head_dim", default=hidden_size // num_heads)
        rope = differences["rope"] if "rope" in differences else read_rope(config, head_dim)
        positions = count(config, "max_position_embeddings")
        numbers: dict[str, Any] = {
            "architecture": cls.architectures[0],
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": count(config, "num_key_value_heads", default=num_heads),
            "head_dim": head_dim,
            "intermediate_size": count(config, "intermediate_size"),
            "vocab_size": count(config, "vocab_size"),
            "max_position_embeddings": context_length(rope, positions) if rope else positions,
            "rope": rope,
        }
        if "norm_eps" not in differences:
            numbers["norm_eps"] = number(config, "rms_norm_eps")
        if "is_tied" not in differences:
            numbers["is_tied"] = flag(config, "tie_word_embeddings", False)
        if "activation" not in differences:
            numbers["activation"] = activation_function(config.get("hidden_act", "silu"))
        return LlamaSpec(**(numbers | differences))

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LlamaSpec)
        shape = (spec.vocab_size, spec.hidden_size)
        joined = spec.mtp.tensors(spec, spec.norm) if spec.mtp is not None else ()
        return (TensorSpec("embedding", shape, ("model.embed_tokens.weight",), INT8), *joined)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LlamaSpec)
        prefix = f"model.layers.{index}." if spec.mtp is None else spec.mtp.layer
        has_before, has_after = spec.norm_places != "after", spec.norm_places != "before"

        def norm(name: str, exists: bool) -> tuple[TensorSpec, ...]:
            part = prefix + cls.norm_parts[name]
            return spec.norm.tensors(name, (spec.hidden_size,), part) if exists else ()

        has_state = spec.recurrent is not None and spec.state_layout(index).parts
        mixer = spec.recurrent.tensors(spec, prefix) if has_state and spec.recurrent is not None else ()
        return (
            *norm("input_norm", has_before),
            *mixer,
            *(
                cls.attention_tensors(spec, index, f"{prefix}self_attn.")
                if cls.has_attention(spec, index)
                else ()
            ),
            *norm("attention_out_norm", has_after),
            *norm("post_norm", has_before and not spec.is_parallel),
            *cls.mlp_tensors(spec, index, prefix + cls.mlp_part),
            *norm("mlp_out_norm", has_after),
        )

    @classmethod
    def has_attention(cls, spec: LlamaSpec, index: int) -> bool:
        """Whether a layer has attention."""
        return index not in spec.layers_without_kv

    @classmethod
    def attention_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of Llama.attention(), whose names in a checkpoint begin with `prefix`."""
        if spec.head_counts:
            spec = replace(spec, num_heads=spec.head_counts[index])
        if spec.latent is not None:
            return spec.latent.tensors(spec, prefix)
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = tuple(prefix + part for part in cls.qkv_parts)
        q_norm, k_norm = (prefix + part for part in cls.head_norm_parts)
        norms, gate = spec.attention.norms, spec.attention.out_gate
        sinks = TensorSpec("sinks", (spec.num_heads,), (f"{prefix}sinks",))
        return (
            *linear_tensors(
                "qkv",
                ((1 + spec.attention.has_gate) * q_rows + 2 * kv_rows, spec.hidden_size),
                qkv,
                spec.has_qkv_bias,
            ),
            *(norms.tensors(spec, q_norm, k_norm) if norms else ()),
            *((sinks,) if spec.attention.has_sinks else ()),
            *(gate.tensors(prefix, spec) if gate else ()),
            *linear_tensors("o", (spec.hidden_size, q_rows), (prefix + cls.o_part,), spec.has_o_bias),
        )

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of Llama.mlp(), whose names in a checkpoint begin with `prefix`."""
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        gate_up = tuple(prefix + part for part in cls.gate_up_parts)
        up = linear_tensors("up", (ffn, hidden), (f"{prefix}up_proj",), spec.has_mlp_bias)
        both = linear_tensors("gate_up", (2 * ffn, hidden), gate_up, spec.has_mlp_bias)
        return (
            *(both if spec.has_gate else up),
            *linear_tensors("down", (hidden, ffn), (prefix + cls.down_part,), spec.has_mlp_bias),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LlamaSpec)
        part = cls.final_norm_part if spec.mtp is None else spec.mtp.final_norm
        norm = spec.norm.tensors("final_norm", (spec.hidden_size,), part)
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    @classmethod
    def mtp_head(cls, spec: LlamaSpec) -> MTPHead | None:
        """The head of multi-token prediction that a checkpoint of the model may hold."""
        return None

    @classmethod
    def may_have_mtp(cls, spec: ModelSpec) -> bool:
        assert isinstance(spec, LlamaSpec)
        return cls.mtp_head(spec) is not None

    @classmethod
    def mtp_spec(cls, spec: ModelSpec, names: Collection[str] | None) -> ModelSpec | None:
        assert isinstance(spec, LlamaSpec)
        head = cls.mtp_head(spec)
        if head is None or (names is not None and f"{head.projection}.weight" not in names):
            return None
        return cls._as_head(spec, head)

    @classmethod
    def _as_head(cls, spec: LlamaSpec, head: MTPHead) -> LlamaSpec:
        plain = replace(spec, recurrent=None, states=(), layers_without_kv=frozenset())
        return replace(plain, num_layers=1, mtp=head, sliding_windows=(), layer_ropes=())
