"""The unquantized twin: computes a checkpoint with transformers' own classes, in float32, with one layer in
memory at a time. `evaluate` measures the engine against this twin; nothing here serves requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedModel
from penstock.model.registry import OpenModel
from penstock.weights.store import WeightStore


@dataclass(frozen=True)
class Computed:
    """The model's results for some sequences of equal length, all float32."""

    #: After each layer, before the final norm. Each [num_seqs, num_tokens, hidden_size]
    hidden: tuple[Tensor, ...]
    logits: Tensor  # [num_seqs, num_tokens, vocab_size]


class UnquantizedModel:
    """transformers' model without weights. Each part of the model (a layer, the embedding, a norm, the head)
    loads its weights from the checkpoint when the part is called, and drops them afterwards. INT8 weights are
    dequantized.

    So a forward pass takes the memory of the largest part in float32. It reads the checkpoint once, however
    many sequences it computes.
    """

    def __init__(self, opened: OpenModel) -> None:
        """Raises MissingTensor or UnsupportedModel if transformers' model has other parts than ours."""
        if opened.spec.has_encoder or opened.spec.sees_prompt_both_ways:
            raise UnsupportedModel(
                f"{opened.spec.architecture} sees its prompts both ways, so that it predicts none of their "
                "tokens, and only decoders that see a text one way are compared so far"
            )
        self.spec, self.store = opened.spec, opened.store
        self._model = _without_weights(opened.store)
        self._hidden: list[Tensor] = []
        self._largest_part = 0
        layers = _layers(self._model, opened.spec.num_layers)
        for name, part in _parts(self._model, layers):
            source = {key: self._tensor_name(f"{name}.{key}") for key in part.state_dict()}
            size = sum(math.prod(self.store.source.entry(tensor).shape) for tensor in source.values())
            self._largest_part = max(self._largest_part, size)
            _load_when_called(part, self.store, source)
        for layer in layers:
            layer.register_forward_hook(self._keep_hidden)

    def workspace_bytes(self) -> int:
        """Bytes that forward() takes for weights: the largest part in float32, beside the part as the file
        holds it."""
        return 2 * 4 * self._largest_part

    def sequence_bytes(self, num_tokens: int) -> int:
        """An upper estimate of the bytes that a sequence of so many tokens takes in forward().

        The estimate counts the hidden states of all layers, three rows of the vocabulary (logits before and
        after a cap), attention's scores with mask, softmax and a copy, and some rows of the widest matrix.
        """
        spec = self.spec
        per_token = spec.num_layers * spec.hidden_size + 3 * spec.vocab_size
        per_token += 4 * spec.num_heads * num_tokens + 8 * (spec.hidden_size + spec.intermediate_size)
        return 4 * num_tokens * per_token

    @torch.no_grad()
    def forward(self, input_ids: Tensor) -> Computed:
        """input_ids int64 [num_seqs, num_tokens]; each sequence is computed from its beginning. Raises
        CheckpointError kinds."""
        self._hidden = []
        logits = self._model(input_ids, use_cache=False).logits
        hidden, self._hidden = tuple(self._hidden), []
        return Computed(hidden, logits)

    def _keep_hidden(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        self._hidden.append(output[0] if isinstance(output, tuple) else output)

    def _tensor_name(self, parameter: str) -> str:
        """The name of a parameter in the checkpoint. Checkpoints hold a head under several names, or hold no
        head where the embedding serves as one."""
        module, _, kind = parameter.rpartition(".")
        if kind == "bias" or self._model.get_submodule(module) is not self._model.get_output_embeddings():
            return parameter
        return self.store.tensors.output_matrix.parts[0]


def _without_weights(store: WeightStore) -> Any:
    """transformers' model in float32: parameters have shapes and no storage, buffers (such as rope's
    frequencies) have values."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # this import takes a second

    folder, kind = store.checkpoint.folder, store.checkpoint.config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers has no model of type {kind!r}, which the unquantized model is computed with: "
            "`penstock report` tells the rounding error of each tensor without it"
        )
    if not (folder / "config.json").is_file():
        config = AutoConfig.for_model(**store.checkpoint.config)
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        # Eager attention is the definition; other implementations ignore what they lack, as soft caps.
        model = make(config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            unknown = torch.nan if buffer.is_floating_point() else 0
            setattr(module, name, torch.full_like(buffer, unknown, device="cpu"))
    model.initialize_weights()  # fills buffers; on parameters without storage it does nothing
    empty = [name for name, buffer in model.named_buffers() if bool(buffer.isnan().any())]
    if empty:
        raise UnsupportedModel(f"this version of transformers leaves {', '.join(empty)} of {folder} empty")
    return model.eval()


def _layers(model: Any, num_layers: int) -> list[nn.Module]:
    """The decoder layers: the outermost list of `num_layers` modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UnsupportedModel(f"transformers' {type(model).__name__} has no list of {num_layers} layers")


def _parts(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each layer as a whole, and all modules outside of layers that have parameters of their own."""
    is_layer = set(layers)
    inside = {module for layer in is_layer for module in layer.modules()} - is_layer
    for name, module in model.named_modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if module in is_layer or (has_own and module not in inside):
            yield name, module


def _load_when_called(part: nn.Module, store: WeightStore, source: dict[str, str]) -> None:
    """source: parameter of the part -> tensor of the checkpoint."""
    empty = dict(part.state_dict())

    def load(module: nn.Module, arguments: Any) -> None:
        module.load_state_dict({key: store.read_exact(name) for key, name in source.items()}, assign=True)

    def drop(module: nn.Module, arguments: Any, output: Any) -> None:
        module.load_state_dict(empty, assign=True)

    part.register_forward_pre_hook(load)
    part.register_forward_hook(drop)
