"""A sentencepiece model alone against the sentencepiece package, in the forms that people's models have."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import SENTENCEPIECE_FORMS, save_sentencepiece, train_sentencepiece

from penstock.errors import CheckpointNotFound, ConfigError, CorruptFile
from penstock.text.chat import render_chat
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer

PARTS = [
    *"ab the water#<>s/=3\n\t\r\x00",
    *"é中模😀\u0301\u2581\u3000\u00a0\u200b\ufeff①ﬁＡİß",
    *(
        "  ",
        "   ",
        "        ",
        "\n\n",
        "\n\n\n",
        "\t\t",
        "the ",
        " water",
        "aaa",
        "====",
        "中文",
        "👨‍👩‍👧",
        "🇩🇪",
        "1234",
    ),
    *("->", "[IMG]", "<table>", "<start_of_turn>", "<eod>", "\u2582", "\u2581\u2581", "<0x41>", "<s", "< s>"),
]
TEXTS = [
    "", " ", "  ", " a", "  a", "a ", "a  ", "a   b", "\n", "\n\n\na", " \n \n", "\ta\t", "a\r\nb", "\u2581",
    "\u2581a b\u2581",
    "    return there,    and the others", "the water  runs  down", "中文模型在中国的大模型",
    "cafe\u0301 e\u0301", "😀😁👨‍👩‍👧",
    "literal <0x41> <unk", "ＦＵＬＬ　ｗｉｄｔｈ ①②③ ﬁ", "1234567890 3.14", "a" * 70, "=" * 33,
    " " * 41 + "x", "<", ">", "x\x00y\x7f\x85",
]  # fmt: skip


def random_texts(number: int) -> list[str]:
    dice = random.Random(5)
    return ["".join(dice.choices(PARTS, k=dice.randint(1, 25))) for _ in range(number)]


ALL_TEXTS = [text for text in TEXTS + random_texts(500) if "<s>" not in text]


@pytest.fixture(scope="module", params=SENTENCEPIECE_FORMS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """The tokenizer of a folder that has the model and nothing else, and sentencepiece's own processor."""
    folder = tmp_path_factory.mktemp("alone")
    processor = train_sentencepiece(folder / "tokenizer.model", request.param)
    return Tokenizer.load(folder), processor


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a model of each form, named after it."""
    folder = tmp_path_factory.mktemp("trained")
    for form in SENTENCEPIECE_FORMS:
        train_sentencepiece(folder / form / "tokenizer.model", form)
    return folder


def with_config(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def control_pieces(processor: Any) -> dict[str, int]:
    ids = (i for i in range(processor.vocab_size()) if processor.is_control(i) or processor.is_unknown(i))
    return {processor.id_to_piece(i): i for i in ids}


def test_each_text_has_sentencepieces_tokens(alone: tuple[Tokenizer, Any]) -> None:
    tokenizer, processor = alone
    different = [text for text in ALL_TEXTS
                 if tokenizer.encode(text, add_special_tokens=False) != processor.encode(text)]  # fmt: skip
    assert not different and len(ALL_TEXTS) > 500
    long_text = " ".join(ALL_TEXTS) * 20
    assert tokenizer.encode(long_text, add_special_tokens=False) == processor.encode(long_text)
    assert tokenizer.vocab_size == processor.vocab_size()
    assert tokenizer.pieces(range(tokenizer.vocab_size)) == processor.id_to_piece(
        list(range(tokenizer.vocab_size))
    )


def test_control_pieces_in_a_text_are_tokens(alone: tuple[Tokenizer, Any]) -> None:
    """As with every tokenizer.json; sentencepiece itself encodes what is between them."""
    tokenizer, processor = alone
    controls = control_pieces(processor)
    names = [*controls, "<s>", "</s>", "<bos>", "<pad>", "[INST]", "<sep>"]
    dice = random.Random(1)
    pattern = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
    for text in ALL_TEXTS[:150]:
        mixed = "".join(dice.choices([text, *names, " ", ""], k=5))
        expected = []
        for part in pattern.split(mixed):
            expected += [controls[part]] if part in controls else processor.encode(part)
        assert tokenizer.encode(mixed, add_special_tokens=False) == expected
    assert tokenizer.special_token_ids == set(controls.values())


def test_decoding_is_sentencepieces(alone: tuple[Tokenizer, Any]) -> None:
    tokenizer, processor = alone
    for text in ALL_TEXTS:
        ids = processor.encode(text)
        if processor.unk_id() not in ids:
            assert tokenizer.decode(ids) == processor.decode(ids)
            assert tokenizer.decode([*tokenizer.special_token_ids, *ids]) == processor.decode(ids)
            detokenizer = Detokenizer(tokenizer, [])
            pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
            assert "".join(pieces) == tokenizer.decode(ids) or "\ufffd" in text


def test_token_bytes_are_the_bytes_of_the_text(alone: tuple[Tokenizer, Any]) -> None:
    tokenizer, processor = alone
    for text in ALL_TEXTS:
        ids = processor.encode(text)
        if processor.unk_id() not in ids:
            normalized = processor.normalize(text).replace("\u2581", " ").encode()
            assert b"".join(map(tokenizer.token_bytes, ids)) == normalized


def test_another_name_of_the_model(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "mistral" / "tokenizer.model", tmp_path / "spiece.model")
    expected = Tokenizer.load(trained / "mistral")
    tokenizer = Tokenizer.load(tmp_path)
    assert all(tokenizer.encode(text) == expected.encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("form", "config", "before", "after"),
    [
        ("llama", {}, [1], []),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}, [1], []),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": None}, [1], []),
        ("mistral", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, [], []),
        ("mistral", {"tokenizer_class": "YiTokenizer", "add_eos_token": True}, [1], [2]),
        ("gemma", {"tokenizer_class": "GemmaTokenizer"}, [2], []),
        ("gemma", {"add_bos_token": True, "bos_token": "<eos>"}, [1], []),
        ("gemma", {"bos_token": None}, [], []),
        ("unigram with bytes", {}, [], []),  # the model has no such token
    ],
)
def test_the_begin_token(
    form: str, config: dict[str, Any], before: list[int], after: list[int], trained: Path, tmp_path: Path
) -> None:
    folder = with_config(trained / form, tmp_path / "one", **config)
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("the water", add_special_tokens=False)
    assert tokenizer.encode("the water") == [*before, *ids, *after]
    assert tokenizer.encode("") == [*before, *after]
    assert tokenizer.bos_token_id == (before[0] if before else tokenizer.backend.bos_token_id)


def test_the_end_token(trained: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(trained / "gemma").eos_token_ids == {1}
    folder = with_config(trained / "gemma", tmp_path / "one", eos_token="<end_of_turn>")
    tokenizer = Tokenizer.load(folder)
    (turn,) = tokenizer.eos_token_ids
    assert tokenizer.pieces([turn]) == ["<end_of_turn>"]


def test_where_the_dummy_prefix_is(trained: Path, tmp_path: Path) -> None:
    """Before each text, as Llama 2 and Mistral were trained; the files may say otherwise."""
    prefix = "\u2581"

    def pieces(text: str, **config: object) -> list[str]:
        folder = with_config(trained / "mistral", tmp_path / str(len(list(tmp_path.iterdir()))), **config)
        tokenizer = Tokenizer.load(folder)
        return tokenizer.pieces(tokenizer.encode(text, add_special_tokens=False))

    instruction = "[INST]the water[/INST]the"
    every = ["[INST]", "\u2581the", "\u2581water", "[/INST]", "\u2581the"]
    assert pieces(instruction) == pieces(instruction, legacy=True) == every
    assert prefix not in pieces(instruction, legacy=False)[1]
    assert pieces("the[INST] the", legacy=False) == ["\u2581the", "[INST]", "\u2581the"]
    assert prefix not in "".join(pieces("the[INST]the", add_prefix_space=False))


def test_added_tokens_are_found_as_in_a_tokenizer_json(tmp_path: Path) -> None:
    """The same model as a tokenizer.json with the same added tokens, read by transformers."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    save_sentencepiece(tmp_path / "json")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "json")
    tokens = [
        AddedToken("<|im_start|>", special=True, normalized=False),
        AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|im", normalized=False),
        AddedToken("<mask>", normalized=False, lstrip=True),
        AddedToken("turn", normalized=False, single_word=True),
        AddedToken("</s>", special=True, normalized=False, rstrip=True),
    ]
    theirs.add_tokens(tokens)
    decoder = {theirs.convert_tokens_to_ids(token.content): token for token in tokens}
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "json" / "trained.model", tmp_path / "alone" / "tokenizer.model")
    fields = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {
            str(i): {name: getattr(token, name) for name in fields} for i, token in decoder.items()
        },
    }
    (tmp_path / "alone" / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path / "alone")
    parts = [
        *(token.content for token in tokens),
        *("turns", " ", "  \n", "the", "a", "<s>", "<unk>", "\n", "é"),
    ]
    dice = random.Random(2)
    for _ in range(300):
        text = "".join(dice.choices(parts, k=8))
        ids = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert tokenizer.vocab_size == len(theirs)


