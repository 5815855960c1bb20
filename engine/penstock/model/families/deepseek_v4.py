"""DeepSeek V4: streams of hidden states (hyper-connections), attention to a window and to entries that stand
for several tokens, and a mixture whose first layers know a token's experts by its id alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV, Routed, Routing
from penstock.kernels.mixture.routing import choose, sum_of_columns
from penstock.model.attention.compressed import CompressedAttention, Groups
from penstock.model.config_values import count, num_experts_of, num_layers_of, number, refuse, require
from penstock.model.families.hybrid.layers import kinds_of
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, MixtureSpec, chosen_of, with_mixture
from penstock.model.family import GivenRows
from penstock.model.hyper_connections import HyperConnections
from penstock.model.mixture.mixture import Mixture, MixtureNames, mixed
from penstock.model.norms import RMS
from penstock.model.rope import read_rope
from penstock.spec import ModelSpec, RopeSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import rename
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
#: The tokens of a group in layers of each kind, and the kinds by DeepSeek's own numbers.
SIZES = {SPARSE: 4, HEAVY: 128}
KINDS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}
_NAMES = MixtureNames(
    "ffn.gate",
    "ffn.experts.",
    gate="w1",
    up="w3",
    down="w2",
    shared="ffn.shared_experts.",
    shared_modules=("w1", "w3", "w2"),
    correction="ffn.gate.bias",
)
#: DeepSeek's names -> those that transformers saves.
_USUAL = {"embed.weight": "model.embed_tokens.weight"} | {
    f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")
}


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Spec(MixtureSpec):
    """The streams, and the sizes of attention."""

    hyper: HyperConnections
    compressed: CompressedAttention
    #: Layers in which a table has the experts of each token's id.
    hash_layers: frozenset[int]

    @property
    def row_size(self) -> int:
        """The streams of a token, and its id."""
        return self.hyper.num_streams * self.hidden_size + 1


class DeepseekV4(MixtureFamily):
    """A row has the streams of a token, one after the other, then the token's id."""

    architectures = ("DeepseekV4ForCausalLM",)
    unused_tensors = (r"^(model\.)?mtp\.",)
    unadapted = ("o_a", "kv_b")
    spec: DeepseekV4Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        for name in ("attention_bias", "mlp_bias"):
            require(config, name, False, None)
        require(config, "scoring_func", "sqrtsoftplus", None)
        require(config, "norm_topk_prob", True, None)
        require(config, "hidden_act", "silu", None)
        num_layers, size = num_layers_of(config, "num_hidden_layers"), count(config, "moe_intermediate_size")
        heads, head_dim = count(config, "num_attention_heads"), count(config, "head_dim", default=512)
        share = number(config, "partial_rotary_factor", 0.125)
        rope_dim = count(config, "qk_rope_head_dim", default=int(head_dim * share))
        main, compress = _ropes(config, rope_dim)
        groups = _groups(config, num_layers)
        attention = CompressedAttention(
            count(config, "sliding_window", default=128),
            groups,
            head_dim,
            rope_dim,
            count(config, "q_lora_rank"),
            count(config, "o_groups", default=8),
            count(config, "o_lora_rank", default=1024),
            count(config, "index_n_heads", default=64),
            count(config, "index_head_dim", default=128),
            count(config, "index_topk", default=512),
        )
        _check(attention, heads)
        spec = cls._spec(
            config | {"intermediate_size": size, "hidden_act": "silu"},
            rope=main,
            layer_ropes=tuple(main if each is None else compress for each in groups),
            latent_dim=head_dim,
            head_dim=head_dim,
            num_kv_heads=1,
            side_dims=(head_dim, attention.index_dim),
            states=tuple(attention.state_layout(index) for index in range(num_layers)),
            num_chosen_keys=max((each.size for each in groups if each), default=0) * attention.num_chosen,
        )
        spec = with_mixture(spec, _mixture(config, num_layers, size))
        hyper = HyperConnections(
            count(config, "hc_mult", default=4),
            count(config, "hc_sinkhorn_iters", default=20),
            number(config, "hc_eps", 1e-6),
        )
        values = {field.name: getattr(spec, field.name) for field in fields(spec)}
        hashed = _hash_layers(config, num_layers)
        return DeepseekV4Spec(**values, hyper=hyper, compressed=attention, hash_layers=hashed)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, DeepseekV4Spec)
        prefix, width = f"model.layers.{index}.", spec.hidden_size
        attention, mlp = (
            spec.hyper.tensors(f"hyper.{part}", width, f"{prefix}hc_{part}_") for part in ("attn", "ffn")
        )
        return (
            *attention,
            *RMS.tensors("input_norm", (width,), f"{prefix}attn_norm"),
            *spec.compressed.tensors(spec, index, f"{prefix}attn."),
            *mlp,
            *RMS.tensors("post_norm", (width,), f"{prefix}ffn_norm"),
            *cls.mlp_tensors(spec, index, prefix),
        )

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, DeepseekV4Spec)
        mixture, routing = spec.mixture, spec.mixture.routing
        if index not in spec.hash_layers:
            return mixture.layer_tensors(index)
        own = replace(mixture, routing=replace(routing, has_correction=False))
        table = (spec.vocab_size, routing.num_chosen)
        return *own.layer_tensors(index), TensorSpec("hash_table", table, (f"{prefix}ffn.gate.tid2eid",))

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, DeepseekV4Spec)
        width = spec.hidden_size
        head = TensorSpec("head", (spec.vocab_size, width), ("head.weight",), INT8)
        return (
            *spec.hyper.head_tensors("hyper.head", width, "model.hc_head.hc_"),
            *RMS.tensors("final_norm", (width,), "model.norm"),
            *(() if spec.is_tied else (head,)),
        )

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        for name, usual in _USUAL.items():
            rename(checkpoint, name, usual)
            rename(checkpoint, f"model.{name}", usual)
        assert isinstance(spec, DeepseekV4Spec)
        for index in range(spec.num_layers):
            for layer in (f"layers.{index}.", f"model.layers.{index}."):
                rename(checkpoint, f"{layer}attn.kv_norm.weight", f"{layer}attn.norm.weight")
        for index in spec.hash_layers:
            for name in (f"layers.{index}.ffn.gate.tid2eid", f"model.layers.{index}.ffn.gate.tid2eid"):
                table = checkpoint.entries.get(name)
                if table is not None and table.dtype in _INTEGERS:
                    checkpoint.entries[name] = _as_floats(table)
        return super().separate(checkpoint, spec)

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        vectors = super().embed(weights, input_ids, positions, given)
        return torch.cat((*[vectors] * self.spec.hyper.num_streams, input_ids[:, None].float()), dim=1)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hyper, streams, ids = self.spec.hyper, hidden[:, :-1], hidden[:, -1:]
        x, factors, matrix = hyper.mixed(self, weights, "hyper.attn", streams)
        x = self._norm("input_norm", weights, x)
        given = self.spec.compressed.attend(self, index, weights, x, kv, batch)
        streams = hyper.spread(streams, given, factors, matrix)
        x, factors, matrix = hyper.mixed(self, weights, "hyper.ffn", streams)
        x = self._norm("post_norm", weights, x)
        given = self._experts(index, weights, x, ids[:, 0].long())
        return torch.cat((hyper.spread(streams, given, factors, matrix), ids), dim=1)

    def _experts(self, index: int, weights: LayerWeights, x: Tensor, ids: Tensor) -> Tensor:
        """What the mixture makes of normed x [num_tokens, hidden_size]."""
        routing, router = self.spec.mixture.routing, weights.router
        logits = self.kernels.router_scores(x, router.weight, None, "none").double()
        scores = torch.nn.functional.softplus(logits).sqrt().float()
        if index in self.spec.hash_layers:
            # A step that measures memory has any numbers in the table.
            found = weights.vector("hash_table")[ids].nan_to_num()
            experts = found.clamp(0, routing.num_experts - 1).long()
            chosen = scores.gather(1, experts)
            chosen = chosen / sum_of_columns(chosen).clamp_min(routing.least_sum)
            routed = Routed(experts, chosen * routing.scaling)
        else:
            assert router.correction is not None
            routed = choose(scores, scores + router.correction, routing)
        return mixed(self, weights, x, self._mixtures[index], routed)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        hidden = self.spec.hyper.joined(self, weights, "hyper.head", hidden[:, :-1])
        return super().norm_final(weights, hidden)


