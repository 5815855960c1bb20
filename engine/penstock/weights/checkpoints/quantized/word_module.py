"""WordModule: the tensors of a linear layer as GPTQ's and AWQ's tools save them: `qweight`, `qzeros` and
`scales`, and `g_idx` where inputs are in groups out of order. Outputs run along the columns of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.nibbles import EXACT_SCALE_DTYPES, SCALE_DTYPES, shared_size
from penstock.weights.checkpoints.quantized.packed import check_words
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

#: The names of a module's tensors, which become one matrix.
KINDS = ("qweight", "qzeros", "scales", "g_idx")


def module_entries(
    checkpoint: Checkpoint, matrix: Callable[[WordModule], TensorEntry]
) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with what `matrix` makes of a module in place of each module's tensors.
    Raises MissingTensor and WrongTensor."""
    modules = {name.removesuffix("qweight") for name in checkpoint.entries if name.endswith(".qweight")}
    for name in modules:
        yield matrix(WordModule.of(checkpoint, name))
    for entry in checkpoint.entries.values():
        module, _, kind = entry.name.rpartition(".")
        if f"{module}." not in modules or kind not in KINDS:
            yield entry


@dataclass(frozen=True)
class WordModule:
    """One layer's tensors; eight zero points lie in a word along the outputs."""

    #: The layer's name, with a dot at the end.
    name: str
    qweight: TensorEntry  # I32
    qzeros: TensorEntry  # I32 [num_groups, out_features / 8]
    scales: TensorEntry  # floating [num_groups, out_features]
    g_idx: TensorEntry | None  # I32 [in_features]

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> WordModule:
        """Raises MissingTensor and WrongTensor."""
        qweight, qzeros = checkpoint.entry(f"{name}qweight"), checkpoint.entry(f"{name}qzeros")
        check_words(qweight)
        check_words(qzeros)
        g_idx = checkpoint.entries.get(f"{name}g_idx")
        return cls(name, qweight, qzeros, checkpoint.entry(f"{name}scales"), g_idx)

    @property
    def num_groups(self) -> int:
        return self.qzeros.shape[0]

    def checked_size(self, num_inputs: int, num_outputs: int, has_zero_points: bool) -> int:
        """The size of groups in which the scales are kept. Raises WrongTensor if shapes or dtypes don't fit
        4 bits and a matrix of this shape."""
        groups, size = self.num_groups, shared_size(num_inputs, self.num_groups)
        dtypes = EXACT_SCALE_DTYPES if has_zero_points else SCALE_DTYPES
        words: tuple[str, ...] = ("I32",)
        expected: list[tuple[TensorEntry, tuple[int, ...], tuple[str, ...]]]
        expected = [(self.scales, (groups, num_outputs), dtypes)]
        expected += [(self.qzeros, (groups, num_outputs // 8), words)]
        expected += [(self.g_idx, (num_inputs,), words)] if self.g_idx is not None else []
        for entry, shape, known in expected:
            if entry.shape != shape or entry.dtype not in known or not size or num_outputs % 8:
                raise WrongTensor(
                    f"tensor {entry.name} in {entry.file} is {entry.dtype} {list(entry.shape)}, but "
                    f"{' or '.join(known)} {list(shape)} belongs to 4 bits and a qweight of "
                    f"{list(self.qweight.shape)}, with outputs in eights and groups of whole 32 inputs"
                )
        return size

    def scale_rows(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """[stop - start, num_groups] in the dtype of the file."""
        dtype = DTYPES[self.scales.dtype]
        stored = checkpoint.read_columns(self.scales, start * dtype.itemsize, stop * dtype.itemsize)
        return stored.view(dtype).t()

    def zero_bytes(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """The words with the zero points of outputs start:stop, and of others in the same words: uint8
        [num_groups, 4 * words]."""
        return checkpoint.read_columns(self.qzeros, start // 8 * 4, -(-stop // 8) * 4)
