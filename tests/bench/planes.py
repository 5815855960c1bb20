"""Planes: how often the upper four bits of INT8 weights choose the token that all eight choose.

    python tests/bench/planes.py MODEL --text FILE

An integer q is 16 h + l, with h from -8 to 7. The draft model has 16 h + 8 in place of q (half a step above
the upper plane) in the matrices of all layers, and computes its own keys and values. Both models are plain
torch in float32. Choices are those of the sampler: the likeliest token, or the first token whose cumulative
probability exceeds a number that both models share. In brackets is what no way of drawing exceeds: one less
the total variation between both models' distributions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import Tokenizer
from penstock.config import GROUP_SIZES
from penstock.model.registry import open_model
from penstock.weights.quantize import quantize
from penstock.weights.store import WeightStore

CONTEXT, NUM_WINDOWS = 256, 24
#: Tokens of a prompt, and of the answer that INT8 gives.
PROMPT, ANSWER = 48, 96
CHAINS = (1, 4, 8)
TEMPERATURES = (0.0, 0.7, 1.0)


def model_with(store: WeightStore, change: Callable[[Tensor], Tensor]) -> Any:
    """transformers' model in float32: `change` applied to the matrices of the layers, embedding and head in
    INT8."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(store.checkpoint.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    inner = {part for layer in store.tensors.layers for tensor in layer for part in tensor.parts}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            exact = store.read_exact(name)
            if exact.dim() == 2:
                exact = change(exact) if name in inner else quantize(exact).dequantize()
            parameter.copy_(exact)
    return model.eval()


def both_planes(weight: Tensor, group_size: int) -> Tensor:
    return quantize(weight, group_size).dequantize()


def upper_plane(weight: Tensor, group_size: int) -> Tensor:
    found = quantize(weight, group_size)
    return found._replace(qweight=(found.qweight >> 4) * 16 + 8).dequantize()


def choose(logits: Tensor, draws: Tensor, temperature: float) -> Tensor:
    """Tokens for logits [..., vocab_size] and draws [...] from 0 to 1; at temperature 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    weights = ((logits.double() - logits.amax(-1, keepdim=True)) / temperature).exp().cumsum(-1)
    return torch.searchsorted(weights, draws[..., None] * weights[..., -1:], right=True)[..., 0]


def overlap(ours: Tensor, drafts: Tensor, temperature: float) -> float:
    """The mean of sum(min(p, q)) over all positions, for logits [..., vocab_size]."""
    one, other = ((logits.double() / temperature).softmax(-1) for logits in (ours, drafts))
    return float(torch.minimum(one, other).sum(-1).mean())


def answers(model: Any, prompts: Tensor, draws: Tensor, temperature: float) -> Tensor:
    """Prompts [num_prompts, PROMPT] and what the model says after them: [num_prompts, PROMPT + ANSWER]."""
    ids, state, new = prompts, None, prompts
    for step in range(ANSWER):
        out = model(new, past_key_values=state, use_cache=True)
        state, new = out.past_key_values, choose(out.logits[:, -1], draws[:, step], temperature)[:, None]
        ids = torch.cat((ids, new), 1)
    return ids


def accepted(agrees: Tensor, length: int) -> float:
    """The mean number of drafts that come true of chains of `length` drafts, from every place of an answer.
    agrees: bool [num_answers, ANSWER]. A draft counts if all drafts of its chain before are right: until then
    both models have seen the same tokens."""
    chains = agrees.unfold(1, length, 1).long()
    return float(chains.cumprod(-1).sum(-1).double().mean())


@torch.inference_mode()
def compare(int8: Any, draft: Any, ids: Tensor) -> list[str]:
    """Cells of the table: for each temperature the agreement on a text, and the accepted drafts."""
    cells, generator = [], torch.Generator().manual_seed(0)
    ours, drafts = int8(ids).logits, draft(ids).logits
    for temperature in TEMPERATURES:
        draws = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        same = choose(ours, draws, temperature) == choose(drafts, draws, temperature)
        draws = torch.rand((len(ids), ANSWER), generator=generator, dtype=torch.float64)
        said = answers(int8, ids[:, :PROMPT], draws, temperature)
        guesses = choose(draft(said[:, :-1]).logits[:, PROMPT - 1 :], draws, temperature)
        agrees = guesses == said[:, PROMPT:]
        chains = " / ".join(f"{accepted(agrees, length):.2f}" for length in CHAINS)
        most = f" ({overlap(ours, drafts, temperature):.1%})" if temperature else ""
        cells += [f"{float(same.double().mean()):.1%}{most}", chains]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    arguments = parser.parse_args()
    store = open_model(arguments.model).store
    tokens = Tokenizer.load(arguments.model).encode(arguments.text.read_text())
    num_windows = min(NUM_WINDOWS, len(tokens) // CONTEXT)
    ids = torch.tensor(tokens[: num_windows * CONTEXT]).view(num_windows, CONTEXT)
    heads = [f"temperature {t} | drafts of {', '.join(map(str, CHAINS))}" for t in TEMPERATURES]
    print(f"{ids.numel()} tokens of text, {num_windows} answers of {ANSWER} tokens\n")
    print(f"| scales | {' | '.join(heads)} |\n|{'---|' * (1 + 2 * len(heads))}")
    widths = {t.shape[1] for layer in store.tensors.layers for t in layer if t.is_matrix}
    for size in (0, *reversed(GROUP_SIZES)):
        if size and any(width % size for width in widths):
            print(f"| groups of {size} |{' - |' * 2 * len(heads)}", flush=True)
            continue
        models = (
            model_with(store, lambda weight, size=size, plane=plane: plane(weight, size))  # type: ignore[misc]
            for plane in (both_planes, upper_plane)
        )
        cells = compare(*models, ids)
        name = f"groups of {size}" if size else "per channel"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
