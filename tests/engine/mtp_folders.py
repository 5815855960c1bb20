"""Tiny models whose files hold a head of multi-token prediction, and the head's formula in plain torch around
transformers' layer: transformers has no code for heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import dequantized
from tiny_models import MODELS, SMALL, build
from torch import Tensor

from conftest import save_byte_tokenizer
from penstock.weights.quantize import quantize

NUM_LAYERS = SMALL["num_hidden_layers"]


class PlainHead:
    """The last layer of transformers' model is the head's."""

    def __init__(self, model: transformers.PreTrainedModel, parts: dict[str, Tensor]) -> None:
        self.model, self.inner = model, model.model
        self.parts = parts

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.parts[name]

    @torch.inference_mode()
    def logits(self, text: list[int], num_guesses: int = 0, first: int = 1) -> Tensor:
        """Of what follows a text that ends in so many guesses. The head's first row is that of the token at
        the place `first`."""
        num_known = len(text) - num_guesses
        states: list[Tensor] = []
        hook = self.inner.layers[NUM_LAYERS].register_forward_pre_hook(
            lambda module, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        self.inner(torch.tensor([text[:num_known]]), use_cache=False)
        hook.remove()
        given = list(self.inner.norm(states[0][0])[first - 1 : num_known - 1])
        while True:
            tokens = torch.tensor(text[first : first + len(given)])
            vectors, hidden = self.inner.embed_tokens(tokens), torch.stack(given)
            joined = torch.cat((self._norm("enorm", vectors), self._norm("hnorm", hidden)), dim=1)
            out = self._layer(joined @ self.parts["eh_proj"].t())
            if first + len(given) == len(text):
                return self.model.lm_head(self._norm("shared_head.norm", out[-1]))
            given.append(out[-1])

    def _layer(self, x: Tensor) -> Tensor:
        size = len(x)
        positions = torch.arange(size)[None]
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        out = self.inner.layers[NUM_LAYERS](
            x[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.inner.rotary_emb(x[None], positions),
        )
        return (out[0] if isinstance(out, tuple) else out).view(size, -1)


def save_with_head(name: str, folder: Path, **sizes: Any) -> PlainHead:
    """A model of MODELS, of NUM_LAYERS layers and a head behind them, with a tokenizer."""
    save_byte_tokenizer(folder)
    sizes = {"num_hidden_layers": NUM_LAYERS + 1, "vocab_size": 278} | sizes
    model = dequantized(build(name, folder, **sizes), folder)
    generator, width = torch.Generator().manual_seed(5), MODELS[name][1]["hidden_size"]
    parts = {
        "eh_proj": 0.2 * torch.randn(width, 2 * width, generator=generator),
        **{
            norm: 1 + 0.3 * torch.randn(width, generator=generator)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    path, layer = folder / "model.safetensors", f"model.layers.{NUM_LAYERS}."
    names = {f"{layer}{part}.weight": tensor for part, tensor in parts.items()}
    # Checkpoints hold the model's embedding and head once more.
    names |= {f"{layer}embed_tokens.weight": torch.zeros(4, width)}
    save_file(load_file(path) | names, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    config.pop("layer_types", None)
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return PlainHead(model, parts | {"eh_proj": quantize(parts["eh_proj"]).dequantize()})
