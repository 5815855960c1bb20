"""Make the demo mixture: the demo model with experts in place of its mlps, trained on the same text.

    python engine/demo/mixture.py --output DIR [--steps 500]

The neurons of each mlp of the demo model are dealt out to experts (sparse upcycling, arXiv 2212.05055), and
all weights are trained further. So a mixture needs a fraction of the demo model's training: a quarter of an
hour of one CPU core that multiplies bfloat16. (The shipped mixture began with the learning rates of a longer
training, and ended with those of this one.) DIR becomes a Hugging Face folder in float32, which
`penstock convert` turns into the folder that ships.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import train
from muon import StackedMuon
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

DEMO = Path(__file__).parents[1] / "penstock/demo_model"
NUM_EXPERTS, NUM_CHOSEN, WIDTH = 16, 4, 64
STEPS = 500
#: Sequences of a step, half of those of the demo model: the mixture begins where a model is trained already.
BATCH = 2
PEAK_LR = 5e-3
#: How much the loss counts that has all experts used alike.
BALANCE = 0.01
SEED, HELD_OUT_SEED = 11, train.HELD_OUT_SEED
#: Names in transformers' memory, and in files.
FILE_NAMES = ((".mlp.gate.", ".block_sparse_moe.gate."), (".mlp.experts.", ".block_sparse_moe.experts."))


def new_model() -> MixtralForCausalLM:
    """The demo model with experts, before training."""
    torch.manual_seed(SEED)
    demo = json.loads((DEMO / "config.json").read_text())
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    config = MixtralConfig(
        **{name: demo[name] for name in same},
        intermediate_size=WIDTH,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        sliding_window=None,
    )
    config._experts_implementation = "grouped_mm"
    model = MixtralForCausalLM(config)
    weights = train.stored_weights(DEMO)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        for index, layer in enumerate(model.model.layers):
            _deal_out(layer.mlp.experts, weights, f"model.layers.{index}.mlp.")
    return model


def _deal_out(experts: Any, weights: dict[str, Tensor], prefix: str) -> None:
    """Give each expert some neurons of an mlp, every neuron to one expert at least. A token's experts have
    scores whose sum is 1, so what they give back is multiplied by their number."""
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    count = len(gate)
    rounds = -(-NUM_EXPERTS * WIDTH // count)
    order = torch.cat([torch.randperm(count) for _ in range(rounds)])[: NUM_EXPERTS * WIDTH]
    for expert, own in enumerate(order.view(NUM_EXPERTS, WIDTH)):
        experts.gate_up_proj[expert].copy_(torch.cat((gate[own], up[own])))
        experts.down_proj[expert].copy_(down[:, own] * NUM_CHOSEN)


def loss_of(model: MixtralForCausalLM, chunk: train.Chunk, balance: float = 0.0) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(input_ids=chunk.inputs, use_cache=False, output_router_logits=True)
    loss = functional.cross_entropy(found.logits.float().flatten(0, 1), chunk.labels.flatten())
    return loss + balance * found.aux_loss if balance else loss


def optimizers(model: MixtralForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings, norms and routers."""
    named = list(model.named_parameters())
    stacks = [tensor for name, tensor in named if tensor.ndim == 3]
    matrices = [tensor for name, tensor in named if name.endswith("_proj.weight")]
    rest = {id(tensor) for tensor in stacks + matrices}
    others = [tensor for _, tensor in named if id(tensor) not in rest]
    return [
        StackedMuon(stacks, lr=PEAK_LR, weight_decay=0.1),
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def halves(chunks: Iterator[train.Chunk]) -> Iterator[train.Chunk]:
    """The chunks of the demo model's training in pieces of BATCH sequences."""
    for chunk in chunks:
        for first in range(0, len(chunk.inputs), BATCH):
            yield train.Chunk(chunk.inputs[first : first + BATCH], chunk.labels[first : first + BATCH])


def fit(model: MixtralForCausalLM, tokenizer: Any, steps: int) -> None:
    updates, stream = optimizers(model), halves(train.chunks(tokenizer, SEED))
    start, total = time.perf_counter(), 0.0
    model.train()
    for step in range(steps):
        loss = loss_of(model, next(stream), BALANCE)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in updates:
            optimizer.param_groups[0]["lr"] = PEAK_LR * train.learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 25 == 0:
            minutes = (time.perf_counter() - start) / 60
            print(f"step {step + 1}/{steps}  loss {total / 25:.4f}  {minutes:.1f} min", flush=True)
            total = 0.0
    model.eval()


@torch.inference_mode()
def held_out_loss(model: MixtralForCausalLM, tokenizer: Any) -> float:
    stream = train.chunks(tokenizer, HELD_OUT_SEED)
    return sum(loss_of(model, next(stream)).item() for _ in range(8)) / 8


def file_tensors(model: MixtralForCausalLM) -> dict[str, Tensor]:
    """The tensors as Mixtral's files have them: each expert's three matrices apart."""
    found: dict[str, Tensor] = {}
    for stored, parameter in model.named_parameters():
        name = stored
        for ours, theirs in FILE_NAMES:
            name = name.replace(ours, theirs)
        if parameter.ndim < 3:
            found[name] = parameter.detach()
            continue
        prefix, kind = name.rsplit(".", 1)
        for number, matrix in enumerate(parameter.detach()):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            words = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            pairs = zip(words, parts, strict=True)
            found |= {f"{prefix}.{number}.{word}.weight": part.contiguous() for word, part in pairs}
    return found


def write_folder(model: MixtralForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    config = model.config.to_dict() | {"architectures": ["MixtralForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(file_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Penstock's demo mixture.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model in float32")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (fewer: a try)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    model = new_model()
    print(f"{model.num_parameters():,} parameters", flush=True)
    fit(model, tokenizer._tokenizer, arguments.steps)
    write_folder(model, arguments.output)
    print(f"held-out loss {held_out_loss(model, tokenizer._tokenizer):.4f}", flush=True)
    train.show_samples(model, tokenizer)


if __name__ == "__main__":
    main()
