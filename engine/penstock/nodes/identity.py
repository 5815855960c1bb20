"""What two machines must have in common to compute one model: the program, and the model's files."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from penstock.kv_disk.fingerprint import code_digest
from penstock.model.registry import OpenModel
from penstock.nodes.wire.handshake import PROTOCOL

#: Numbers of a tensor that has at most so many bytes are compared; of a larger one, names, dtypes and shapes.
_SMALL_BYTES = 1 << 16


def own_program() -> dict[str, Any]:
    """The fields of a hello that must be equal."""
    try:
        number = version("penstock-llm")
    except PackageNotFoundError:  # a checkout that was not installed
        number = "unknown"
    return {"protocol": PROTOCOL, "version": number, "code": code_digest()}


def model_digest(opened: OpenModel) -> str:
    """Stands for config.json, all tensors' names, types and shapes, and the numbers of the small tensors
    (norms and biases of every layer), in which two trainings of one shape differ. It reads a few kilobytes a
    layer, where a checksum of the weights would read them all."""
    checkpoint, source = opened.store.checkpoint, opened.store.source
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for name, entry in sorted(checkpoint.entries.items()):
        digest.update(f"\0{name}\0{entry.dtype}\0{tuple(entry.shape)}".encode())
    for part, tensor in sorted(opened.store.tensors.by_part.items()):
        if not tensor.is_matrix and 4 * tensor.num_elements <= _SMALL_BYTES:
            digest.update(source.read(part).float().contiguous().numpy().data)
    return digest.hexdigest()
