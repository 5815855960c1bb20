"""The tokenizer against transformers' and sentencepiece's own, and against the bytes of the text."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save_byte_level, save_gemma, save_sentencepiece

from penstock.errors import CheckpointNotFound, CorruptFile
from penstock.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "the water runs",
    "  two  spaces ",
    "中文字 and 😀👨‍👩‍👧",
    "cafe\u0301\n\ttab\r\n\x00",
    "literal \ufffd <0x41> \u2581",
]
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-level")
    save_byte_level(folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """The tokenizer and the sentencepiece processor that it was converted from."""
    folder = tmp_path_factory.mktemp("llama2")
    processor = save_sentencepiece(folder)
    return Tokenizer.load(folder), processor


def copy_with(source: Path, target: Path, **files: object) -> Path:
    """A copy of a tokenizer's folder with some JSON files added, named without .json."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_are_transformers_own(
    text: str, byte_level: Tokenizer, byte_level_folder: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_folder)
    ids = byte_level.encode(text)
    assert ids == theirs.encode(text)
    assert byte_level.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    assert byte_level.vocab_size == len(theirs)
    assert byte_level.bos_token_id == theirs.bos_token_id == 0


@pytest.mark.parametrize("text", TEXTS)
def test_a_llama2_tokenizer_is_sentencepiece(text: str, llama2: tuple[Tokenizer, Any]) -> None:
    tokenizer, processor = llama2
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == processor.decode(ids)
    assert tokenizer.vocab_size == processor.vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})


def test_special_tokens_are_skipped_on_demand(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<bos>the<note> pipe<eos>")
    assert {0, 1, 2} <= set(ids)
    assert byte_level.decode(ids) == "the pipe"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<bos>the<note> pipe<eos>"


def test_spaces_are_not_tidied_up(byte_level: Tokenizer) -> None:
    text = "the pipe , does n't turn . "
    assert byte_level.decode(byte_level.encode(text)) == text


@given(unicode_text)
@settings(max_examples=150, deadline=None)
def test_token_bytes_are_the_bytes_of_the_text(
    byte_level: Tokenizer, llama2: tuple[Tokenizer, Any], text: str
) -> None:
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    tokenizer, _ = llama2
    pieces = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    # sentencepiece puts a space before a text and has one spelling for a space and U+2581.
    assert pieces == (" " + text if text else "").replace("\u2581", " ").encode()


def test_all_bytes_have_their_token(byte_level: Tokenizer, llama2: tuple[Tokenizer, Any]) -> None:
    for tokenizer in (byte_level, llama2[0]):
        known = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= known
    assert llama2[0].token_bytes(llama2[1].piece_to_id("<0xAB>")) == b"\xab"


def test_added_tokens_of_spaces_are_spaces(tmp_path: Path) -> None:
    """Gemma's, which are spelled with U+2581. The bytes are those of the text that decode() makes."""
    save_gemma(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("a    the water", "  ", "the\n\n\t\t   x", "        the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids).encode() == text.encode()
    (spaces,) = tokenizer.encode("    ", add_special_tokens=False)
    assert spaces in tokenizer.backend.get_added_vocab().values()
    assert (tokenizer.token_text(spaces), tokenizer.pieces([spaces])) == ("    ", ["\u2581" * 4])


def test_added_tokens_have_the_bytes_that_decode_makes(
    byte_level_folder: Path, llama2: tuple[Tokenizer, Any], tmp_path: Path
) -> None:
    """Decoders treat added tokens as any others: a byte-level one takes no U+2581 for a space."""
    from transformers import PreTrainedTokenizerFast

    llama2[0].backend.save_pretrained(tmp_path / "llama2")
    for folder in (byte_level_folder, tmp_path / "llama2"):
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        added = ["<|end\u2581of\u2581text|>", "\u2581\u2581", "  ", "<中>", "<x>"]
        theirs.add_tokens(added)
        tokenizer = Tokenizer(theirs, frozenset())
        (letter,) = tokenizer.encode("\n", add_special_tokens=False)[-1:]
        for token_id in theirs.convert_tokens_to_ids(added):
            assert tokenizer.decode([letter, token_id, letter]) == f"\n{tokenizer.token_text(token_id)}\n"


def test_special_and_unknown_tokens_have_bytes_too(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(0) == b"<bos>"
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""  # a model's padding of its vocabulary


def test_an_added_token_is_its_text(byte_level_folder: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_folder)
    theirs.add_tokens(["<é中 >"])
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (token_id,) = tokenizer.encode("<é中 >")
    assert tokenizer.token_text(token_id) == "<é中 >"


def test_a_piece_that_only_looks_like_a_byte_is_text() -> None:
    class Backend:
        bos_token_id = None
        pieces = ["<0xZZ>", "<0x4g>", "<0x41>", "<0x41>\n"]

        def __len__(self) -> int:
            return len(self.pieces)

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return self.pieces[token_id]

        def get_added_vocab(self) -> dict[str, int]:
            return {}

        def get_vocab(self) -> dict[str, int]:
            return {piece: i for i, piece in enumerate(self.pieces)}

        @property
        def vocab_size(self) -> int:
            return len(self.pieces)

    tokenizer = Tokenizer(Backend(), frozenset())
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b"<0xZZ>", b"<0x4g>", b"A", b"<0x41>\n"]


def test_token_text_replaces_parts_of_characters(byte_level: Tokenizer) -> None:
    parts = [i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xe4"]
    assert [byte_level.token_text(i) for i in parts] == ["\ufffd"]
    assert "".join(map(byte_level.token_text, byte_level.encode("the pipe"))) == "the pipe"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"generation_config": {"eos_token_id": 7}}, {1, 7}),
        ({"generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 3}}, {1, 3, 7, 9}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 3}}, {1, 3}),
        ({"generation_config": {}, "config": {"eos_token_id": [3, 4]}}, {1, 3, 4}),
        ({"config": {"eos_token_id": 3, "text_config": {"eos_token_id": [1, 5]}}}, {1, 3, 5}),
        ({"generation_config": {}, "config": {"eos_token_id": None}}, {1}),
    ],
)
def test_where_the_end_tokens_come_from(
    files: dict[str, object], expected: set[int], byte_level_folder: Path, tmp_path: Path
) -> None:
    folder = copy_with(byte_level_folder, tmp_path, **files)
    if "config" in files:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **files["config"]}))  # type: ignore[dict-item]
    assert Tokenizer.load(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    "content", ["{", "[1]", "\xff", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1.5]}']
)
def test_a_broken_generation_config_is_a_corrupt_file(
    content: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    folder = copy_with(byte_level_folder, tmp_path)
    (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptFile, match="generation_config"):
        Tokenizer.load(folder)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointNotFound, match="tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointNotFound):
        Tokenizer.load(tmp_path / "missing")


def test_sentinels_of_t5(byte_level_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_folder)
    assert Tokenizer(theirs, frozenset()).sentinels == ()
    theirs.add_tokens([f"<extra_id_{number}>" for number in (2, 0, 1, 4)], special_tokens=True)
    tokenizer = Tokenizer(theirs, frozenset())
    assert tokenizer.pieces(tokenizer.sentinels) == ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"{}", b'{"model": 3}', b"\xff\xfe\x00"])
