"""Train a larger model on the demo's text, so that the demo model can draft for a model that is streamed.

    python engine/demo/larger.py --output DIR [--small-output DIR] [--copy-steps 360] [--steps 10]

The larger model has 36 million parameters (12 layers, hidden size 512) and the demo's tokenizer. It begins as
the demo model: that is trained to write texts again, edit and quote them (`copies.py`), then made twice as
wide and twice as deep without a change of what it computes (Net2Net: Chen et al. 2016, arXiv 1511.05641;
layers that add nothing at first, as in LLaMA Pro, arXiv 2401.02415), and trained further. Training it from
nothing would take days. DIR becomes a Hugging Face folder in INT8; --small-output keeps the small model that
was trained on copies, a draft model, in the same form.

Two threads took 45 minutes for 363 and 10 steps, on two cores that others used most of the time; a step of
the small model takes about 2 seconds where nothing else runs. In that run the learning rate followed the
cosine of 450 steps for 338, and then fell to zero in a straight line: it was to have 450 and 30 steps, and
had no time for them. The numbers of steps above have not been run as they stand, and will give somewhat
other models. `OMP_WAIT_POLICY=passive` makes threads that wait leave the core to others.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import train
from copies import copied, documents_with_copies
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).parents[1] / "penstock/demo_model"
COPY_STEPS, COPY_LR = 360, 4e-3
STEPS, LR = 10, 4e-4
#: Tokens of a sequence and sequences of a step, first of the demo model, then of the larger one.
COPY_SHAPE, SHAPE = (8, 512), (4, 512)
NUM_LAYERS, WIDER = 12, 2
SEED, HELD_OUT_SEED = 21, 29
RECIPE = train.Recipe(documents_with_copies, SEED, LR, train.SHORT, train.CHAT_TEMPLATE)


def shaped(tokenizer: Tokenizer, seed: int, shape: tuple[int, int]) -> Iterator[train.Chunk]:
    """Chunks of rows, each of which begins with a document: no answer is there without its request."""
    num_rows, length = shape
    stream = documents_with_copies(seed)
    while True:
        rows: list[list[tuple[int, bool]]] = [[] for _ in range(num_rows)]
        for row in rows:
            while len(row) <= length:
                row += train.encode(tokenizer, next(stream))
        tokens = torch.tensor([row[: length + 1] for row in rows])  # (token, is it learned?)
        ids = tokens[..., 0]
        labels = torch.where(tokens[..., 1] > 0, ids, train.IGNORED)
        yield train.Chunk(ids[:, :-1], labels[:, 1:])


@dataclass(frozen=True)
class Copying:
    """How well a model copies, on texts it has not seen: the mean loss of an answer's token, the share of
    tokens that are the likeliest behind the right ones, and of answers of which every token is."""

    loss: float
    right_tokens: float
    right_answers: float

    def __str__(self) -> str:
        shares = f"{self.right_tokens:.1%} of tokens, {self.right_answers:.0%} of answers"
        return f"copies: loss {self.loss:.4f}, right {shares}"


@torch.inference_mode()
def copying(model: LlamaForCausalLM, tokenizer: Tokenizer, count: int = 48) -> Copying:
    model.eval()  # type: ignore[no-untyped-call]
    dice = random.Random(HELD_OUT_SEED)
    losses: list[Tensor] = []
    right: list[Tensor] = []
    for _ in range(count):
        document = torch.tensor(train.encode(tokenizer, copied(dice)))
        ids, is_learned = document[:, 0], document[1:, 1] > 0
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        wanted, found = ids[1:][is_learned], logits[is_learned]
        losses.append(torch.nn.functional.cross_entropy(found, wanted, reduction="none"))
        right.append(found.argmax(dim=1) == wanted)
    answers = sum(bool(each.all()) for each in right) / count
    return Copying(torch.cat(losses).mean().item(), torch.cat(right).float().mean().item(), answers)


def fit(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    chunks: Iterator[train.Chunk],
    steps: int,
    peak_lr: float,
    updates: list[torch.optim.Optimizer],
) -> None:
    """Train with a warm-up and a cosine, as train.fit() does."""
    start, total = time.perf_counter(), 0.0
    model.train()
    for step in range(steps):
        loss = train.loss_of(model, next(chunks), is_bfloat16=False)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in updates:
            optimizer.param_groups[0]["lr"] = peak_lr * train.learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 10 == 0:
            minutes = (time.perf_counter() - start) / 60
            print(f"step {step + 1}/{steps}  loss {total / 10:.4f}  {minutes:.1f} min", flush=True)
            total = 0.0
        if (step + 1) % 50 == 0:
            print(copying(model, tokenizer), flush=True)
            model.train()
    model.eval()  # type: ignore[no-untyped-call]


def grown_config(config: LlamaConfig) -> LlamaConfig:
    """The config of the larger model."""
    return LlamaConfig(
        **{
            **config.to_dict(),
            "hidden_size": WIDER * config.hidden_size,
            "intermediate_size": WIDER * config.intermediate_size,
            "num_attention_heads": WIDER * config.num_attention_heads,
            "num_key_value_heads": WIDER * (config.num_key_value_heads or config.num_attention_heads),
            "num_hidden_layers": NUM_LAYERS,
        }
    )


def grown(small: LlamaForCausalLM) -> LlamaForCausalLM:
    """A larger model that computes what the small one does."""
    model = LlamaForCausalLM(grown_config(small.config))
    torch.manual_seed(train.MODEL_SEED)
    names = dict(small.named_parameters())
    copies = NUM_LAYERS // small.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source, is_new = name, False
            if name.startswith("model.layers."):
                index, rest = name.removeprefix("model.layers.").split(".", 1)
                source, is_new = f"model.layers.{int(index) // copies}.{rest}", int(index) % copies > 0
            parameter.copy_(widened(name, names[source]))
            if is_new and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # a layer that adds nothing
    return model


def widened(name: str, weight: Tensor) -> Tensor:
    """A parameter for hidden states, heads and neurons that are there twice. What two copies of an input are
    multiplied with adds up to the old weight, in shares drawn at random, so that the copies learn apart."""
    if weight.ndim == 1:
        doubled = weight.repeat(WIDER)
        # The head is the embedding: it would add up both copies.
        return doubled / WIDER if name == "model.norm.weight" else doubled
    if "embed" in name:
        return weight.repeat(1, WIDER)
    rows = weight.repeat(WIDER, 1)
    share = torch.empty_like(rows).uniform_(0.25, 0.75)
    return torch.cat((share * rows, (1 - share) * rows), dim=1)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    chunks = shaped(tokenizer, HELD_OUT_SEED, SHAPE)
    return sum(train.loss_of(model, next(chunks), is_bfloat16=False).item() for _ in range(8)) / 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a larger model on the demo's text.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the INT8 model")
    parser.add_argument("--small-output", type=Path, help="folder for the small model, in INT8")
    parser.add_argument("--copy-steps", type=int, default=COPY_STEPS, help="steps of the demo model")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the larger model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    small = train.new_model(tokenizer, train.SHORT)
    small.load_state_dict(train.stored_weights(DEMO), strict=False)  # the head is the embedding
    print(f"held-out loss {held_out_loss(small, tokenizer):.4f} (the demo model)", flush=True)
    print(copying(small, tokenizer), flush=True)
    chunks = shaped(tokenizer, SEED, COPY_SHAPE)
    fit(small, tokenizer, chunks, arguments.copy_steps, COPY_LR, train.optimizers(small))
    print(f"held-out loss {held_out_loss(small, tokenizer):.4f}", flush=True)
    chat = train.chat_tokenizer(tokenizer, RECIPE)
    if arguments.small_output:
        train.write_folder(small, chat, train.quantized_tensors(small), arguments.small_output)
    model = grown(small)
    print(f"{model.num_parameters():,} parameters", flush=True)
    updates = [torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)]
    fit(model, tokenizer, shaped(tokenizer, SEED + 1, SHAPE), arguments.steps, LR, [*updates])
    train.write_folder(model, chat, train.quantized_tensors(model), arguments.output)
    print(f"held-out loss {held_out_loss(model, tokenizer):.4f}", flush=True)
    print(copying(model, tokenizer), flush=True)


if __name__ == "__main__":
    main()
