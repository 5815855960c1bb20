"""Folders of tiny models that make vectors and scores, with tokenizers of a few English words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

# fmt: off
WORDS = [
    "a", "the", "pipe", "feeds", "water", "to", "turbine", "from", "dam", "cat", "sat", "on", "mat", "what",
    "is", "of", "river", "power", "query", "text",
]
# fmt: on
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "no", "yes"]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip


def save_tokenizer(folder: Path, is_decoder: bool = False) -> Any:
    """BERT's form: [CLS] text [SEP], and a second text behind it with [SEP]; or a decoder's, whose texts end
    with [SEP]."""
    vocab = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]" if is_decoder else "[CLS] $A [SEP]",
        pair="$A $B [SEP]" if is_decoder else "[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    return fast


def save(folder: Path, kind: str, is_decoder: bool = False, **more: Any) -> Any:
    """A random model of transformers' class `kind`."""
    model_class = getattr(transformers, kind)
    torch.manual_seed(7)
    model = model_class(model_class.config_class(**SIZES | more)).float().eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, is_decoder)
    return model


def save_modules(
    folder: Path, pooling: str, prompts: dict[str, str] | None = None, is_normal: bool = True
) -> None:
    """What sentence-transformers writes for a model that pools so. is_normal: vectors have length 1."""
    names = ("Transformer", "Pooling", "Normalize")[: 2 + is_normal]
    paths = ("", "1_Pooling", "2_Normalize")[: 2 + is_normal]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    told = {"prompts": prompts or {}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
