"""Checkpoints of any size that take no disk: their data is a hole in the file, all zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.model.registry import find_family


def write_sparse_llama(folder: Path, num_layers: int, hidden_size: int, intermediate_size: int) -> None:
    """A bfloat16 Llama with 256 tokens and 16 heads."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden_size,
        "num_hidden_layers": num_layers, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": intermediate_size, "vocab_size": 256, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    family = find_family(config)
    tensors = family.model_tensors(family.read_spec(config))
    header: dict[str, object] = {}
    end = 0
    for tensor in (tensor for group in tensors.groups for tensor in group):
        for part in tensor.parts:
            shape = list(tensor.shape)
            if len(tensor.parts) > 1:
                shape[0] = {"q": hidden_size, "k": hidden_size // 2, "v": hidden_size // 2}.get(
                    part.split(".")[-2][0], intermediate_size
                )
            size = 2 * torch.Size(shape).numel()
            header[part] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
