"""TransformersSpec: what config.json and the probe tell of a model, as numbers and tensors. Nothing else asks
transformers what a model is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers.attention import LayerAttention
from penstock.spec import ModelSpec
from penstock.weights.tensors import TensorSpec

if TYPE_CHECKING:
    from penstock.model.through_transformers.probe import Probed
    from penstock.model.through_transformers.skeleton import Skeleton


@dataclass(frozen=True)
class TransformersSpec(ModelSpec):
    """A ModelSpec with all tensors of the model."""

    implementation: ClassVar[str] = "transformers"
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    #: Tensors before the layers: "embedding", and others under transformers' names.
    embedding: tuple[TensorSpec, ...] = ()
    layers: tuple[tuple[TensorSpec, ...], ...] = ()
    #: The tensors of each layer's experts.
    experts: tuple[tuple[tuple[TensorSpec, ...], ...], ...] = ()
    #: The modules hold experts as [num_experts, in_features, out_features].
    has_transposed_experts: bool = False
    #: Tensors after the layers, with "head" also where the embedding serves as one.
    head: tuple[TensorSpec, ...] = ()
    #: Names in checkpoints of tensors that the forward pass does not use.
    idle: tuple[str, ...] = ()
    attentions: tuple[LayerAttention, ...] = ()
    #: Probed.num_returned
    num_returned: int | None = None

    @classmethod
    def of(
        cls, config_json: dict[str, Any], config: Any, skeleton: Skeleton, found: Probed
    ) -> TransformersSpec:
        """Raises UnsupportedModel for layers whose keys and values can't share one cache."""
        attentions = found.attentions
        num_kv_heads = max(each.num_kv_heads for each in attentions)
        if any(num_kv_heads % each.num_kv_heads or each.num_heads % num_kv_heads for each in attentions):
            raise UnsupportedModel("its layers have numbers of KV heads that no cache of one form holds")
        before, after, idle = skeleton.outer_tensors(found.before, found.after)
        windows = tuple(each.window for each in attentions)
        return cls(
            architecture=type(skeleton.outline.model).__name__,
            hidden_size=found.hidden_size,
            num_layers=len(skeleton.layers),
            num_heads=max(each.num_heads for each in attentions),
            num_kv_heads=num_kv_heads,
            head_dim=max(each.head_dim for each in attentions),
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * found.hidden_size,
            vocab_size=skeleton.head[0].shape[0],
            max_position_embeddings=config.max_position_embeddings,
            norm_eps=0.0,
            is_tied=skeleton.is_tied,
            sliding_windows=windows if any(windows) else (),
            config=config_json,
            embedding=(skeleton.embedding, *before),
            layers=tuple(layer.tensors for layer in skeleton.layers),
            experts=tuple(layer.experts.tensors if layer.experts else () for layer in skeleton.layers),
            has_transposed_experts=skeleton.has_transposed_experts,
            num_experts_per_token=found.num_chosen,
            head=(*after, *skeleton.head),
            idle=idle,
            attentions=attentions,
            num_returned=found.num_returned,
        )
