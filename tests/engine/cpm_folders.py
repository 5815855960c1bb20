"""Folders with the tokenizers of CPM-1, CPM-2, EVA, CPM-Ant and CPM-Ant+ in their real form, of a small
vocabulary: the special tokens have the ids that the published vocabularies give them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from cpm_originals import cut

SENTENCES = [
    "天空是蔚蓝色的，窗外有一只猫在睡觉。",
    "今天天气很好，我们去公园散步吧！",
    "这本书讲了什么？老师说：“认真读三遍。”",
    "他在北京的一所大学学习计算机科学；她在上海工作。",
    "机器学习模型可以写诗、对话（也会出错）…",
    "春天来了，桃花开了，小河里的水流得很快。",
    "晚饭我们吃火锅，好不好？好的，七点在门口见。",
    "语言模型根据前面的文字预测下一个词。",
    "山上有一座老房子，房子里住着一位老人和他的狗。",
    "请帮我把这句话翻译成英文，谢谢。",
    "Hello world, the model reads 2021 words in 3.14 seconds: GPT-2!",
    "the quick brown fox is playing with the language models",
    "卡拉OK厅里，大家唱歌 跳舞\n一直到深夜",
]
ENGLISH = [
    *("hello", "world", "the", "model", "quick", "brown", "fox", "is", "play", "with", "language", "read"),
    *("OK", "##s", "##ing", "##OK", "##ed", "##l", "##o", "##2", "##1", "##.", "##4"),
]
#: Texts with all that the originals' rules look at.
TEXTS = [
    "天空是蔚蓝色，窗外有",
    "今天 天气  很好，\n\n我们去公园",
    "Hello world, the models are playing with 2021 words.",
    "他说：“好的！”……（笑）；《书》、ｆｕｌｌ　Ｗｉｄｔｈ１２３．＃％～",
    "😀 龘靐齉 한국 é\tß\u3000\u00a0x",
    "卡拉OK bar 唱歌 sing",
    "<eod> <s_0> </_> <s> ## ##ing \u2581 \u2582 \u2583",
    "a b  c\r\nd\n",
    "a" * 200 + " " + "a" * 201,
    " ",
    "\n",
    *SENTENCES,
]

#: With what the vocabularies of CPM-1 and CPM-2 begin.
SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "\u2583",
    "<sep>",
    "<pad>",
    "<mask>",
    "<eod>",
    "\u2581",
    ",",
    "\u2582",
]


def save_cpm1(folder: Path, file: str = "spiece.model", **tokenizer_config: Any) -> Path:
    """A sentencepiece model as CPM-1's: trained on words that spaces join, with the marks and <eod> among the
    ordinary pieces, and the other special tokens as control pieces."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(_trained_model())
    for number, piece, score in ((3, "\u2583", -2.0), (7, "<eod>", 0.0)):
        proto.pieces[number].piece, proto.pieces[number].score = piece, score
        proto.pieces[number].type = proto.pieces[number].NORMAL
    first = {"\u2581": -1.7, ",": -3.1, "\u2582": -3.4}
    trained = {piece.piece: piece.score for piece in proto.pieces[8:] if piece.piece != "\u2583"}
    del proto.pieces[8:]
    for piece, score in (first | trained).items():
        proto.pieces.add(piece=piece, score=score)
    _save(folder, tokenizer_config)
    (folder / file).write_bytes(proto.SerializeToString())
    return folder


def _trained_model() -> bytes:
    import sentencepiece

    texts = [" ".join(cut(text.replace(" ", "\u2582").replace("\n", "\u2583"))) for text in SENTENCES]
    texts.append(" ".join(map(chr, range(0x21, 0x7F))))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 20),
        model_writer=model,
        vocab_size=500,
        hard_vocab_limit=False,
        character_coverage=1.0,
        control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def save_cpm1_vocabulary(folder: Path) -> Path:
    """CPM-1's pieces as a text file, as BMInf has them: pieces that begin a word begin with U+2581."""
    words = [f"\u2581{word}" for word in _words()]
    return _save_lines(folder, [*SPECIALS, *words, *_characters(SPECIALS)], "CpmTokenizer")


