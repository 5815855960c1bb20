"""Tiny tokenizers of the two great families, trained in a moment, whose tokens cut characters apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = [
    "the water runs down the pipe and the wheel turns",
    "中文模型在中国的大模型中文本",
    "😀😁👨‍👩‍👧 café e\u0301te\u0301 água",
]


def save_byte_level(folder: Path) -> None:
    """Byte-level BPE; merges know no word boundaries, so some tokens hold the end of one Chinese character
    and the beginning of the next. Ids 0 to 2 are <bos>, <eos> and <note>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<bos>", "<eos>", "<note>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=["<note>"],
    ).save_pretrained(folder)


def save_sentencepiece(folder: Path) -> Any:
    """A Llama-2 style tokenizer.json, byte fallback and all; returns the sentencepiece processor itself."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / "trained")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:1] * 20),
        model_prefix=prefix,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    model = f"{prefix}.model"
    vocab, _, merges = SentencePieceExtractor(model).extract(True)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return sentencepiece.SentencePieceProcessor(model_file=model)
