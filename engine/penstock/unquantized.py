"""The unquantized twin: computes a checkpoint with transformers' own classes, in float32, with one layer in
memory at a time. `evaluate` measures the engine against this twin; nothing here serves requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedModel
from penstock.goes_with import Feature, check_together
from penstock.model.families.mixture_frame import has_turned_experts
from penstock.model.registry import OpenModel
from penstock.model.through_transformers.auto_model import list_of_layers, on_meta
from penstock.model.through_transformers.names import parameter_names
from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec

#: What reads a parameter from the checkpoint, in float32.
Read = Callable[[], Tensor]


@dataclass(frozen=True)
class Computed:
    """The model's results for some sequences of equal length, all float32."""

    #: After each layer, before the final norm. Each [num_seqs, num_tokens, hidden_size]; where a token has
    #: several hidden states, they stand one after the other.
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
        check_together(
            {Feature.UNQUANTIZED, *opened.spec.features}, opened.spec.architecture, UnsupportedModel
        )
        self.spec, self.store = opened.spec, opened.store
        self._model = _without_weights(opened.store)
        self._hidden: list[Tensor] = []
        self._largest_part = 0
        layers = list(list_of_layers(self._model, opened.spec.num_layers))
        self._renamed = parameter_names(self._model, opened.store.checkpoint.entries)
        stacked = self._experts(layers)
        for name, part in _parts(self._model, layers):
            keys = part.state_dict()
            source = {
                key: stacked.get(f"{name}.{key}") or self._reader(f"{name}.{key}")
                for key, value in keys.items()
                if value.is_meta or self._is_there(f"{name}.{key}")
            }
            self._largest_part = max(self._largest_part, sum(map(torch.numel, keys.values())))
            _load_when_called(part, source)
        for layer in layers:
            layer.register_forward_hook(self._keep_hidden)
        self._input_ids = torch.empty(0)
        self._model.get_input_embeddings().register_forward_pre_hook(self._keep_ids)

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
        per_token = spec.num_layers * spec.row_size + 3 * spec.vocab_size
        per_token += 4 * spec.num_heads * num_tokens + 8 * (spec.hidden_size + spec.intermediate_size)
        return 4 * num_tokens * per_token

    @torch.no_grad()
    def forward(self, input_ids: Tensor) -> Computed:
        """input_ids int64 [num_seqs, num_tokens]; each sequence is computed from its beginning. Raises
        CheckpointError kinds."""
        self._hidden, self._input_ids = [], input_ids
        logits = self._model(input_ids, use_cache=False).logits
        hidden, self._hidden = tuple(self._hidden), []
        return Computed(hidden, logits)

    def _keep_ids(self, embedding: nn.Module, arguments: Any) -> Any:
        """Llama 4 takes its tokens to where the embedding's weights are, and these have no storage yet."""
        return (self._input_ids,) if arguments and arguments[0].is_meta else None

    def _keep_hidden(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.dim() == 4:  # several hidden states of each token, the states first
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        self._hidden.append(hidden)

    def _is_there(self, parameter: str) -> bool:
        """Whether the checkpoint has a parameter or buffer. Buffers that it lacks have values already."""
        return self.store.source.find(self._tensor_name(parameter)) is not None

    def _reader(self, parameter: str) -> Read:
        """What reads a parameter that is one tensor of the checkpoint, or the convolutions of q, k and v,
        which transformers joins (OLMo Hybrid). Raises MissingTensor."""
        name = self._tensor_name(parameter)
        convolutions = [name.replace(".conv1d.", f".{each}_conv1d.") for each in "qkv"]
        if convolutions[0] != name and all(self.store.source.find(each) is not None for each in convolutions):
            return lambda: torch.cat([self.store.read_exact(each) for each in convolutions])
        self.store.source.entry(name)
        return partial(self.store.read_exact, name)

    def _tensor_name(self, parameter: str) -> str:
        """The name of a parameter in the checkpoint. Checkpoints hold a head under several names, or hold no
        head where the embedding serves as one."""
        module, _, kind = parameter.rpartition(".")
        if kind == "bias" or self._model.get_submodule(module) is not self._model.get_output_embeddings():
            is_there = self.store.source.find(parameter) is not None
            return parameter if is_there else self._renamed.get(parameter, parameter)
        return self.store.tensors.output_matrix.parts[0]

    def _experts(self, layers: list[nn.Module]) -> dict[str, Read]:
        """What reads each parameter that holds all experts of a layer, by the parameter's name."""
        by_module = {module: name for name, module in self._model.named_modules()}
        found: dict[str, Read] = {}
        for layer, experts in zip(layers, self.store.tensors.stacks[-1].experts, strict=False):
            for module in layer.modules() if experts else ():
                if "down_proj" in dict(module.named_parameters(recurse=False)):
                    is_turned = getattr(module, "is_transposed", has_turned_experts(self.spec))
                    for name, tensors in _stacks(experts):
                        read = partial(_read_stack, self.store, tensors, is_turned)
                        found[f"{by_module[module]}.{name}"] = read
        return found


def _without_weights(store: WeightStore) -> Any:
    """transformers' model in float32, whose parameters have shapes and no storage."""
    from transformers import CONFIG_MAPPING, AutoConfig  # this import takes a second

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
    if config.model_type != kind:  # a multimodal model, of which the text part is computed
        config = config.get_text_config()
    if config.model_type != kind:  # a text part that is another text model, given text alone
        config = CONFIG_MAPPING[str(kind)].from_dict(store.checkpoint.config)
    config.architectures = store.checkpoint.config.get("architectures")
    if hasattr(config, "quantization_config"):
        del config.quantization_config

    # Eager attention is the definition; other implementations ignore what they lack, as soft caps. But
    # Falcon's eager attention adds ALiBi twice, once with the mask.
    def stored(name: str) -> Tensor | None:
        return store.source.read(name) if store.source.find(name) is not None else None

    return on_meta(config, "sdpa" if kind == "falcon" else "eager", stored=stored)


def _parts(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each layer as a whole, and all modules outside of layers that have parameters of their own."""
    is_layer = set(layers)
    inside = {module for layer in is_layer for module in layer.modules()} - is_layer
    for name, module in model.named_modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if module in is_layer or (has_own and module not in inside):
            yield name, module


def _stacks(experts: tuple[tuple[TensorSpec, ...], ...]) -> Iterator[tuple[str, list[TensorSpec]]]:
    """Each parameter of a module with a layer's experts: its name there, and the tensor of each expert."""
    for tensors in zip(*experts, strict=True):
        name, _, kind = tensors[0].name.partition(".")
        yield f"{name}_proj_{kind}" if kind else f"{name}_proj", list(tensors)


def _read_stack(store: WeightStore, tensors: list[TensorSpec], is_turned: bool) -> Tensor:
    """[num_experts, out_features, in_features], or the last two exchanged; biases [num_experts, out]."""
    each = [torch.cat([store.read_exact(part) for part in tensor.parts]) for tensor in tensors]
    return torch.stack([one.mT if is_turned and one.dim() == 2 else one for one in each])


def _load_when_called(part: nn.Module, source: dict[str, Read]) -> None:
    """source: parameter of the part -> what reads it."""
    empty = dict(part.state_dict())

    def load(module: nn.Module, arguments: Any) -> None:
        module.load_state_dict({key: read() for key, read in source.items()}, assign=True, strict=False)

    def drop(module: nn.Module, arguments: Any, output: Any) -> None:
        module.load_state_dict(empty, assign=True)

    part.register_forward_pre_hook(load)
    part.register_forward_hook(drop)
