"""A single tensor in bytes that came from elsewhere: a file of safetensors, or one that torch.save wrote. A
pickle is interpreted, and never executed."""

from __future__ import annotations

import io

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from penstock.weights.checkpoints.tensor_entry import DTYPES
from penstock.weights.checkpoints.torch_files.faults import Malformed
from penstock.weights.checkpoints.torch_files.legacy_file import read_legacy
from penstock.weights.checkpoints.torch_files.stored_tensor import StoredTensor, item_bytes
from penstock.weights.checkpoints.torch_files.torch_file import read_zip

#: What files of torch.save begin with: a zip file, and an older one.
ZIP, PICKLE = b"PK\x03\x04", b"\x80"


def single_tensor(raw: bytes) -> Tensor:
    """The one tensor of a file, which is [*shape] of a dtype in DTYPES. The tensor is a copy or a view of
    `raw`. Raises Malformed for anything else, and Hostile for a pickle that asks for what no tensor needs."""
    if raw.startswith((ZIP, PICKLE)):
        return _from_torch_save(raw)
    try:
        tensors = load(raw)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise Malformed(f"it is neither a file of safetensors ({error}) nor one of torch.save") from error
    if len(tensors) != 1:
        raise Malformed(f"it holds {len(tensors)} tensors, not one")
    return next(iter(tensors.values()))


def _from_torch_save(raw: bytes) -> Tensor:
    stream = io.BytesIO(raw)
    content, places = (read_zip if raw.startswith(ZIP) else read_legacy)(stream, len(raw))
    if isinstance(content, dict) and len(content) == 1:
        (content,) = content.values()
    if not isinstance(content, StoredTensor):
        raise Malformed("it holds no tensor")
    place = places.get(content.storage.key)
    if content.dtype not in DTYPES or place is None or place.num_bytes != content.storage.num_bytes:
        raise Malformed(f"its tensor has the dtype {content.dtype}, or its data are missing")
    if not content.num_items:
        return torch.empty(content.shape, dtype=DTYPES[content.dtype])
    start = place.offset + content.offset * item_bytes(content.dtype)
    span = raw[start : start + content.extent * item_bytes(content.dtype)]
    flat = torch.frombuffer(bytearray(span), dtype=DTYPES[content.dtype])
    return flat.as_strided(content.shape, content.stride)