def test_a_garbage_tokenizer_is_a_corrupt_file(
    garbage: bytes, byte_level_folder: Path, tmp_path: Path
) -> None:
    folder = copy_with(byte_level_folder, tmp_path)
    (folder / "tokenizer.json").write_bytes(garbage)
    with pytest.raises(CorruptFile, match="tokenizer"):
        Tokenizer.load(folder)


def test_has_chat_template(byte_level: Tokenizer, byte_level_folder: Path, tmp_path: Path) -> None:
    assert not byte_level.has_chat_template
    folder = copy_with(byte_level_folder, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.load(folder).has_chat_template


def test_a_class_of_transformers_that_is_written_in_python(tmp_path: Path) -> None:
    from transformers import BertGenerationTokenizer

    save_sentencepiece(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "trained.model").rename(tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertGenerationTokenizer"})
    )
    tokenizer, theirs = Tokenizer.load(tmp_path), BertGenerationTokenizer(str(tmp_path / "spiece.model"))
    for text in ("the water runs", "the pipe turns the wheel"):
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_nothing_changes_the_tokenizer_that_threads_share(byte_level_folder: Path, tmp_path: Path) -> None:
    """transformers turns truncation and padding off when it encodes, if the file had turned them on."""
    folder = copy_with(byte_level_folder, tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<bos>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    before = tokenizer.backend.backend_tokenizer.to_str()
    ids = tokenizer.encode("the water runs down")
    assert ids == Tokenizer.load(byte_level_folder).encode("the water runs down") and len(ids) > 3
    assert tokenizer.decode(ids) == "the water runs down" and tokenizer.token_bytes(ids[0])
    assert tokenizer.backend.backend_tokenizer.to_str() == before


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "BertGenerationTokenizer"])
def test_ids_that_the_tokenizer_does_not_have_are_no_text(kind: str, tmp_path: Path) -> None:
    """Models pad their vocabulary; sentencepiece raises IndexError for what is beyond its own."""
    save_sentencepiece(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "trained.model").rename(tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("the water", add_special_tokens=False)
    for unknown in (tokenizer.vocab_size, 100_000):
        assert tokenizer.decode([unknown, *ids, unknown]) == tokenizer.decode(ids) != ""
        assert tokenizer.decode([unknown]) == tokenizer.token_text(unknown) == ""
        assert tokenizer.token_bytes(unknown) == b""
    pieces = tokenizer.backend.convert_ids_to_tokens(range(tokenizer.vocab_size))
    assert all(tokenizer.token_bytes(i) for i, piece in enumerate(pieces) if piece)


def test_a_tiktoken_model_alone(tmp_path: Path) -> None:
    """Lines of a token's bytes in base64 and its rank, as Llama 3's first release and Qwen have it."""
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" t"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("the water", add_special_tokens=False)
    assert ids == [258, *b" water"] and tokenizer.decode(ids) == "the water"


def test_pieces_are_spelled_as_in_the_vocabulary(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    token_ids = tokenizer.encode("the pipe") + [10**6]
    expected = tokenizer.backend.tokenize("the pipe")
    assert tokenizer.pieces(token_ids) == [*expected, ""]
