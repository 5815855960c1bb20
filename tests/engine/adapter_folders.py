"""Folders of adapters as PEFT writes them, and the models that they make: each weight plus scale * B A."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

RANK, ALPHA = 5, 7
#: PEFT's prefix.
PREFIX = "base_model.model."


def linear_modules(model: nn.Module, *left_out: str) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the linear modules below the model's head whose names end with none of
    `left_out`."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(("lm_head", "embed_out", *left_out)):
            continue
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.nf, module.nx)
    return found


def save_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    name: str = PREFIX + "{module}.lora_{letter}.weight",
    **config: Any,
) -> Path:
    """An adapter of these modules, with random numbers that float16 holds. `ranks` replace the rank of some
    modules; `config` replaces keys of adapter_config.json."""
    numbers = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, generator=numbers) * size / columns**0.5
        return made.bfloat16().half().to(dtype)

    tensors = {}
    for module, (num_outputs, num_inputs) in shapes.items():
        rank = (ranks or {}).get(module, config.get("r", RANK))
        tensors[name.format(module=module, letter="A")] = matrix(rank, num_inputs)
        tensors[name.format(module=module, letter="B")] = matrix(num_outputs, rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def add_adapter(model: nn.Module, folder: Path, scales: Mapping[str, float] | None = None) -> None:
    """Changes the weights of a model of transformers. `scales` replace alpha / r of some modules."""
    config = json.loads((folder / "adapter_config.json").read_text())
    factor = math.sqrt if config.get("use_rslora") else float
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")].double()
        scale = (scales or {}).get(module, config["lora_alpha"] / factor(len(a)))
        change = (scale * (b @ a.double())).float()
        changed = model.get_submodule(module)
        with torch.no_grad():
            changed.weight += change.t() if isinstance(changed, Conv1D) else change


def names(modules: Mapping[str, Any], endings: Sequence[str]) -> dict[str, Any]:
    """Those of the modules whose names end so."""
    return {name: value for name, value in modules.items() if name.endswith(tuple(endings))}
