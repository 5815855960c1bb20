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


#: How the sentencepiece models that people have were trained. Their normalizers, dummy prefixes, byte pieces
#: and user-defined pieces are what a tokenizer has to get right.
SENTENCEPIECE_FORMS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "mistral": {
        "model_type": "bpe", "vocab_size": 440, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "control_symbols": ["[INST]", "[/INST]", "[TOOL_CALLS]"], "user_defined_symbols": ["[IMG]", "->"],
    },
    "gemma": {
        "model_type": "bpe", "vocab_size": 460, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>",
        "user_defined_symbols": [
            "<start_of_turn>", "<end_of_turn>", "<table>",
            *("\n" * n for n in range(1, 8)), *("\u2581" * n for n in range(2, 8)), "\t", "\t\t",
        ],
    },
    "unigram": {
        "model_type": "unigram", "vocab_size": 140, "normalization_rule_name": "nmt_nfkc",
        "control_symbols": ["<sep>"], "user_defined_symbols": ["\u2582", "<eod>"], "character_coverage": 0.98,
    },
    "unigram with bytes": {
        "model_type": "unigram", "vocab_size": 380, "normalization_rule_name": "nmt_nfkc_cf",
        "byte_fallback": True, "character_coverage": 0.98, "bos_id": -1,
    },
}  # fmt: skip
_SENTENCEPIECE_TEXTS = [
    *TEXTS,
    "the temperature of the water is 20 degrees,  and the wheel -> turns 1234 times",
    "    return there,    and the others    then turn    them",
    "the aaaa aaaaaa bbbb ==== ======== and ----",
]


def train_sentencepiece(file: Path, form: str) -> Any:
    """A sentencepiece model of one of SENTENCEPIECE_FORMS; returns its processor."""
    import sentencepiece

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_SENTENCEPIECE_TEXTS * 20),
            model_writer=model,
            num_threads=1,
            minloglevel=2,
            hard_vocab_limit=False,
            **SENTENCEPIECE_FORMS[form],
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def save_gemma(folder: Path) -> None:
    """Gemma's tokenizer.json: runs of spaces are added tokens, spelled with U+2581."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

    model = folder / "tokenizer.model"
    processor = train_sentencepiece(model, "gemma")
    vocab, _, merges = SentencePieceExtractor(str(model)).extract(True)
    model.unlink()
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    user_defined = SENTENCEPIECE_FORMS["gemma"]["user_defined_symbols"]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    assert processor.vocab_size() == tokenizer.get_vocab_size()


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