def _as_floats(table: TensorEntry) -> TensorEntry:
    """A table of integers, all below 2^24, which float32 has exactly."""
    dtype, row_bytes = _INTEGERS[table.dtype], table.num_bytes // max(1, table.shape[0])

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        stored = checkpoint.read_stored(table, start * row_bytes, stop * row_bytes)
        return stored.view(dtype).view(stop - start, *table.shape[1:]).float()

    return replace(table, dtype="F32", decode=decode)


def _ropes(config: dict[str, Any], rope_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of layers with a window alone, and that of layers with entries, which may be stretched. YaRN
    has no factor of cosines and sines here."""
    own = config.get("rope_parameters") or config.get("rope_scaling") or {}
    main = own.get("main") or {"rope_type": "default", "rope_theta": number(config, "rope_theta", 1e4)}
    compress = own.get("compress") or {
        "rope_type": "default",
        **{key: value for key, value in own.items() if key not in ("main", "compress", "rope_theta")},
        "rope_theta": number(config, "compress_rope_theta", 160000.0),
    }
    if "type" in compress:
        compress = {**compress, "rope_type": compress["type"]}
    if compress.get("rope_type") == "yarn":
        compress = {"attention_factor": 1.0, **compress}
    first, second = (
        replace(
            read_rope(config | {"rope_parameters": each, "rope_scaling": None}, rope_dim), is_interleaved=True
        )
        for each in (main, compress)
    )
    return first, second


def _groups(config: dict[str, Any], num_layers: int) -> tuple[Groups | None, ...]:
    """By the kind of each layer, or by DeepSeek's list of the tokens of a group."""
    sizes = SIZES | (config.get("compress_rates") or {})
    kinds = kinds_of(config, ("layer_types",), num_layers)
    if kinds is None and config.get("compress_ratios") is not None:
        ratios = list(config["compress_ratios"])[:num_layers]
        if len(ratios) < num_layers or not {*ratios} <= {*KINDS}:
            refuse("compress_ratios", ratios, f"0, 4 or 128 for each of {num_layers} layers")
        kinds = tuple(KINDS[ratio] for ratio in ratios)
    if kinds is None:
        kinds = tuple(SPARSE if index > 2 and index % 2 else HEAVY for index in range(num_layers))
    if {*kinds} - {WINDOW, SPARSE, HEAVY}:
        refuse("layer_types", list(kinds), f"{WINDOW}, {SPARSE} or {HEAVY} for each layer")
    known = {kind: Groups(count(sizes, kind), kind == SPARSE) for kind in SIZES}
    return tuple(known.get(kind) for kind in kinds)


def _hash_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    kinds = kinds_of(config, ("mlp_layer_types",), num_layers)
    if kinds is None:
        return frozenset(range(min(num_layers, int(number(config, "num_hash_layers", 3)))))
    if {*kinds} - {"hash_moe", "moe"}:
        refuse("mlp_layer_types", list(kinds), "hash_moe or moe for each layer")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "hash_moe")


def _mixture(config: dict[str, Any], num_layers: int, size: int) -> Mixture:
    num_experts = num_experts_of(config, "n_routed_experts", "num_local_experts", "num_experts")
    limit = number(config, "swiglu_limit", 10.0)
    routing = Routing(
        num_experts,
        chosen_of(config, num_experts),
        "none",
        is_renormalized=True,
        scaling=number(config, "routed_scaling_factor", 1.5),
        has_correction=True,
    )
    return Mixture(
        routing,
        count(config, "hidden_size"),
        size,
        frozenset(range(num_layers)),
        shared_size=int(number(config, "n_shared_experts", 1)) * size,
        limits=((limit, limit),) * num_layers,
        names=_NAMES,
    )


def _check(attention: CompressedAttention, num_heads: int) -> None:
    """Raises InvalidConfig for sizes that don't fit."""
    if num_heads % attention.num_outputs:
        refuse("o_groups", attention.num_outputs, f"a divisor of the number of heads, {num_heads}")
    if attention.rope_dim > min(attention.head_dim, attention.index_dim):
        refuse("qk_rope_head_dim", attention.rope_dim, "at most head_dim and index_head_dim")
