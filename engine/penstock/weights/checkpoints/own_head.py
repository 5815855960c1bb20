"""Whether a head is the embedding's matrix or one of its own, where config.json says that they are the same.
Files have the last word, as in transformers: where both are there and differ, nothing is tied."""

from __future__ import annotations

import logging

import torch

from penstock.errors import UnexpectedTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint, TensorEntry
from penstock.weights.tensors import TensorSpec

logger = logging.getLogger(__name__)

#: Bytes of each of the two that are compared at a time.
SLICE_BYTES = 16 << 20
#: What transformers calls a head, whatever the family's checkpoints call it.
HEAD = "lm_head.weight"


def has_own_head(checkpoint: Checkpoint, embedding: TensorSpec, head: TensorSpec, prefix: str) -> bool:
    """Whether a checkpoint of a tied model holds a head that is not its embedding. `prefix` is what names of
    the embedding may lack.

    A head that differs is found in the first slice, one that is equal is read whole. Raises UnexpectedTensor
    (a head that differs has a name that the family does not know) and Checkpoint.read_rows()'s errors.
    """
    (name,), (own,) = embedding.parts, head.parts
    name = name if name in checkpoint.entries else name.removeprefix(prefix)
    if name not in checkpoint.entries:
        return False  # the store says what is missing
    try:
        found = [part for part in dict.fromkeys((own, HEAD)) if _differs(checkpoint, name, part)]
    finally:
        checkpoint.close()  # it opens its files again
    if found and found != [own]:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds a head {found[-1]} that differs from the embedding {name}, but heads "
            f"of this architecture are called {own}. Rename the tensor in the file"
        )
    if found:
        logger.warning(
            "%s ties head and embedding by its config.json, but its %s differs from %s: the head is kept, as "
            "transformers keeps it. tie_word_embeddings: false in config.json would say so",
            checkpoint.folder, own, name,
        )  # fmt: skip
    return bool(found)


def _differs(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether there is an `other` matrix, and not with the values of `name`. INT8 differs from floats, whose
    rounding nobody knows, and from INT8 of other scales."""
    if other not in checkpoint.entries:
        return False
    if not _is_equal(checkpoint, checkpoint.entries[name], checkpoint.entries[other]):
        return True
    one, two = (checkpoint.entries.get(f"{matrix}_scale") for matrix in (name, other))
    return one is not two if one is None or two is None else not _is_equal(checkpoint, one, two)


def _is_equal(checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry) -> bool:
    if one.shape != other.shape or (one.dtype == "I8") != (other.dtype == "I8"):
        return False
    num_rows = one.shape[0] if one.shape else 1
    step = max(1, SLICE_BYTES * num_rows // max(1, one.num_bytes))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = [checkpoint.read_rows(entry.name, start, stop) for entry in (one, other)]
        if not torch.equal(*(part if one.dtype == other.dtype else part.double() for part in rows)):
            return False
    return True
