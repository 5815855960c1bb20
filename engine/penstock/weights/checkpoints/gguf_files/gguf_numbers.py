"""Numbers: what the header of a GGUF file says of its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.gguf_file import Metadata
from penstock.weights.checkpoints.tensor_entry import TensorEntry


@dataclass(frozen=True)
class Numbers:
    """The numbers in the header of a file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorEntry]
    #: The names that get() was asked for. What nobody asks for has no effect (gguf_keys.py).
    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """A value whose key begins with the architecture's name."""
        self.asked.add(name)
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def real(self, name: str, default: float | None = None) -> float:
        """A number of the architecture. Raises UnsupportedModel if the number is missing, or if there is one
        for each layer."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            what = "one for each layer" if isinstance(value, list) else "nothing" if value is None else value
            raise UnsupportedModel(
                f"{self.path} has {what} for {self.architecture}.{name}, where Penstock needs a number"
            )
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of the architecture, which is at least 1."""
        value = self.real(name, default)
        if value != default and (value < 1 or value != int(value)):
            raise UnsupportedModel(f"{self.path} has {value} for {self.architecture}.{name}")
        return int(value)

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def num_layers(self) -> int:
        """Layers of the model, without those that guess further tokens."""
        others = self.metadata.get(f"{self.architecture}.nextn_predict_layers", 0)
        return self.integer("block_count") - (others if isinstance(others, int) else 0)

    @property
    def num_kv_heads(self) -> int:
        """Of the layers that have any: files of hybrid models have a number for each layer."""
        told = self.get("attention.head_count_kv")
        if isinstance(told, list) and not any(told):  # a converter has taken all layers for recurrent ones
            keys = next(
                (each for name, each in self.tensors.items() if name.endswith(".attn_k.weight")), None
            )
            return max(1, keys.shape[0] // self.head_dim) if keys is not None else self.num_heads
        return self.largest("attention.head_count_kv", self.num_heads)

    @property
    def has_one_kv_shape(self) -> bool:
        """Whether all layers that have keys have them of one number of heads."""
        told = self.get("attention.head_count_kv")
        return not isinstance(told, list) or len({*told} - {0}) < 2

    def largest(self, name: str, default: int | None = None) -> int:
        """The largest of the numbers of layers, or the number of all. Raises UnsupportedModel."""
        values = self.get(name, default)
        listed = [value for value in values if value] if isinstance(values, list) else []
        if not listed or not all(isinstance(value, int) and value > 0 for value in listed):
            return self.integer(name, default)
        return int(max(listed))

    def has(self, layer: int, word: str) -> bool:
        """Whether a layer has a weight of this name."""
        return f"blk.{layer}.{word}.weight" in self.tensors

    def layer_kinds(self, words: Mapping[str, str]) -> list[str]:
        """The kind of each layer, by a weight that only such layers have. Raises CorruptFile."""
        found = []
        for layer in range(self.num_layers):
            kind = next((kind for word, kind in words.items() if self.has(layer, word)), None)
            if kind is None:
                raise CorruptFile(
                    f"{self.path} has no {' or '.join(words)} in layer {layer}; download it again"
                )
            found.append(kind)
        return found

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made of latents (MLA)."""
        return self.get("attention.kv_lora_rank") is not None

    @property
    def head_dim(self) -> int:
        """The width of a head; of a head of latent attention, the part that rope turns."""
        if self.is_latent:
            return self.integer("rope.dimension_count")
        return self.integer("attention.key_length", self.integer("embedding_length") // self.num_heads)


def window_layers(numbers: Numbers, period: int, window: int) -> list[str]:
    """`layer_types` of config.json: every `period`-th layer sees all of a text, or as the file says; all
    layers, if the window is 0. Raises UnsupportedModel."""
    count, told = numbers.integer("block_count"), numbers.get("attention.sliding_window_pattern", period)
    if isinstance(told, list) and len(told) >= count:
        has_window = [bool(each) for each in told[:count]]
    elif isinstance(told, int) and told >= 0:
        has_window = [told == 0 or index % told < told - 1 for index in range(count)]
    else:
        raise UnsupportedModel(
            f"{numbers.path} has {told!r} for {numbers.architecture}.attention.sliding_window_pattern"
        )
    return ["sliding_attention" if window and each else "full_attention" for each in has_window]
