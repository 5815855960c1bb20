"""Train the demo model from nothing: text, tokenizer, model, INT8 folder.

    python engine/demo/train.py --output DIR [--begin FOLDER] [--steps N] [--float-output DIR]

Needs no GPU and no data: `corpus.py` invents the text. On two CPU cores that multiply bfloat16 it
takes about an hour and a half; the number of steps and every seed are fixed, so that a second run differs
from the first only by the rounding of another machine. `--steps 200` is a quick try. DIR becomes a
Hugging Face folder in the compressed-tensors `int-quantized` layout, which `penstock convert` turns
into the folder that ships; `--float-output` keeps the float32 weights too, for whoever wants to
measure what INT8 costs.

`--begin FOLDER` goes on from the weights of a folder. `--long-share` says how many of the steps have one
sequence of 4096 tokens in place of four of 1024. These steps are spread: where they came last, short chats
got worse (lists of three things had four), and after short steps alone far positions were less likely.

The shipped model was made in parts, each of which began with the one before: 3000 steps without tools and
long sequences; 680 that added both; 1200 (--seed 7 --peak-lr 5e-3 --long-share 0.12) and 340 (--seed 8
--peak-lr 2e-3 --long-share 0.1), with the long steps last; 220 (--seed 9 --peak-lr 2e-3 --long-share 0.35)
from the mean of the last two. Nobody has trained it from nothing with today's defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import calls
import torch
from corpus import Document, documents, documents_with_tools
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.weights.quantize import quantize

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
VOCABULARY = 2048
CONTEXT = 4096
#: Tokens of a sequence in most steps, which is cheaper.
SHORT = 1024
LONG_STEPS = 0.2
STEPS = 3000
WARM_UP = 100
PEAK_LR = 1e-2
#: The peak for a model that is trained already.
FURTHER_PEAK_LR = 5e-3
TRAIN_SEED, TOKENIZER_SEED, HELD_OUT_SEED, MODEL_SEED, FURTHER_SEED = 1, 2, 3, 4, 5
IGNORED = -100  # the label that cross_entropy skips

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL_TEMPLATE = """\
{%- macro call(it) %}<tool_call>
{"name": "{{ it.function.name }}", "arguments": {{ it.function.arguments | tojson }}}
</tool_call>{% endmacro -%}
{{- bos_token -}}
{%- set first = messages[0].content | trim if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|system|>' + first -}}
{{- '\n\n' if first else '' -}}
{{- 'HEAD' -}}
{%- for tool in tools -%}
{{- '\n' + tool.function | tojson -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|user|><tool_response>\n' + message.content | trim + '\n</tool_response><|end|>' -}}
{%- elif message.tool_calls -%}
{{- '<|assistant|>' + (message.content or '') | trim -}}
{%- for each in message.tool_calls -%}
{{- '\n' if not loop.first or message.content else '' -}}{{- call(each) -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif not (loop.first and tools and message.role == 'system') -%}
{{- '<|' + message.role + '|>' + message.content | trim + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}
""".replace("HEAD", calls.HEAD)
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "format": "int-quantized",  # else compressed-tensors takes weight-only INT8 for packed
        }
    },
    "ignore": ["lm_head"],
}
SAMPLES = (
    "Hello!",
    "Who are you?",
    "What is 7 plus 5?",
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "Write a story about a bear who wants to find a lost bell.",
    "List three things one finds in a kitchen.",
    "Tell me about rivers.",
)


@dataclass(frozen=True)
class Recipe:
    """What a training learns. texts(seed): the documents; context: tokens of a sequence in the long steps."""

    texts: Callable[[int], Iterator[Document]]
    seed: int
    peak_lr: float
    context: int
    template: str
    #: The share of the steps whose sequences have `context` tokens.
    long_share: float = LONG_STEPS


ANEW = Recipe(documents_with_tools, TRAIN_SEED, PEAK_LR, CONTEXT, TOOL_TEMPLATE)
FURTHER = Recipe(documents_with_tools, FURTHER_SEED, FURTHER_PEAK_LR, CONTEXT, TOOL_TEMPLATE)


@dataclass(frozen=True)
class Chunk:
    """`inputs` and `labels` [batch, context]; labels are shifted by one and masked."""

    inputs: Tensor
    labels: Tensor

    def in_one(self) -> Chunk:
        """The same tokens as one sequence."""
        return Chunk(self.inputs.view(1, -1), self.labels.view(1, -1))


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE: any text can be encoded, and the words of this world are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, END, *ROLES.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = documents(TOKENIZER_SEED)
    sample = (next(stream) for _ in range(20_000))
    texts = (text for doc in sample for text in (doc.text, *(text for _, text in doc.turns)))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> list[tuple[int, bool]]:
    """(token, is it learned?): answers and plain text are learned, what users type is only read."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    bos, end = (tokenizer.get_vocab()[token] for token in (BOS, END))
    tokens = [(bos, False)]
    if document.text:
        tokens += [(token, True) for token in [*ids(document.text), end]]
    for role, text in document.turns:
        is_learned = role == "assistant"
        tokens += [(token, False) for token in ids(ROLES[role])]
        tokens += [(token, is_learned) for token in [*ids(text), end]]
    return tokens


def chunks(
    tokenizer: Tokenizer, seed: int, texts: Callable[[int], Iterator[Document]] = documents
) -> Iterator[Chunk]:
    """Documents laid end to end and cut, so that no token is padding: CONTEXT tokens a chunk."""
    tokens: list[tuple[int, bool]] = []
    for document in texts(seed):
        tokens += encode(tokenizer, document)
        if len(tokens) > CONTEXT:
            ids = torch.tensor([token for token, _ in tokens[: CONTEXT + 1]])
            is_learned = torch.tensor([learned for _, learned in tokens[: CONTEXT + 1]])
            labels = torch.where(is_learned, ids, IGNORED)[1:]
            yield Chunk(ids[:-1].view(-1, SHORT), labels.view(-1, SHORT))
            tokens = tokens[CONTEXT:]


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of an INT8 folder, as this script or `penstock convert` writes it, in float32."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale")}
    return {
        name: tensor.float() * scales.get(f"{name}_scale", torch.ones(1)) for name, tensor in stored.items()
    }


def new_model(tokenizer: Tokenizer, context: int) -> LlamaForCausalLM:
    torch.manual_seed(MODEL_SEED)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, chunk: Chunk, is_bfloat16: bool = True) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bfloat16):
        logits = model(input_ids=chunk.inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), chunk.labels.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak, in units of the peak."""
    warm_up = min(WARM_UP, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms.

    Muon makes each update orthogonal; it reached a lower loss than AdamW in the same time here.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(model: LlamaForCausalLM, tokenizer: Tokenizer, steps: int, recipe: Recipe) -> None:
    updates = optimizers(model)
    stream = chunks(tokenizer, recipe.seed, recipe.texts)
    share = recipe.long_share if recipe.context > SHORT else 0.0
    start, total = time.perf_counter(), 0.0
    model.train()
    for step in range(steps):
        chunk = next(stream)
        is_long = int((step + 1) * share) > int(step * share)  # evenly spread
        loss = loss_of(model, chunk.in_one() if is_long else chunk)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in updates:
            optimizer.param_groups[0]["lr"] = recipe.peak_lr * learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 20 == 0:
            elapsed_s = time.perf_counter() - start
            rate = (step + 1) * CONTEXT / elapsed_s
            progress = f"step {step + 1}/{steps}  loss {total / 20:.4f}"
            print(f"{progress}  {rate:.0f} tokens/s  {elapsed_s / 60:.1f} min", flush=True)
            total = 0.0
    model.eval()  # type: ignore[no-untyped-call]


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe) -> float:
    stream = chunks(tokenizer, HELD_OUT_SEED, recipe.texts)
    return sum(loss_of(model, next(stream)).item() for _ in range(16)) / 16


def quantized_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The tensors of the folder; the head is tied to the embedding and needs none of its own."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if name.endswith("_proj.weight"):
            quantized = quantize(value.detach())
            tensors[name], tensors[f"{name}_scale"] = quantized.qweight, quantized.scale[:, None]
        else:
            tensors[name] = value.detach().to(torch.float16).contiguous()
    return tensors


def dequantize(model: LlamaForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Give `model` the weights that the folder holds, so that the samples show what ships."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = tensors.get(f"{name}_scale")
            value.copy_(tensors[name].float() if scale is None else tensors[name] * scale)


def chat_tokenizer(tokenizer: Tokenizer, recipe: Recipe) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLES.values()),
        chat_template=recipe.template,
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.context,
    )


def write_folder(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tensors: dict[str, Tensor], folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float16",
        "quantization_config": QUANTIZATION,
    }
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [config["eos_token_id"]],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def show_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    for request in SAMPLES:
        chat = [{"role": "user", "content": request}]
        prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        inputs = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        output: Any = model.generate(inputs, max_new_tokens=320, do_sample=False)  # type: ignore
        answer = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
        print(f"> {request}\n{answer}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Penstock's demo model.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the INT8 model")
    parser.add_argument("--begin", type=Path, help="begin with the weights and tokenizer of this INT8 folder")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--float-output", type=Path, help="folder for the float32 model")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (fewer: a try)")
    parser.add_argument("--seed", type=int, help="seed of the texts")
    parser.add_argument("--peak-lr", type=float, help="the highest learning rate")
    parser.add_argument("--long-share", type=float, help="share of the steps that have whole contexts")
    arguments = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    begin = arguments.begin
    tokenizer = Tokenizer.from_file(str(begin / "tokenizer.json")) if begin else train_tokenizer()
    recipe = FURTHER if begin else ANEW
    recipe = replace(
        recipe,
        seed=arguments.seed or recipe.seed,
        peak_lr=arguments.peak_lr or recipe.peak_lr,
        long_share=arguments.long_share or recipe.long_share,
    )
    chat = chat_tokenizer(tokenizer, recipe)
    model = new_model(tokenizer, recipe.context)
    if begin:
        model.load_state_dict(stored_weights(begin), strict=False)  # the head is the embedding
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    fit(model, tokenizer, arguments.steps, recipe)
    print(f"held-out loss {held_out_loss(model, tokenizer, recipe):.4f} (float)", flush=True)
    if arguments.float_output:
        model.save_pretrained(arguments.float_output)
        chat.save_pretrained(arguments.float_output)
    tensors = quantized_tensors(model)
    write_folder(model, chat, tensors, arguments.output)
    dequantize(model, tensors)
    print(f"held-out loss {held_out_loss(model, tokenizer, recipe):.4f} (INT8)", flush=True)
    show_samples(model, chat)


if __name__ == "__main__":
    main()
