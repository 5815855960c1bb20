"""Architecture: how the files of one of llama.cpp's architectures hold a model, and what config.json says of
it. Another architecture is another line of a table; what its converter changed in a tensor, a rule undoes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry

if TYPE_CHECKING:
    from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import MixtureFile


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: blk.`layer`.`word`.`kind`."""

    numbers: Numbers
    entry: TensorEntry
    layer: int | None
    word: str
    #: "weight", "bias", or "" for a name that ends with the word.
    kind: str
    #: The beginning of names that the model's own code gives to tensors of this layer.
    prefix: str

    def name(self, module: str) -> str:
        """The name of a tensor of a module."""
        return f"{self.prefix}{module}.{self.kind or 'weight'}"

    def partner(self, word: str) -> TensorEntry:
        """A tensor beside this one. Raises CorruptFile."""
        name = self.entry.name.replace(self.word, word)
        found = self.numbers.tensors.get(name)
        if found is None or found.shape[1:] != self.entry.shape[1:]:
            raise CorruptFile(
                f"{self.numbers.path} has no {name} that fits {self.entry.name}; download it again"
            )
        return found


#: What a tensor of a file becomes.
Rule = Callable[[Stored], Iterator[TensorEntry]]
#: The places of rows: of a file's numbers and their count in the file. None: they are in order.
Order = Callable[[Numbers, int], Tensor | None]


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    #: The architecture in config.json, with or without "ForCausalLM".
    model: str
    #: What config.json has beyond what all models have: the type, too, where it is not llama.cpp's name.
    config: Callable[[Numbers], dict[str, Any]] = lambda numbers: {}
    #: Modules by llama.cpp's words, where they are not Llama's; or rules.
    names: Mapping[str, str | Rule] = field(default_factory=dict)
    #: llama.cpp rotates neighbours where the model's own code rotates halves: rows of q and k were exchanged.
    exchanges_rows: bool = False
    #: What the file has added to the weights of norms.
    norm_offset: float = 0.0
    #: Rope turns a part of each head in some models.
    rotates_part: bool = False
    #: config.json's word for the eps of norms; "": the model's own code has the number.
    norm_eps: str = "rms_norm_eps"
    #: Keys of other models that config.json has no place for.
    lacks: tuple[str, ...] = ()
    #: Tensors that a file has as numbers in its header.
    made: Callable[[Numbers], Iterable[TensorEntry]] = lambda numbers: ()
    #: A weight that the last layer has in each file.
    last: str = "attn_norm"
    #: The number of KV heads may differ from layer to layer.
    has_kv_shapes: bool = False
    #: The beginning of names of layers, before their number.
    layers: str = "model.layers."
    #: The beginning of names of layers that guess further tokens; "": they follow the others.
    guessing: str = ""
    mixture: MixtureFile | None = None


# ---- rules


def whole(name: str, change: Callable[[Tensor], Tensor] | None = None, *shape: int) -> Rule:
    """A tensor whose name is no module's; `shape` as torch's view() takes it."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = reshaped(stored.entry, *shape) if shape else stored.entry
        yield made_of(stored.prefix + name, Matrix((entry,)), change)

    return rule


def part(module: str, order: Order, change: Callable[[Tensor], Tensor] | None = None) -> Rule:
    """A module's weight or bias with rows in another order."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        rows = order(stored.numbers, stored.entry.shape[0])
        yield made_of(stored.name(module), Matrix((stored.entry,), rows), change)

    return rule


def joined(module: str, *words: str) -> Rule:
    """One module of the rows of several words: the first of them makes it, the others make nothing."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        if stored.word == words[0]:
            others = tuple(stored.partner(word) for word in words[1:])
            yield made_of(stored.name(module), Matrix((stored.entry, *others)))

    return rule


def parted(*modules: str, sizes: Callable[[Numbers], tuple[int, ...]] | None = None) -> Rule:
    """Several modules of the rows of one tensor, in equal parts or in parts of these sizes."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        height = stored.entry.shape[0]
        equal = (height // len(modules),) * len(modules)
        counts = sizes(stored.numbers) if sizes is not None else equal
        if sum(counts) != height:
            raise CorruptFile(
                f"{stored.numbers.path}: tensor {stored.entry.name} has {height} rows instead of "
                f"{sum(counts)}; download the file again"
            )
        begin = 0
        for module, count in zip(modules, counts, strict=True):
            yield made_of(stored.name(module), Matrix((row_slice(stored.entry, begin, count),)))
            begin += count

    return rule


def convolution(name: str) -> Rule:
    """The weight [channels, width] of a convolution, which the model's own code has as [channels, 1, width];
    or its bias."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = stored.entry
        is_bias = stored.kind == "bias"
        entry = entry if is_bias else reshaped(entry, entry.shape[0], 1, -1)
        yield made_of(stored.name(name), Matrix((entry,)))

    return rule


def log_of_negative(rows: Tensor) -> Tensor:
    """A_log of what the file has, -exp(A_log)."""
    return (-rows).log()


def qkv_sizes(numbers: Numbers) -> tuple[int, int, int]:
    """Rows of q, k and v."""
    key_rows = numbers.num_kv_heads * numbers.head_dim
    return numbers.num_heads * numbers.head_dim, key_rows, key_rows


def reshaped(entry: TensorEntry, *shape: int) -> TensorEntry:
    """The same elements in another shape, of which one size may be -1."""
    meta = torch.empty(entry.shape, device="meta")
    try:
        return replace(entry, shape=tuple(meta.view(shape).shape))
    except RuntimeError as error:
        raise CorruptFile(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, which makes no {list(shape)}; "
            "download the file again"
        ) from error


def row_slice(entry: TensorEntry, begin: int, count: int) -> TensorEntry:
    """Rows begin:begin + count."""
    row_bytes = entry.num_bytes // entry.shape[0]
    shape, offset = (count, *entry.shape[1:]), entry.offset + begin * row_bytes
    return replace(entry, shape=shape, offset=offset, num_bytes=count * row_bytes)


def exchanged(num_rows: int, head_dim: int, num_rotated: int) -> Tensor:
    """Where rows of q or k lie that llama.cpp rotates as neighbours: row i + j * rotated / 2 of a head is row
    2 i + j of the file's."""
    head = torch.arange(head_dim)
    head[:num_rotated] = head[:num_rotated].view(-1, 2).T.flatten()
    return (torch.arange(0, num_rows, head_dim)[:, None] + head).flatten()


def by_head(numbers: Numbers, num_rows: int) -> Tensor:
    """q, k and v of each head together, where the file has q of all heads, then k, then v."""
    return torch.arange(num_rows).view(3, numbers.num_heads, -1).transpose(0, 1).flatten()


def by_group(numbers: Numbers, num_rows: int) -> Tensor:
    """The queries of a KV head, its keys and its values together, where the file has all queries first."""
    kv_heads, per_group = numbers.num_kv_heads, numbers.num_heads // numbers.num_kv_heads
    rows = torch.arange(num_rows).view(numbers.num_heads + 2 * kv_heads, -1)
    q, k, v = rows.split_with_sizes((numbers.num_heads, kv_heads, kv_heads))
    return torch.cat((q.view(kv_heads, per_group, -1), k[:, None], v[:, None]), dim=1).flatten()
