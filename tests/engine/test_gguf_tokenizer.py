"""Tokenizers that are made of a GGUF file's tokens, by small vocabularies. Real ones are in
test_real_vocabularies.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_word_splits import TEXTS as SPLIT_TEXTS
from tiny_tokenizers import TEXTS, save_sentencepiece
from tokenizers import BertWordPieceTokenizer, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.gguf_file import read_metadata
from penstock.text.gguf_vocabulary import _first_again, end_tokens
from penstock.text.tokenizer import Tokenizer
from penstock.text.word_splits import WORD_RULES, Spelling

gguf = pytest.importorskip("gguf")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = "\u2581"


def write(path: Path, tokens: dict[str, int], **keys: Any) -> Path:
    """A file of a vocabulary alone: tokens and their kinds, and the words behind "tokenizer.ggml."."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        name = key.replace("__", ".")
        adders[type(value)](name if "." in name else f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, others: dict[str, int], pre: str = "qwen2", **keys: Any) -> Tokenizer:
    """A tokenizer of the letters, the words "Ġthe", "Ġt" and "he", and others."""
    tokens = dict.fromkeys([*LETTERS, "\u0120t", "he", "\u0120the"], NORMAL) | others
    keys = {"model": "gpt2", "pre": pre, "merges": ["\u0120 t", "h e", "\u0120t he"]} | keys
    return Tokenizer.load(write(path / "model.gguf", tokens, **keys))


BAR = "\uff5c"
CONTROLS = [f"<{BAR}begin{SPACE}of{SPACE}sentence{BAR}>", f"<{BAR}User{BAR}>", "<a name>", "<开始>", "[é]"]
DEEPSEEK_END = f"<{BAR}end{SPACE}of{SPACE}sentence{BAR}>"


@pytest.mark.parametrize("control", CONTROLS)
def test_control_tokens_of_any_characters_are_one_token(control: str, tmp_path: Path) -> None:
    """The names of these tokens are text, not GPT-2's spelling of bytes."""
    others = {control: CONTROL, "  ": USER_DEFINED, "\n\n": USER_DEFINED, "[PAD9]": UNUSED}
    tokenizer = byte_level(tmp_path, others, bos_token_id=259, eos_token_id=259, padding_token_id=259)
    assert tokenizer.vocab_size == 263
    assert tokenizer.encode(f"{control} the{control}") == [259, 258, 259]
    assert tokenizer.encode("a  the\n\n\n") == [LETTERS.index("a"), 260, *tokenizer.encode("the"), 261,
                                                  LETTERS.index("\u010a")]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("a  the\n\n\nx")) == "a  the\n\n\nx"
    assert tokenizer.decode([259, 258]) == " the"
    assert tokenizer.token_bytes(261) == b"\n\n" and tokenizer.bos_token_id == 259
    folder = tmp_path / "folder"
    tokenizer.backend.save_pretrained(folder)
    saved = Tokenizer.load(folder)
    assert saved.vocab_size == 263 and saved.encode(f"{control} the  \n\n") == [259, 258, 260, 261]


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("qwen2", False)])
def test_words_that_no_merges_reach(pre: str, is_whole: bool, tmp_path: Path) -> None:
    """Llama 3's words are tokens as a whole where the vocabulary has them."""
    tokenizer = byte_level(tmp_path, {"\u0120zebra": NORMAL}, pre, add_bos_token=False)
    assert (tokenizer.encode(" zebra") == [259]) == is_whole
    assert len(tokenizer.encode(" zebra the")) == (2 if is_whole else 7)


