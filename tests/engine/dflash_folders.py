"""Folders of DFlash heads as z-lab publishes them, and the head's formula in plain torch: transformers has no
code for such heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.weights.quantize import quantize

BLOCK, MASK, NUM_LAYERS = 6, 271, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN = 4, 2, 24, 80
EPS = 1e-5


def config_of(model: transformers.PreTrainedModel, layers: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a head that reads hidden states behind these layers of a model."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": model.config.hidden_size, "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS, "vocab_size": model.config.vocab_size, "rms_norm_eps": EPS,
        "rope_theta": 5000.0, "max_position_embeddings": 192, "block_size": BLOCK,
        "num_target_layers": model.config.num_hidden_layers, "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(layers)},
    }  # fmt: skip


class PlainDFlash:
    """The head beside transformers' model."""

    def __init__(
        self, model: transformers.PreTrainedModel, parts: dict[str, Tensor], layers: tuple[int, ...]
    ) -> None:
        self.model, self.parts, self.layers = model, parts, layers
        self.rotary = LlamaRotaryEmbedding(
            transformers.LlamaConfig(
                hidden_size=NUM_HEADS * HEAD_DIM, num_attention_heads=NUM_HEADS, rope_theta=5000.0
            )
        )

    @torch.inference_mode()
    def logits(self, text: list[int], first: int = 0) -> Tensor:
        """Of the tokens behind a text, [BLOCK - 1, vocab_size]. The head knows the text from the place
        `first`."""
        states = self._states(text)[first : len(text) - 1]
        context = self._norm("hidden_norm", states @ self.parts["fc"].t())
        tokens = torch.tensor([text[-1]] + [MASK] * (BLOCK - 1))
        x = self.model.get_input_embeddings().weight[tokens]
        for index in range(NUM_LAYERS):
            x = self._layer(f"layers.{index}.", x, context)
        return self._norm("norm", x[1:]) @ self.model.get_output_embeddings().weight.t()

    def _states(self, text: list[int]) -> Tensor:
        """The model's hidden states behind the listed layers, side by side."""
        heard: dict[int, Tensor] = {}
        hooks = [
            layer.register_forward_hook(
                lambda module, args, out, index=index: heard.update(
                    {index: out[0] if isinstance(out, tuple) else out}
                )
            )
            for index, layer in enumerate(self.model.model.layers)
        ]
        self.model(torch.tensor([text]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([heard[index].view(len(text), -1) for index in self.layers], dim=1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.parts[name]

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """[1, num_heads, num_rows, head_dim]"""
        return (x @ self.parts[name].t()).view(1, len(x), -1, HEAD_DIM).transpose(1, 2)

    def _layer(self, path: str, block: Tensor, context: Tensor) -> Tensor:
        own = self._norm(f"{path}input_layernorm", block)
        attention, rows = f"{path}self_attn.", torch.cat((context, own))
        q = self._norm(f"{attention}q_norm", self._heads(f"{attention}q_proj", rows))
        k = self._norm(f"{attention}k_norm", self._heads(f"{attention}k_proj", rows))
        v = self._heads(f"{attention}v_proj", rows)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(rows[None], torch.arange(len(rows))[None]))
        y = functional.scaled_dot_product_attention(q[:, :, len(context) :], k, v, enable_gqa=True)
        block = block + y.transpose(1, 2).reshape(len(block), -1) @ self.parts[f"{attention}o_proj"].t()
        x = self._norm(f"{path}post_attention_layernorm", block)
        gate, up = (x @ self.parts[f"{path}mlp.{name}_proj"].t() for name in ("gate", "up"))
        return block + (functional.silu(gate) * up) @ self.parts[f"{path}mlp.down_proj"].t()


def save_dflash(folder: Path, model: transformers.PreTrainedModel, layers: tuple[int, ...]) -> PlainDFlash:
    """A head for a model; its config.json and tensors are in `folder`."""
    generator, width = torch.Generator().manual_seed(7), model.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, len(layers) * width), "hidden_norm": (width,), "norm": (width,),
    }  # fmt: skip
    for index in range(NUM_LAYERS):
        path = f"layers.{index}."
        shapes |= {
            f"{path}self_attn.q_proj": (NUM_HEADS * HEAD_DIM, width),
            f"{path}self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, width),
            f"{path}self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, width),
            f"{path}self_attn.o_proj": (width, NUM_HEADS * HEAD_DIM),
            f"{path}self_attn.q_norm": (HEAD_DIM,),
            f"{path}self_attn.k_norm": (HEAD_DIM,),
            f"{path}input_layernorm": (width,),
            f"{path}post_attention_layernorm": (width,),
            f"{path}mlp.gate_proj": (FFN, width),
            f"{path}mlp.up_proj": (FFN, width),
            f"{path}mlp.down_proj": (width, FFN),
        }
    exact = {
        name: (0.2 if len(shape) > 1 else 0.3) * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(model, layers)))
    save_file({f"{name}.weight": tensor for name, tensor in exact.items()}, folder / "model.safetensors")
    parts = {name: quantize(t).dequantize() if t.dim() > 1 else t for name, t in exact.items()}
    return PlainDFlash(model, parts, layers)