def test_chat_templates_write_control_tokens(trained: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    folder = with_config(trained / "mistral", tmp_path / "one", chat_template=template)
    tokenizer = Tokenizer.load(folder)
    ids = render_chat(tokenizer, [{"role": "user", "content": "the water"}])
    assert tokenizer.pieces(ids) == ["<s>", "[INST]", "\u2581the", "\u2581water", "[/INST]"]


def test_other_tokenizers_are_left_to_transformers(trained: Path, tmp_path: Path) -> None:
    """A tokenizer.json beside the model, and classes that give its pieces other ids."""
    save_sentencepiece(tmp_path / "both")
    (tmp_path / "both" / "trained.model").rename(tmp_path / "both" / "tokenizer.model")
    t5 = with_config(trained / "unigram", tmp_path / "t5", tokenizer_class="T5Tokenizer")
    for folder, kind in ((tmp_path / "both", "TokenizersBackend"), (t5, "T5Tokenizer")):
        assert type(Tokenizer.load(folder).backend).__name__ == kind


def test_a_tokenizer_that_is_code_is_refused(trained: Path, tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}
    folder = with_config(
        trained / "llama", tmp_path / "one", tokenizer_class="OddTokenizer", auto_map=auto_map
    )
    with pytest.raises(ConfigError, match=r"OddTokenizer.*put a tokenizer.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("length", [0, 100, 3000])
def test_a_model_that_is_cut_off_is_a_corrupt_file(length: int, trained: Path, tmp_path: Path) -> None:
    content = (trained / "llama" / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(content[:length])
    with pytest.raises(CorruptFile, match="tokenizer"):
        Tokenizer.load(tmp_path)


def test_mistrals_name_of_a_model_is_named(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "mistral" / "tokenizer.model", tmp_path / "tokenizer.model.v3")
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.model\.v3.*rename it to tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_tekken_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {}, "vocab": []}')
    with pytest.raises(CheckpointNotFound, match=r"tekken\.json.*mistral-common.*Copy tokenizer\.json"):
        Tokenizer.load(tmp_path)
