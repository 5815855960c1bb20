"""Whether a checkpoint holds the tensors that a model consists of, each with its shape, and no others; and
whether the inputs of matrices make whole groups."""

from __future__ import annotations

import re

from penstock.config import GROUP_SIZES
from penstock.errors import ConfigError, UnexpectedTensor, WrongTensor
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.tensor_source import TensorSource, is_transposed
from penstock.weights.tensors import ModelTensors, TensorSpec

#: Tensors that some checkpoints carry and no model here needs: they follow from the config.
DERIVED_TENSORS = (r"\.rotary_emb\.inv_freq$", r"\.inv_freq$")
#: What lies between the experts in the files of a converted model (unit_files.py).
PADDING = r"\.padding_bias$"


def check_tensors(source: TensorSource, tensors: ModelTensors, ignore_unexpected: bool = False) -> None:
    """Raises MissingTensor, WrongTensor, and UnexpectedTensor unless `ignore_unexpected`."""
    known: set[str] = set()
    for tensor in (tensor for group in tensors.groups for tensor in group):
        known |= tensor.format.check(source, tensor)
        _check_rows(source, tensor)
    if not ignore_unexpected:
        _check_others(source, known, (*DERIVED_TENSORS, PADDING, *tensors.unused))


def with_whole_groups(tensors: ModelTensors, otherwise: str) -> ModelTensors:
    """The model itself. Raises ConfigError if the inputs of a matrix don't make whole groups: the error names
    the sizes that fit, and says what to do `otherwise`."""
    grouped = [tensor for tensor in tensors.multiplied if tensor.format.group_size]
    for tensor in grouped:
        if tensor.shape[1] % tensor.format.group_size:
            fitting = [str(size) for size in GROUP_SIZES if not any(each.shape[1] % size for each in grouped)]
            remedy = f"choose --group-size {' or '.join(fitting)}, or " if fitting else "no size fits, so "
            raise ConfigError(
                f"{' + '.join(tensor.parts)} has {tensor.shape[1]} inputs, which don't make whole groups of "
                f"{tensor.format.group_size}: {remedy}{otherwise}"
            )
    return tensors


def with_own_groups(tensors: ModelTensors, group_size: int | None) -> ModelTensors:
    """The model itself. Raises ConfigError if a user has chosen a group size, and the checkpoint (such as a
    GGUF file) has a matrix in 4-bit codes with another one."""
    for tensor in (own for each in tensors.multiplied for own in in_one_format(each)):
        size = tensor.format.group_size
        if group_size is not None and isinstance(tensor.format, Int4) and size != group_size:
            raise ConfigError(
                f"{' + '.join(tensor.parts)} is in 4 bits already, with scales per {size} inputs, which "
                f"--group-size {group_size} can't change. Leave out --group-size"
            )
    return tensors


def _check_rows(source: TensorSource, tensor: TensorSpec) -> None:
    """Raises WrongTensor unless the parts' rows make up the tensor's."""
    num_rows = 0
    for part in tensor.parts:
        entry = source.entry(part)
        shape = entry.shape[::-1] if is_transposed(tensor, entry) else entry.shape
        num_rows += shape[0] if shape else 1
    if num_rows != tensor.shape[0]:
        raise WrongTensor(
            f"{' + '.join(tensor.parts)} in {source.checkpoint.folder} have {num_rows} rows together; "
            f"config.json calls for {tensor.shape[0]}"
        )


def _check_others(source: TensorSource, known: set[str], unused: tuple[str, ...]) -> None:
    """Raises UnexpectedTensor for a tensor that is neither `known` nor matched by a pattern of `unused`."""
    checkpoint, patterns = source.checkpoint, [re.compile(pattern) for pattern in unused]
    known = known | checkpoint.idle
    extra = [
        name
        for name in checkpoint.entries
        if name not in known and not any(pattern.search(name) for pattern in patterns)
    ]
    if not extra:
        return
    others = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
    raise UnexpectedTensor(
        f"{checkpoint.entries[extra[0]].file} holds {extra[0]}{others} that this architecture does not use, "
        "so its answers might not be the model's. If you know that these tensors don't matter, pass "
        "--ignore-unexpected-tensors"
    )
