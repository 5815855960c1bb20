"""Small models in the forms in which CPM-1, CPM-2 and EVA were published, and float32 twins of what `penstock
convert` makes of them: transformers' models, with decoding written once more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpm_folders import save_cpm1_model, save_cpm2, save_eva
from cpm_originals import Decode, Encode, cpm1, lines_of
from published_files import cpm1_ranks, cpm2_ranks, save_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MT5Config, MT5ForConditionalGeneration

#: Entries of the published vocabularies. Sentinels are the last 190.
CPM2_SIZE, EVA_SIZE, NUM_SENTINELS = 26240, 30000, 190
UNKNOWN, START, SEPARATOR, END = 0, 1, 4, 7
_T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "pad_token_id": 5,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


def save_published_cpm2(folder: Path) -> None:
    """Four shards of Megatron's, and vocab.txt. Sentinels and <eod> are likely, so that blanks end."""
    _fill_up(save_cpm2(folder), CPM2_SIZE)
    model = _t5(CPM2_SIZE, likely=[*range(CPM2_SIZE - NUM_SENTINELS, CPM2_SIZE - 180), END], seed=3)
    save_ranks(cpm2_ranks(model.state_dict(), 4), folder)
    (folder / "tokenizer_config.json").unlink()  # CPM-2 was published without any config


def save_tuned_cpm2(folder: Path, num_vectors: int) -> Tensor:
    """What CPM-2-Finetune saves after prompt tuning, without most of the model: the encoder's soft prompt,
    which is returned, is the same in the files of all ranks."""
    vectors = torch.randn(num_vectors, _T5["d_model"], generator=torch.Generator().manual_seed(5)).half()
    model = {"word_embeds.weight": torch.zeros(2, 2), "encoder.prompt_embeds.weight": vectors}
    save_ranks([model, model], folder)
    return vectors.float()


def save_published_eva(folder: Path) -> None:
    """A folder of the hub: EVA's config, and T5's tensors in a .bin."""
    _fill_up(save_eva(folder), EVA_SIZE)
    model = _t5(EVA_SIZE, likely=[SEPARATOR], seed=11)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    config = _T5 | {"vocab_size": EVA_SIZE, "bos_token_id": 29810, "eos_token_id": SEPARATOR}
    names = {"model_type": "eva", "architectures": ["EVAModel"], "attn_scale": False}
    (folder / "config.json").write_text(json.dumps(config | names))


def save_published_cpm1(folder: Path, prompt: str, answer: str) -> None:
    """Two shards of Megatron's, and CPM-1's sentencepiece model. Behind `prompt` comes `answer`."""
    save_cpm1_model(folder, prompt, answer)
    ranks = cpm1_ranks(load_file(folder / "model.safetensors"), 2)
    for file in folder.iterdir():
        if file.name != "spiece.model":  # CPM-1 was published without any config
            file.unlink()
    save_ranks(ranks, folder)


def _fill_up(folder: Path, size: int) -> None:
    """Rare words between the tiny vocabulary and the sentinels, so that these have their published ids."""
    lines = lines_of(folder)
    words, sentinels = lines[:-NUM_SENTINELS], lines[-NUM_SENTINELS:]
    rare = (chr(0x9000 + a) + chr(0x9000 + b) for a in range(200) for b in range(200))
    words += [next(rare) for _ in range(size - len(lines))]
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in words + sentinels), encoding="utf-8")


def _t5(vocab_size: int, likely: Sequence[int], seed: int) -> Any:
    """A random model that mostly writes the words of the tiny vocabulary, and often the `likely` tokens."""
    torch.manual_seed(seed)
    model = MT5ForConditionalGeneration(MT5Config(vocab_size=vocab_size, **_T5))
    with torch.no_grad():
        head = torch.randn(vocab_size, 64) / 8
        head[11:800] *= 2
        head[list(likely)] *= 7
        model.lm_head.weight = nn.Parameter(head)
    return model


