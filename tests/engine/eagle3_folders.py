"""Folders of EAGLE-3 heads, in the two forms in which they are published, and the head's formula in plain
torch: transformers has no code for such heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from test_families import dequantized
from tiny_models import SMALL, build
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from conftest import save_byte_tokenizer
from penstock.weights.quantize import quantize

VOCABULARY, DRAFTS, NUM_LAYERS = 278, 90, 4
#: The layers of the model, from 0, whose hidden states the head reads.
LAYERS = (0, 2, 3)
#: The head's own sizes; its hidden state is as wide as the model's where it shares the model's embedding.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 80,
    "num_hidden_layers": 1, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "max_position_embeddings": 192, "hidden_act": "silu", "model_type": "llama",
}  # fmt: skip
EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"


class PlainEagle3:
    """The head beside transformers' model."""

    def __init__(
        self, model: transformers.PreTrainedModel, parts: dict[str, Tensor], adds_to_normed: bool
    ) -> None:
        self.model, self.parts, self.adds_to_normed = model, parts, adds_to_normed
        config = transformers.LlamaConfig(**{**SIZES, "hidden_size": parts["fc"].shape[0]})
        self.num_heads, self.num_kv_heads, self.head_dim = 8, 4, config.hidden_size // 8
        self.rotary = LlamaRotaryEmbedding(config)
        self.tokens = parts["tokens"]

    @torch.inference_mode()
    def logits(self, text: list[int], num_guesses: int = 0, first: int = 1) -> Tensor:
        """Of the draft vocabulary, of what follows a text that ends in so many guesses. The head's first row
        is that of the token at the place `first`."""
        num_known = len(text) - num_guesses
        states = list(self._states(text[:num_known])[first - 1 : num_known - 1] @ self.parts["fc"].t())
        while True:
            vectors = self.parts["embed_tokens"][torch.tensor(text[first : first + len(states)])]
            out = self._layer(vectors, torch.stack(states))
            if first + len(states) == len(text):
                return self._norm("norm", out[-1]) @ self.parts["lm_head"].t()
            states.append(out[-1])

    def _states(self, text: list[int]) -> Tensor:
        """The model's hidden states behind LAYERS, side by side."""
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
        return torch.cat([heard[index].view(len(text), -1) for index in LAYERS], dim=1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.parts[name]

    def _layer(self, vectors: Tensor, states: Tensor) -> Tensor:
        normed = self._norm("hidden_norm", states)
        x = torch.cat((self._norm("input_layernorm", vectors), normed), dim=1)
        q, k, v = (
            (x @ self.parts[f"{name}_proj"].t()).view(1, len(x), -1, self.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x[None], torch.arange(len(x))[None]))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).reshape(len(x), -1) @ self.parts["o_proj"].t()
        y = y + (normed if self.adds_to_normed else states)
        x = self._norm("post_attention_layernorm", y)
        gate, up = (x @ self.parts[f"{name}_proj"].t() for name in ("gate", "up"))
        return y + (functional.silu(gate) * up) @ self.parts["down_proj"].t()


def save_model(folder: Path) -> transformers.PreTrainedModel:
    """The model that heads guess for, with a tokenizer."""
    save_byte_tokenizer(folder)
    return dequantized(build("Llama", folder, num_hidden_layers=NUM_LAYERS, vocab_size=VOCABULARY), folder)


def save_sglangs(folder: Path, model: transformers.PreTrainedModel) -> PlainEagle3:
    """A head as EAGLE's authors and SGLang have it: without an embedding, its layer is "midlayer", in a
    pickle."""
    tensors, parts = _tensors(64, has_embedding=False)
    parts["embed_tokens"] = model.model.embed_tokens.weight.detach()
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTS,
        "eagle_config": {EAGLE_IDS: list(LAYERS), "use_aux_hidden_state": True},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    torch.save(named, folder / "pytorch_model.bin")
    return PlainEagle3(model, parts, adds_to_normed=False)


def save_speculators(folder: Path, model: transformers.PreTrainedModel) -> PlainEagle3:
    """A head as vLLM's speculators have it: with an embedding and another width than the model's."""
    tensors, parts = _tensors(48, has_embedding=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFTS,
        "target_hidden_size": SMALL["hidden_size"],
        "norm_before_residual": True,
        EAGLE_IDS: [layer + 1 for layer in LAYERS],
        "transformer_layer_config": {**SIZES, "hidden_size": 48},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return PlainEagle3(model, parts, adds_to_normed=True)


def _tensors(width: int, has_embedding: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A folder's tensors, and what their INT8 stands for, by the names of modules."""
    generator, head_dim = torch.Generator().manual_seed(width), width // 8
    shapes = {
        "q_proj": (8 * head_dim, 2 * width),
        "k_proj": (4 * head_dim, 2 * width),
        "v_proj": (4 * head_dim, 2 * width),
        "o_proj": (width, 8 * head_dim),
        "gate_proj": (80, width),
        "up_proj": (80, width),
        "down_proj": (width, 80),
        "fc": (width, 3 * SMALL["hidden_size"]),
        "lm_head": (DRAFTS, width),
        "embed_tokens": (VOCABULARY, width),
    }
    exact = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("norm", "hidden_norm", "input_layernorm", "post_attention_layernorm"):
        exact[name] = 1 + 0.3 * torch.randn(width, generator=generator)
    if not has_embedding:
        del exact["embed_tokens"]
    tensors = {f"{_path(name)}{name}.weight": tensor for name, tensor in exact.items()}
    tokens = torch.randperm(VOCABULARY, generator=generator)[:DRAFTS].sort().values
    tensors["d2t"] = tokens - torch.arange(DRAFTS)
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens, True)
    parts = {name: quantize(t).dequantize() if t.dim() > 1 else t for name, t in exact.items()}
    return tensors, parts | {"tokens": tokens}


def _path(name: str) -> str:
    if name in ("gate_proj", "up_proj", "down_proj"):
        return "layers.0.mlp."
    if name.endswith("_proj"):
        return "layers.0.self_attn."
    return "layers.0." if name.endswith("norm") and name != "norm" else ""