@pytest.mark.parametrize(
    ("pre", "keys", "begins", "ends"),
    [
        ("llama-bpe", {}, True, False),
        ("tekken", {}, True, False),
        ("qwen2", {}, False, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("roberta-bpe", {"seperator_token_id": 260}, False, True),
    ],
)
def test_tokens_around_a_prompt(
    pre: str, keys: dict[str, bool], begins: bool, ends: bool, tmp_path: Path
) -> None:
    ids = {"bos_token_id": 259, "eos_token_id": 260}
    tokenizer = byte_level(tmp_path, {"<s>": CONTROL, "</s>": CONTROL}, pre, **ids, **keys)
    assert tokenizer.encode(" the") == [259] * begins + [258] + [260] * ends
    assert tokenizer.encode(" the", add_special_tokens=False) == [258]


#: Texts and their words. The models' own tokenizers split them so.
SPLITS = {
    "deepseek-v3": (
        "12345 (and 你好ab'll\n!",
        ["123", "45", " (", "and", " ", "你好", "ab", "'ll", "\n", "!"],
    ),
    "llama-bpe": ("I'LL 12345\n\n  go", ["I", "'LL", " ", "123", "45", "\n\n", " ", " go"]),
    "qwen2": ("I'LL 123 (a)", ["I", "'LL", " ", "1", "2", "3", " (", "a", ")"]),
    "smollm": ("I'll 12 (a)", ["I", "'ll", " ", "1", "2", " (", "a", ")"]),
    "gpt-2": ("I'll 12 I'LL", ["I", "'ll", " 12", " I", "'", "LL"]),
    "gpt-4o": ("helloWorld it's /a/\n", ["hello", "World", " it's", " /", "a", "/\n"]),
    "tekken": ("helloWorld 12 it's", ["hello", "World", " ", "1", "2", " it", "'s"]),
    "default": ("12345, I'll", ["123", "45", ",", " I", "'", "ll"]),
    "bailingmoe": ("a\n\n\nb", ["a", "\n\n\n", "b"]),
    "superbpe": ("a 1234567", ["a ", "1", "234", "567"]),
    "afmoe": ("12345678", ["12", "345", "678"]),
    "tiny_aya": ("12345678", ["12", "345", "678"]),
    "kimi-k2": ("你好Hello 123", ["你好", "Hello", " ", "123"]),
    "falcon": ("a1234 b", ["a", "123", "4", " b"]),
    "bloom": ("Hi, you there", ["Hi", ",", " you", " there"]),
    "laguna": ("a\n\n b", ["a", "\n\n", " b"]),
    "minicpm5": ("1234 a", ["123", "4", " a"]),
    "deepseek-coder": ("a 12\nb", ["a", " ", "1", "2", "\n", "b"]),
    "deepseek-llm": ("a 12. 你", ["a", " ", "12", ".", " ", "你"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_words_are_split_as_the_model_splits_them(name: str, tmp_path: Path) -> None:
    text, words = SPLITS[name]
    backend = byte_level(tmp_path, {}, name).backend.backend_tokenizer
    pieces = [backend.decoder.decode([piece]) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == words


@pytest.mark.parametrize("name", WORD_RULES)
def test_every_rule_keeps_all_of_a_text(name: str, tmp_path: Path) -> None:
    text = "I'LL pay $12345.67, 你好 helloWorld?!\n\n\t  <sentinel:1> \u0301 한국 ﬁ\U0001f600 "
    if WORD_RULES[name].spelling is Spelling.BYTES:
        tokenizer = byte_level(tmp_path, {}, name)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    else:
        backend = pre_tokenizers.Split(WORD_RULES[name].splits[0], "isolated")
        assert "".join(piece for piece, _ in backend.pre_tokenize_str(text)) == text


def test_rules_that_are_not_known_are_refused_unless_a_guess_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnsupportedModel, match=r"rules 'new-2027'.*--guess-tokenizer"):
        byte_level(tmp_path, {}, "new-2027")
    guessed = Tokenizer.load(tmp_path / "model.gguf", guesses=True)
    assert guessed.encode(" the") == [258] and "'new-2027', which are not known here" in caplog.text
    caplog.clear()
    assert byte_level(tmp_path, {}, "").encode(" the") == [258]  # an old file
    assert "does not say by which rules" in caplog.text


@pytest.mark.parametrize("has_prefix", [True, False, None])
def test_sentencepiece(has_prefix: bool | None, tmp_path: Path) -> None:
    """Every space of a text is a token's, the first one too; a word at the beginning has a space of its own
    if the file asks for one, as sentencepiece itself encodes it."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    processor = save_sentencepiece(tmp_path / "source")
    size = processor.vocab_size()
    pieces = [processor.id_to_piece(index) for index in range(size)]
    kinds = [2, 3, 3] + [6 if processor.is_byte(index) else 1 for index in range(3, size)]
    scores = [float(processor.get_score(index)) for index in range(size)]
    keys: dict[str, Any] = {} if has_prefix is None else {"add_space_prefix": has_prefix}
    tokens = dict(zip(pieces, kinds, strict=True))
    file = write(tmp_path / "model.gguf", tokens, model="llama", scores=scores, unknown_token_id=0, **keys)
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())  # type: ignore[attr-defined]
    proto.normalizer_spec.add_dummy_prefix = has_prefix is not False
    oracle = SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = Tokenizer.load(file)
    tokenizer.backend.save_pretrained(tmp_path / "saved")
    for text in [*TEXTS, " the", "the", "  the  water ", "\n the", "1 \t x", "\u0394"]:
        for made in (tokenizer, Tokenizer.load(tmp_path / "saved")):
            assert made.encode(text) == [1, *oracle.encode(text)], text
            assert made.decode(made.encode(text)) == text


def test_runs_of_spaces_in_sentencepiece(tmp_path: Path) -> None:
    """As Gemma has them: tokens of the user, which files spell with spaces; the longest comes first."""
    tokens = {
        "<unk>": UNKNOWN,
        "<s>": CONTROL,
        "</s>": CONTROL,
        SPACE: NORMAL,
        "x": NORMAL,
        f"{SPACE}x": NORMAL,
    }
    tokens |= {" " * count: USER_DEFINED for count in range(2, 6)}
    keys: dict[str, Any] = {"scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0] + [-1000.0] * 4}
    file = write(
        tmp_path / "model.gguf", tokens, model="llama", add_space_prefix=False, add_bos_token=False, **keys
    )
    tokenizer = Tokenizer.load(file)
    assert tokenizer.encode(" x" + " " * 8 + "x") == [5, 9, 7, 4]
    assert tokenizer.decode(tokenizer.encode("x" + " " * 13)) == "x" + " " * 13


def test_spaces_and_newlines_of_gemma4(tmp_path: Path) -> None:
    """Merges, with sentencepiece's spelling; what is no token becomes bytes."""
    tokens = {
        "<pad>": CONTROL,
        "<bos>": CONTROL,
        "a": NORMAL,
        SPACE: NORMAL,
        f"{SPACE}a": NORMAL,
        "\n": NORMAL,
    }
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    merges = [f"{SPACE} a"]
    tokenizer = Tokenizer.load(
        write(tmp_path / "it.gguf", tokens, model="gemma4", merges=merges, bos_token_id=1)
    )
    assert tokenizer.encode(" a\na\u00e9") == [1, 4, 5, 2, 6 + 0xC3, 6 + 0xA9]
    assert tokenizer.decode([4, 5, 2, 6 + 0xC3, 6 + 0xA9]) == " a\na\u00e9"


def test_word_pieces_of_bert(tmp_path: Path) -> None:
    """Files mark beginnings of words with U+2581 and leave "##" out; texts are lowered, without accents."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-()"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces += ["the", "water", "##ing", "##er", "\u4f60", "\u597d", "hello", "##world", "12", "##34"]
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    names = [
        piece if index < 5 else piece[2:] if piece.startswith("##") and len(piece) > 2 else f"{SPACE}{piece}"
        for index, piece in enumerate(pieces)
    ]
    kinds = [CONTROL] * 5 + [NORMAL] * (len(names) - 5)
    special = {"cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    tokens = dict(zip(names, kinds, strict=True))
    file = write(tmp_path / "it.gguf", tokens, model="bert", pre="jina-v2-en", mask_token_id=4, **special)
    tokenizer = Tokenizer.load(file)
    oracle = BertWordPieceTokenizer(ids, lowercase=True)
    for text in [*SPLIT_TEXTS, "Hello World, watering 1234!", "caf\u00e9 \u4f60\u597d"]:
        assert tokenizer.encode(text) == oracle.encode(text).ids, text
    assert tokenizer.encode("the [MASK]", False) == [ids["the"], 4]


def test_unigrams(tmp_path: Path) -> None:
    """As sentencepiece itself encodes, with its table of characters."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2

    texts = [text for text in SPLIT_TEXTS if text.strip()]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3), model_prefix=str(tmp_path / "it"), vocab_size=250,
        model_type="unigram", normalization_rule_name="nmt_nfkc", num_threads=1, minloglevel=2,
        character_coverage=0.98,
    )  # fmt: skip
    oracle = SentencePieceProcessor(model_file=str(tmp_path / "it.model"))
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(oracle.serialized_model_proto())  # type: ignore[attr-defined]
    size = oracle.vocab_size()
    pieces = [oracle.id_to_piece(index) for index in range(size)]
    charsmap = list(proto.normalizer_spec.precompiled_charsmap)
    file = write(
        tmp_path / "it.gguf", dict(zip(pieces, [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * size, strict=False)),
        model="t5", scores=[float(oracle.get_score(index)) for index in range(size)], bos_token_id=1,
        eos_token_id=2, unknown_token_id=0, remove_extra_whitespaces=True,
        precompiled_charsmap=charsmap,
    )  # fmt: skip
    tokenizer = Tokenizer.load(file)
    for text in texts:
        assert tokenizer.encode(text) == [*oracle.encode(text), 2], text
    assert tokenizer.decode(tokenizer.encode("the water")) == "the water"


ENDS: list[tuple[dict[str, int], dict[str, int], set[str]]] = [
    ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, {"eos": 1}, {"<|return|>", "<|call|>"}),
    ({"<|end|>": 3, "<|assistant|>": 3, "</s>": 3}, {"eos": 2}, {"<|end|>", "</s>"}),
    ({"<|end|>": 3, "<|flush|>": 3, "<|calls|>": 3}, {"eos": 1}, {"<|flush|>", "<|calls|>"}),
    ({"<|im_end|>": 1, "<own>": 3}, {"eos": 1}, {"<|im_end|>", "<own>"}),
    ({"</s>": 4, "<eos>": 3, "<end_of_turn>": 3}, {"eos": 1}, {"<eos>", "<end_of_turn>"}),
    ({"a": 1, "b": 3, "c": 3}, {"eos": 0, "eot": 1, "eom": 2}, {"a", "b", "c"}),
    ({DEEPSEEK_END: 3, "x": 1}, {"eos": 9}, {DEEPSEEK_END}),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "ids", "names"), ENDS)
def test_tokens_that_end_an_answer(
    tokens: dict[str, int], ids: dict[str, int], names: set[str], tmp_path: Path
) -> None:
    keys = {f"{name}_token_id": token_id for name, token_id in ids.items()}
    metadata = read_metadata(write(tmp_path / "model.gguf", tokens, **keys))
    assert {list(tokens)[token_id] for token_id in end_tokens(metadata)} == names


def test_control_tokens_that_a_file_calls_normal(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, {"<|im_end|>": NORMAL})
    assert tokenizer.encode(" the<|im_end|>") == [258, 259]
    assert tokenizer.eos_token_ids == {259} and 259 in tokenizer.special_token_ids


def test_control_tokens_of_phi3_take_the_space_behind_them(tmp_path: Path) -> None:
    others = {"<|user|>": CONTROL, "<|endoftext|>": CONTROL}
    for name, num_tokens in (("Phi-3 mini", 1), ("Phi 4", 2)):
        tokenizer = byte_level(tmp_path, others, general__name=name)
        assert len(tokenizer.encode("<|user|>\n")) == num_tokens
        assert len(tokenizer.encode("<|endoftext|>\n")) == 2


def test_chat_templates_by_name(tmp_path: Path) -> None:
    keys = {"tokenizer__chat_template": "plain", "tokenizer__chat_template__tool_use": "tools"}
    tokenizer = byte_level(tmp_path, {}, **keys)
    assert tokenizer.backend.chat_template == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.tool_template == "tools"


@pytest.mark.parametrize(
    ("others", "keys", "message"),
    [
        ({}, {"model": "rwkv"}, "kind 'rwkv'.*reads gpt2, llama"),
        ({}, {"merges": ["x"]}, "no merges"),
        ({}, {"token_type": [1, 1]}, "no list of 259 numbers as tokenizer.ggml.token_type"),
    ],
)
def test_vocabularies_that_are_none(
    others: dict[str, int], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModel, CorruptFile), match=message):
        byte_level(tmp_path, others, **keys)