def save_cpm2(folder: Path) -> Path:
    lines = [*SPECIALS, *_words(), *_characters(SPECIALS), *_sentinels(190)]
    return _save_lines(folder, lines, "CPM2Tokenizer")


def save_cpm2_english(folder: Path) -> Path:
    specials = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<go>", "<eod>", "\u2581"]
    specials += [",", "\u2582"]
    chinese = [word for word in _words() if not word.isascii()]
    lines = [*specials, *chinese, *_characters(specials), *ENGLISH, *_sentinels(185)]
    return _save_lines(folder, lines, "CPM2Tokenizer")


def save_eva(folder: Path) -> Path:
    """EVA's ninth line is empty. Published folders name a wrong tokenizer class."""
    specials = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>", "", ",", "\u2582"]
    lines = [*specials, *_words(), *_characters(specials), *_sentinels(190)]
    _save_lines(folder, lines, "CpmTokenizerFast")
    (folder / "config.json").write_text(json.dumps({"model_type": "eva", "architectures": ["EVAModel"]}))
    return folder


def save_ant(folder: Path) -> Path:
    specials = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"]
    lines = [*specials, *_characters(specials), *_words(), *(f"<s{number}>" for number in range(59))]
    return _save_lines(folder, lines, "CPMAntTokenizer")


def save_ant_plus(folder: Path) -> Path:
    """Pieces go on from word to word, and the names of special tokens are their only pieces of that shape."""
    specials = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"]
    across = ["，我们", "的，", "o w", ". "]
    return _save_lines(folder, [*specials, *_characters(specials), *_words(), *across], "CPMAntPlusTokenizer")


def _words() -> list[str]:
    """Parts of SENTENCES of two to four characters, so that longest matches overlap."""
    parts = {text[i : i + n] for text in SENTENCES for i in range(0, len(text), 2) for n in (2, 3, 4)}
    return sorted(part for part in parts if part.isalnum() and len(part) > 1)


def _characters(besides: list[str]) -> list[str]:
    found = {*"".join(SENTENCES), *map(chr, range(0x21, 0x7F))}
    return sorted(found.difference(besides, " \n"))


def _sentinels(number: int) -> list[str]:
    return [f"<s_{index}>" for index in range(number)]


def _save_lines(folder: Path, lines: list[str], tokenizer_class: str) -> Path:
    _save(folder, {"tokenizer_class": tokenizer_class})
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def _save(folder: Path, tokenizer_config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def save_cpm1_model(folder: Path, prompt: str, answer: str) -> Path:
    """A model of CPM-1's kind: GPT-2's weights with 1024 positions, transformers' wrong end token in the
    configs, and a tokenizer as CPM-1's. Positions decide the next token: behind `prompt` the model writes
    `answer` and then <eod>, if the prompt has the tokens that CPM-1's own tokenizer gives."""
    import torch
    from cpm_originals import cpm1
    from transformers import GPT2Config, GPT2LMHeadModel

    save_cpm1(folder, tokenizer_class="CpmTokenizer", eos_token="</s>", cls_token="<cls>")
    encode, _ = cpm1(folder)
    tokens = [*encode(prompt), *encode(answer), 7]
    vocab_size = _vocab_size(folder / "spiece.model")
    torch.manual_seed(5)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab_size, n_embd=64, n_layer=2, n_head=4, n_positions=1024)
    )
    with torch.no_grad():
        words, positions = model.transformer.wte.weight, model.transformer.wpe.weight
        words.normal_()
        positions[: len(tokens) - 1] = 8 * words[tokens[1:]]
    model.save_pretrained(folder)
    return folder


def _vocab_size(model: Path) -> int:
    from sentencepiece import SentencePieceProcessor

    return int(SentencePieceProcessor(model_file=str(model)).vocab_size())
