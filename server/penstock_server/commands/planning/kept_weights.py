"""What a plan says of a model's weights in one line: who computes them, in which form the files have them, in
how many bits they are kept, what is left out, and what is lost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.gguf_file import is_gguf
from penstock.spec import ModelSpec
from penstock.weights.checkpoints import checkpoint
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.module_kinds import lossless_share
from penstock.weights.checkpoints.quantized.quantization_config import form_of, kv_note
from penstock.weights.checkpoints.text_part import other_parts
from penstock.weights.store import WeightStore
from penstock.weights.tensors import ModelTensors
from penstock.weights.weight_facts import WeightFacts


def kept_line(spec: ModelSpec, store: WeightStore) -> str:
    """The line of a model whose files are here."""
    opened = store.checkpoint
    return _line(spec, opened.config, opened.folder, store.facts, store.lossless_share)


def planned_line(spec: ModelSpec, config: dict[str, Any], folder: Path, tensors: ModelTensors) -> str:
    """The line of a model of which config.json alone is here."""
    facts = WeightFacts.of(Checkpoint(folder, config, {}), tensors)
    return _line(spec, config, folder, facts, lossless_share(config, tensors))


def _line(spec: ModelSpec, config: dict[str, Any], path: Path, facts: WeightFacts, share: float) -> str:
    by = "Penstock's own code" if spec.implementation == "penstock" else "transformers' modules"
    bits = f"in memory {8 * facts.num_bytes / max(1, facts.num_parameters):.1f} bits each"
    if is_gguf(path):
        kept = f"{facts.quantization} of the file, {bits}"
    else:
        form = f" as {facts.quantization}" if facts.quantization.startswith("INT") else ""
        kept = f"{form_of(config) or 'unquantized'} in the files, {bits}{form}"
    left_out = ""
    if not path.is_file():
        others = other_parts(checkpoint.read_config(path))
        parts = [others] if others else []
        parts += ["the files' scales of keys and values"] if kv_note(config) else []
        left_out = f"; left out: {', '.join(parts)}" if parts else ""
    return f"weights: {kept}, computed by {by} as {spec.architecture}{left_out}; {_loss(share)}"


def _loss(share: float) -> str:
    if share == 1:
        return "kept without loss"
    kept = f"{math.floor(100 * share)}% kept without loss, the others rounded" if share else "all rounded"
    return f"{kept} (see `penstock report`)"
