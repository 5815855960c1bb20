"""Eagle3: a head that was trained beside a model and comes in a folder of its own (EAGLE-3: Li et al. 2025,
arXiv 2503.01840), with Llama's layer, as vLLM, SGLang and SpecForge have it.

Its row for a token gets the token's embedding and a state: a projection (`fc`) of the model's hidden states
after three layers, of the token before; for a guess after a guess, the head's own last hidden state. The
one layer has attention over both side by side, each after a norm of its own, and adds to the state. The
vocabulary of its logits may be a part of the model's: `d2t` has what has to be added to a token's number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel, WrongTensor
from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag, refuse, require
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.family import GivenRows
from penstock.model.known_families import EAGLE3_HEADS
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Layers of the model whose hidden states the head reads.
NUM_STATES = 3
#: The logit of a token that the head's vocabulary lacks. It is finite, so that a request which forbids all
#: others still has a distribution.
ABSENT = -1e9
#: Integers of `d2t`, by their names in files.
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(LlamaSpec):
    """vocab_size is the model's; the head's own is draft_vocab_size."""

    draft_vocab_size: int
    #: Numbers of the model's hidden state.
    target_size: int
    #: The layers of the model after which hidden states are read, from 0. (): those of layers_of().
    target_layers: tuple[int, ...] = ()
    #: The layer adds to the state after its norm, otherwise to the state itself.
    adds_to_normed: bool = False
    #: The files hold an embedding; otherwise it is the model's.
    has_embedding: bool = True
    #: Logits belong to the tokens of `d2t`; otherwise to the first tokens of the model.
    has_token_numbers: bool = True

    @property
    def row_size(self) -> int:
        return 2 * self.hidden_size

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are read of a model with so many. Raises UnsupportedModel for layers that it has
        not."""
        layers = self.target_layers or (1, num_layers // 2 - 1, num_layers - 4)
        if not all(0 <= layer < num_layers for layer in layers) or sorted(set(layers)) != list(layers):
            raise UnsupportedModel(
                f"the EAGLE-3 head reads the hidden states after layers {', '.join(map(str, layers))} "
                f"(counted from 0), and the model has {num_layers}: take the head that was made for it"
            )
        return layers


class Eagle3(Llama):
    """A model of one layer, which is swept as other models are. Its rows are `given` states of all tokens."""

    architectures: ClassVar[tuple[str, ...]] = tuple(sorted(EAGLE3_HEADS))
    spec: Eagle3Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> Eagle3Spec:
        nested = config.get("transformer_layer_config")
        if nested is not None and not isinstance(nested, dict):
            refuse("transformer_layer_config", nested, "an object")
        inner = config if nested is None else config | nested
        require(inner, "num_hidden_layers", 1)
        require(inner, "pretraining_tp", 1)
        for name in ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
            require(config, name, False, None)
        told = config.get("eagle_config") or {}
        if not isinstance(told, dict):
            refuse("eagle_config", told, "an object")
        require(told, "use_aux_hidden_state", True, None)
        has_bias = flag(inner, "attention_bias", False)
        base = cls._spec(
            inner,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(inner, "mlp_bias", False),
            is_tied=False,
        )
        return Eagle3Spec(
            **vars(base),
            draft_vocab_size=_or_else(config, "draft_vocab_size", base.vocab_size),
            target_size=_or_else(config, "target_hidden_size", base.hidden_size),
            target_layers=_target_layers(config, told),
            adds_to_normed=flag(config, "norm_before_residual", False),
        )

    @classmethod
    def named_as(cls, spec: ModelSpec, names: Collection[str]) -> ModelSpec:
        assert isinstance(spec, Eagle3Spec)
        if "d2t" not in names and spec.draft_vocab_size != spec.vocab_size:
            raise UnsupportedModel(
                f"the EAGLE-3 head has {spec.draft_vocab_size} of {spec.vocab_size} tokens, and no tensor "
                "d2t says which: download it again"
            )
        own = {"embed_tokens.weight", "model.embed_tokens.weight"}
        return replace(spec, has_embedding=not own.isdisjoint(names), has_token_numbers="d2t" in names)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """Gives the layer its usual name, and has `d2t` read as floats, which hold such numbers exactly."""
        for name in [name for name in checkpoint.entries if "midlayer." in name]:
            usual = name.replace("midlayer.", "layers.0.")
            checkpoint.entries[usual] = replace(checkpoint.entries.pop(name), name=usual)
        if (entry := checkpoint.entries.get("d2t")) is not None:
            checkpoint.entries["d2t"] = _as_floats(entry)
        checkpoint.entries.pop("t2d", None)  # which follows from d2t
        return checkpoint

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, Eagle3Spec)
        shape = (spec.hidden_size, NUM_STATES * spec.target_size)
        condense = linear_tensors("condense", shape, ("model.fc",), has_bias=False)
        return *(super().embedding_tensors(spec) if spec.has_embedding else ()), *condense

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, Eagle3Spec)
        part = f"model.layers.{index}.hidden_norm"
        norm = spec.norm.tensors("hidden_norm", (spec.hidden_size,), part)
        return *norm, *super().layer_tensors(spec, index)

    @classmethod
    def attention_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        tensors = super().attention_tensors(spec, index, prefix)
        width = 2 * spec.hidden_size
        return tuple(
            replace(each, shape=(each.shape[0], width)) if each.name == "qkv" else each for each in tensors
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, Eagle3Spec)
        size = spec.draft_vocab_size
        tensors = tuple(
            replace(each, shape=(size, spec.hidden_size)) if each.name == "head" else each
            for each in super().head_tensors(spec)
        )
        return (*tensors, TensorSpec("distances", (size,), ("d2t",))) if spec.has_token_numbers else tensors

    def condense(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """The model's hidden states after three layers, float32 [num_tokens, 3 * target_size], as states of
        the head [num_tokens, hidden_size], both on the host."""
        return self.host_kernels.linear(states, weights.matrix("condense"), None)

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        if given is None:  # a step that measures memory has no states, nor a model's embedding
            vectors = torch.zeros(len(input_ids), self.spec.hidden_size)
            return torch.cat((vectors, torch.zeros_like(vectors)), dim=1)
        return torch.cat((weights.matrix("embedding").look_up(input_ids), given.vectors), dim=1)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        vectors, state = (part.contiguous() for part in hidden.chunk(2, dim=1))
        normed = self._norm("hidden_norm", weights, state)
        x = torch.cat((self._norm("input_norm", weights, vectors), normed), dim=1)
        attended = self.attention(index, weights, x, kv, batch)
        hidden = (normed if self.spec.adds_to_normed else state) + attended
        return hidden + self.mlp(index, weights, self._norm("post_norm", weights, hidden))

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """Logits of all tokens of the model: ABSENT for those that the head's vocabulary lacks."""
        own = super().head(weights, hidden)
        logits = own.new_full((len(own), self.spec.vocab_size), ABSENT)
        # check_tokens() saw these; in a step that measures memory they are anything.
        logits[:, _tokens(self.spec, weights, self.device).clamp(0, self.spec.vocab_size - 1)] = own
        return logits

    def check_tokens(self, weights: LayerWeights) -> None:
        """Raises WrongTensor if a logit belongs to no token, or two to the same."""
        tokens = _tokens(self.spec, weights, self.device)
        found = set(tokens.tolist())
        if len(found) < len(tokens) or not 0 <= min(found) <= max(found) < self.spec.vocab_size:
            raise WrongTensor(
                "d2t of the EAGLE-3 head names tokens that there are not, or one twice: download it again"
            )


def _or_else(config: dict[str, Any], name: str, default: int) -> int:
    """A number of config.json; the default if it is not there, or null."""
    return default if config.get(name) is None else count(config, name)


def _target_layers(config: dict[str, Any], told: dict[str, Any]) -> tuple[int, ...]:
    """The layers that config.json names. At its top level, where vLLM reads it, a number counts the layers
    that were computed; in `eagle_config`, where SGLang reads it, it is the layer's own number."""
    name = "eagle_aux_hidden_state_layer_ids"
    at_top = config.get(name)
    numbers, first = (told.get(name), 0) if at_top is None else (at_top, 1)
    if numbers is None:
        return ()
    if (
        not isinstance(numbers, list)
        or len(numbers) != NUM_STATES
        or not all(type(number) is int and number >= first for number in numbers)
    ):
        refuse(name, numbers, f"{NUM_STATES} whole numbers, at least {first}")
    return tuple(number - first for number in numbers)


def _as_floats(entry: TensorEntry) -> TensorEntry:
    """`d2t` as float32. Raises WrongTensor for other elements than integers."""
    if (dtype := _INTEGERS.get(entry.dtype)) is None:
        raise WrongTensor(f"tensor d2t in {entry.file} has dtype {entry.dtype}; it needs whole numbers")
    size = dtype.itemsize

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        stored = checkpoint.read_stored(entry, start * size, stop * size)
        return stored.view(dtype).float()

    return replace(entry, dtype="F32", num_bytes=4 * entry.num_bytes // size, decode=decode)


def _tokens(spec: Eagle3Spec, weights: LayerWeights, device: torch.device) -> Tensor:
    """The model's token for each of the head's."""
    numbers = torch.arange(spec.draft_vocab_size, device=device)
    return numbers + weights.vector("distances").long() if spec.has_token_numbers else numbers