def test_a_token_that_is_there_twice(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["a", "b", "a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CorruptFile, match="the token 'a' twice"):
        Tokenizer.load(tmp_path / "model.gguf")


def test_a_token_that_is_too_long_for_sentencepiece(tmp_path: Path) -> None:
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "a": NORMAL, "ab" * 2048: NORMAL}
    file = write(tmp_path / "model.gguf", tokens, model="llama", scores=[0.0] * 5)
    assert Tokenizer.load(file).vocab_size == 5
    file = write(
        tmp_path / "model.gguf", tokens | {"ab" * 2048 + "c": NORMAL}, model="llama", scores=[0.0] * 6
    )
    with pytest.raises(CorruptFile, match="a token of 4097 characters .* 'abab") as raised:
        Tokenizer.load(file)
    assert len(str(raised.value)) < 1000


class Counted(str):
    """A token that counts how often two tokens are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return str(self) == other

    __hash__ = str.__hash__


def test_a_token_that_is_there_twice_is_found_in_one_pass() -> None:
    tokens = [Counted(f"t{index}") for index in range(2000)]
    assert _first_again([*tokens, Counted("t1999")]) == "t1999"
    assert 0 < Counted.num_compared < 2 * len(tokens)


def test_a_plain_twin(tmp_path: Path) -> None:
    """The same tokenizer, made by hand."""
    tokenizer = byte_level(tmp_path, {}, "gpt-2")
    ids = {token: token_id for token_id, token in enumerate([*LETTERS, "\u0120t", "he", "\u0120the"])}
    plain = Backend(models.BPE(ids, [("\u0120", "t"), ("h", "e"), ("\u0120t", "he")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    for text in [*TEXTS, "I'll see  the 12 \n\n x's"]:
        assert tokenizer.encode(text) == plain.encode(text).ids
