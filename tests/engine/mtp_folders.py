"""Tiny models whose files hold a head of multi-token prediction, and the head's formula in plain torch around
transformers' layer: transformers has no code for heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import dequantized
from tiny_models import MODELS, SMALL, build
from torch import Tensor

from conftest import save_byte_tokenizer
from penstock.weights.quantize import quantize

NUM_LAYERS = SMALL["num_hidden_layers"]


class Names(NamedTuple):
    """Of a head's modules in files, and in what heads differ."""

    #: The beginning of the names of its layer.
    layer: str
    #: A module of the formula -> its name.
    modules: dict[str, str]
    #: What files have less than the weights of norms.
    offset: float = 0.0
    #: A further token's row gets the state behind the last norm.
    is_normed: bool = False


_DEEPSEEKS = f"model.layers.{NUM_LAYERS}."
_OF_DEEPSEEK = Names(
    _DEEPSEEKS, {part: _DEEPSEEKS + part for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}
)
_OF_QWEN = Names(
    "mtp.layers.0.",
    {
        "eh_proj": "mtp.fc",
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "shared_head.norm": "mtp.norm",
    },
    offset=1.0,
    is_normed=True,
)


class PlainHead:
    """The last layer of transformers' model is the head's."""

    def __init__(
        self, model: transformers.PreTrainedModel, parts: dict[str, Tensor], is_normed: bool
    ) -> None:
        self.model, self.inner, self.is_normed = model, model.model, is_normed
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
            out = self._layer(joined @ self.parts["eh_proj"].t())[-1]
            normed = self._norm("shared_head.norm", out)
            if first + len(given) == len(text):
                return self.model.lm_head(normed)
            given.append(normed if self.is_normed else out)

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
    is_qwen = name.startswith("Qwen")
    own = _OF_QWEN if is_qwen else _OF_DEEPSEEK
    sizes = {"num_hidden_layers": NUM_LAYERS + 1, "vocab_size": 278} | sizes
    if is_qwen:  # the head's layer has attention
        kinds = ["linear_attention"] * (NUM_LAYERS - 1) + ["full_attention"] * 2
        sizes |= {"layer_types": kinds}
    model = dequantized(build(name, folder, **sizes), folder)
    generator, width = torch.Generator().manual_seed(5), MODELS[name][1]["hidden_size"]
    parts = {
        "eh_proj": 0.2 * torch.randn(width, 2 * width, generator=generator),
        **{
            norm: 1 + 0.3 * torch.randn(width, generator=generator)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    path, last = folder / "model.safetensors", f"model.layers.{NUM_LAYERS}."
    tensors = {key.replace(last, own.layer): tensor for key, tensor in load_file(path).items()}
    for part, tensor in parts.items():
        offset = 0.0 if part == "eh_proj" else own.offset
        tensors[f"{own.modules[part]}.weight"] = tensor - offset
    if not is_qwen:  # checkpoints hold the model's embedding and head once more
        tensors[f"{last}embed_tokens.weight"] = torch.zeros(4, width)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    count = "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"
    config |= {"num_hidden_layers": NUM_LAYERS, count: 1}
    for key in ("layer_types", "mlp_layer_types"):
        if key in config:
            config[key] = config[key][:NUM_LAYERS] if is_qwen else None
    (folder / "config.json").write_text(json.dumps(config))
    return PlainHead(model, parts | {"eh_proj": quantize(parts["eh_proj"]).dequantize()}, own.is_normed)