def _dequantized(folder: Path) -> dict[str, Tensor]:
    """The tensors of a converted folder: integers times scales."""
    stored = {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_scale"):
            continue
        scale = stored.get(f"{name}_scale")
        tensors[name] = tensor.float() if scale is None else tensor.float() * scale.float()
    return tensors


@dataclass
class Twin:
    """A converted model in float32, with the original's tokenizer."""

    model: Any
    encode: Encode
    decode: Decode

    @classmethod
    def of_t5(cls, folder: Path, original: Any) -> Twin:
        tensors = _dequantized(folder)
        model = MT5ForConditionalGeneration(MT5Config(vocab_size=len(lines_of(folder)), **_T5))
        # transformers' MT5 ties head and embedding, whatever its config says.
        model.lm_head.weight = nn.Parameter(tensors["lm_head.weight"])
        for stack in ("encoder", "decoder"):
            tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"]
        model.load_state_dict(tensors)
        return cls(model.eval(), *original(folder))

    @classmethod
    def of_gpt2(cls, folder: Path) -> Twin:
        config = json.loads((folder / "config.json").read_text())
        # Penstock writes GPT-2's matrices as [out, in], and transformers' GPT-2 has [in, out].
        tensors = {
            name: tensor.t() if tensor.dim() == 2 and ".h." in name else tensor
            for name, tensor in _dequantized(folder).items()
        }
        model = GPT2LMHeadModel(
            GPT2Config(**{k: v for k, v in config.items() if k.startswith(("n_", "vocab"))})
        )
        model.load_state_dict(tensors | {"lm_head.weight": tensors["transformer.wte.weight"]})
        return cls(model.eval(), *cpm1(folder))

    @torch.inference_mode()
    def after_vectors(
        self, parts: Sequence[str | range], vectors: Tensor, min_tokens: int, max_tokens: int
    ) -> tuple[str, str]:
        """CPM-2-Finetune's form: rows of its soft prompt among texts, the first sentinel written by force;
        any sentinel ends the answer, behind `min_tokens` tokens."""
        words = self.model.shared.weight
        source = torch.cat(
            [words[self.encode(part)] if isinstance(part, str) else vectors[list(part)] for part in parts]
        )
        first = CPM2_SIZE - NUM_SENTINELS
        answer = [START, first]
        while len(answer) < max_tokens + 2:
            logits = self.model(inputs_embeds=source[None], decoder_input_ids=torch.tensor([answer])).logits[
                0, -1
            ]
            logits[UNKNOWN] = -torch.inf
            if len(answer) < min_tokens + 2:
                logits[[END, *range(first, CPM2_SIZE)]] = -torch.inf
            token = int(logits.argmax())
            if token == END or token >= first:
                return self.decode(answer[2:]), "stop"
            answer.append(token)
        return self.decode(answer[2:]), "length"

    @torch.inference_mode()
    def _next(self, source: list[int], answer: list[int], forbidden: set[int]) -> int:
        """The likeliest token after `answer`, but for the forbidden ones."""
        decoder = {"decoder_input_ids": torch.tensor([answer])} if answer else {}
        logits = self.model(input_ids=torch.tensor([source]), **decoder).logits[0, -1]
        logits[list(forbidden)] = -torch.inf
        return int(logits.argmax())

    def fill(self, pieces: Sequence[str], max_per_blank: int) -> list[tuple[str, str]]:
        """The text and the finish reason of each blank. BMInf's form, with the sentinels forced."""
        sentinels = range(CPM2_SIZE - NUM_SENTINELS, CPM2_SIZE)
        source = self.encode(pieces[0])
        for sentinel, piece in zip(sentinels, pieces[1:], strict=False):
            source += [sentinel, *self.encode(piece)]
        answer, found = [START], []
        for index in range(len(pieces) - 1):
            answer.append(sentinels[index])
            text: list[int] = []
            closing = {sentinels[index + 1]} | ({END} if index == len(pieces) - 2 else set())
            forbidden = {UNKNOWN, END, *sentinels} - closing
            reason = "length"
            while len(text) < max_per_blank:
                token = self._next(source, answer, forbidden)
                if token in closing:
                    reason = "stop"
                    break
                text.append(token)
                answer.append(token)
            found.append((self.decode(text), reason))
        return found

    def talk(self, texts: Sequence[str], max_tokens: int) -> tuple[str, str]:
        """EVA's answer to what was said, and its finish reason."""
        first = EVA_SIZE - NUM_SENTINELS
        source = [token for text in texts for token in (*self.encode(text), SEPARATOR)] + [first]
        answer = [first]
        while len(answer) <= max_tokens:
            token = self._next(source, answer, {UNKNOWN})
            if token == SEPARATOR:
                return self.decode(answer[1:]), "stop"
            answer.append(token)
        return self.decode(answer[1:]), "length"

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, str]:
        """CPM-1's continuation, and its finish reason."""
        source, answer = self.encode(prompt), list[int]()
        while len(answer) < max_tokens:
            token = self._next(source + answer, [], set())
            if token == END:
                return self.decode(answer), "stop"
            answer.append(token)
        return self.decode(answer), "length"
