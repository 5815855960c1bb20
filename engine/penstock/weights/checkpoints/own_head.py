"""Whether a head has a matrix of its own, where config.json says that embedding and head share one. The files
decide, as in transformers: where they hold two matrices that differ, nothing is tied."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from penstock.errors import UnexpectedTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.tensors import TensorSpec

logger = logging.getLogger(__name__)

#: Bytes of each matrix that are compared at a time.
SLICE_BYTES = 16 << 20
#: The name that transformers gives to a head, whichever name the family's checkpoints have for it.
HEAD = "lm_head.weight"
#: In the config.json of a converted model: the head is there for others, and is the embedding's matrix.
TIED_HEAD = "penstock_tied_head"


def has_own_head(checkpoint: Checkpoint, embedding: TensorSpec, head: TensorSpec, prefix: str) -> bool:
    """Whether a checkpoint of a tied model holds a head that differs from its embedding. `prefix` is the
    beginning that the name of the embedding may lack. The embedding may have more rows than the head, whose
    rows are its first ones then.

    A head that differs shows in its first slice; a head that is equal is read whole. Raises UnexpectedTensor
    (a head that differs has a name that the family does not know) and Checkpoint.read_rows()'s errors.
    """
    (name,), (own,) = embedding.parts, head.parts
    name = name if name in checkpoint.entries else name.removeprefix(prefix)
    if name not in checkpoint.entries:
        return False  # the store says what is missing
    try:
        names = dict.fromkeys((own, HEAD))
        found = [part for part in names if _differs(checkpoint, name, part, head.shape[0])]
    finally:
        checkpoint.close()  # the next read opens the files again
    if found and found != [own]:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds a head {found[-1]} that differs from the embedding {name}, but heads "
            f"of this architecture are called {own}. Rename the tensor in the file"
        )
    if found:
        logger.warning(
            "config.json of %s ties head and embedding, but %s differs from %s: the head is kept, as "
            "transformers keeps it. To end this warning, set tie_word_embeddings to false in config.json",
            checkpoint.folder, own, name,
        )  # fmt: skip
    return bool(found)


def _differs(checkpoint: Checkpoint, name: str, other: str, num_rows: int) -> bool:
    """Whether there is an `other` matrix with other values than the first rows of `name`, or than all of
    them. INT8 counts as different from floats, since nobody knows how these would be rounded, and from INT8
    with other scales."""
    if other not in checkpoint.entries:
        return False
    if not _is_equal(checkpoint, checkpoint.entries[name], checkpoint.entries[other], num_rows):
        return True
    one, two = (checkpoint.entries.get(f"{matrix}_scale") for matrix in (name, other))
    return one is not two if one is None or two is None else not _is_equal(checkpoint, one, two, num_rows)


def _is_equal(checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry, num_rows: int) -> bool:
    """Whether `other` has the values of `one`, or those of its first `num_rows` rows."""
    if (one.dtype == "I8") != (other.dtype == "I8") or one.shape[1:] != other.shape[1:]:
        return False
    is_beginning = other.shape[:1] == (num_rows,) and one.shape > other.shape
    if one.shape != other.shape and not is_beginning:
        return False
    if one.decode is None and one == replace(other, name=one.name):
        return True  # the same bytes of a file: torch.save writes shared tensors once
    num_rows = other.shape[0] if other.shape else 1
    step = max(1, SLICE_BYTES * num_rows // max(1, other.num_bytes))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = [checkpoint.read_rows(entry.name, start, stop) for entry in (one, other)]
        if not torch.equal(*(part if one.dtype == other.dtype else part.double() for part in rows)):
            return False
    return True
