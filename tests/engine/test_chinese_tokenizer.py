"""The tokenizers of the CPM models against a second writing of the originals."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpm_originals
import pytest
from cpm_folders import (
    SENTENCES,
    TEXTS,
    save_ant,
    save_ant_plus,
    save_cpm1,
    save_cpm1_vocabulary,
    save_cpm2,
    save_cpm2_english,
    save_eva,
)

from penstock.cpm.segmentation import MAX_RUN_CHARS, load_segmenter
from penstock.errors import CheckpointNotFound, ConfigError, CorruptFile
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer

PARTS = [
    *"天空是蔚蓝色窗外有公园火锅老师北京大学计算机卡拉OK春来了龘㐀饕abcXY019,.!?;:'\"-_<>#% \n\t",
    *"，。！？、；：（）“”‘’…—《》Ａｂ３％＃～．＂〝‛‟\u3000\u00a0\u200b😀é한\u2581\u2582\u2583",
    *("  ", "\r\n", "hello world", " playing", "3.14", "2021", "<eod>", "<s_0>", "<unk>", "</_>", "##ing"),
]


def random_texts(number: int) -> list[str]:
    dice = random.Random(7)
    return ["".join(dice.choices(PARTS, k=dice.randint(1, 25))) for _ in range(number)]


ALL_TEXTS = TEXTS + random_texts(300)

#: name -> (maker of a folder, the original, id of the end token, number of sentinels)
FORMS: dict[str, tuple[Callable[[Path], Path], Any, int, int]] = {
    "CPM-1": (save_cpm1, cpm_originals.cpm1, 7, 0),
    "CPM-1 of BMInf": (save_cpm1_vocabulary, cpm_originals.cpm1_of_bminf, 7, 0),
    "CPM-2": (save_cpm2, cpm_originals.cpm2, 7, 190),
    "CPM-2 for Chinese and English": (save_cpm2_english, cpm_originals.cpm2_english, 8, 185),
    "EVA": (save_eva, cpm_originals.eva, 4, 190),
    "CPM-Ant": (save_ant, cpm_originals.ant, 7, 0),
    "CPM-Ant+": (save_ant_plus, cpm_originals.ant_plus, 7, 0),
}
Pair = tuple[Tokenizer, cpm_originals.Encode, cpm_originals.Decode]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("cpm")
    return {name: save(base / name) for name, (save, *_) in FORMS.items()}


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Pair:
    """A tokenizer, and the original's two functions."""
    folder = folders[request.param]
    return Tokenizer.load(folder), *FORMS[request.param][1](folder)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_each_text_has_the_originals_tokens(pair: Pair) -> None:
    tokenizer, original, _ = pair
    different = [text for text in ALL_TEXTS if encode(tokenizer, text) != original(text)]
    assert not different
    long_text = "".join(ALL_TEXTS)
    assert encode(tokenizer, long_text) == original(long_text)
    used = {token_id for text in ALL_TEXTS for token_id in original(text)}
    assert len(used) > 150, "the texts try too few tokens"
    assert encode(tokenizer, "") == []


def test_decoding_is_the_originals(pair: Pair) -> None:
    tokenizer, original, decode = pair
    unknown = tokenizer.decode([tokenizer.backend.unk_token_id], skip_special_tokens=False)
    for text in ALL_TEXTS:
        ids = original(text)
        # The sentencepiece package has a sign of its own for an unknown character.
        expected = decode(ids).replace("\u2047", unknown)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_sentences_come_back(pair: Pair) -> None:
    tokenizer, _, _ = pair
    half_width = str.maketrans("“”…！？：；，（）", '"".!?:;,()')
    for text in SENTENCES:
        if text.isascii():
            continue  # the vocabularies have no pieces for all English words
        back = tokenizer.decode(encode(tokenizer, text)).replace("...", "…")
        is_english = tokenizer.sentinels[183:] and len(tokenizer.sentinels) == 185
        ours, theirs = (t.translate(half_width).replace(" " if is_english else "", "") for t in (back, text))
        assert ours == theirs


def test_streamed_text_is_the_whole_text(pair: Pair) -> None:
    tokenizer, original, _ = pair
    for text in ALL_TEXTS:
        prompt, ids = original("今天天气很好"), original(text)
        detokenizer = Detokenizer(tokenizer, prompt)
        pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
        assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(prompt + ids)
        assert pieces[-1] == ""


def test_any_tokens_stream(pair: Pair) -> None:
    tokenizer, _, _ = pair
    dice = random.Random(3)
    for skip in (True, False):
        for _ in range(100):
            ids = dice.choices(range(tokenizer.vocab_size), k=dice.randint(1, 20))
            prompt, answer = ids[:5], ids[5:]
            detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
            pieces = [*map(detokenizer.add, answer), detokenizer.finish()]
            assert tokenizer.decode(prompt, skip) + "".join(pieces) == tokenizer.decode(ids, skip)


def test_tokens_bytes_make_the_text(pair: Pair) -> None:
    """With gaps between English words, which belong to no token, in CPM-2's vocabulary of two languages."""
    tokenizer, original, _ = pair
    has_gaps = len(tokenizer.sentinels) == 185
    for text in ALL_TEXTS:
        ids = original(text)
        parts = (tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_token_ids)
        ours, whole = b"".join(parts).decode(), tokenizer.decode(ids)
        assert (ours, whole) == (ours, ours) or (has_gaps and ours.replace(" ", "") == whole.replace(" ", ""))


@pytest.mark.parametrize("name", FORMS)
def test_special_tokens(name: str, folders: dict[str, Path]) -> None:
    _, _, end, num_sentinels = FORMS[name]
    tokenizer = Tokenizer.load(folders[name])
    assert tokenizer.eos_token_ids == {end}
    assert tokenizer.pieces(tokenizer.sentinels) == [f"<s_{i}>" for i in range(num_sentinels)]
    specials = tokenizer.pieces(sorted(tokenizer.special_token_ids))
    assert {"<unk>", "<s>", "</s>", "<sep>", "<pad>", "<mask>"} <= set(specials)
    assert not {"\u2582", "\u2583", "</_>", "</n>", ",", "<"} & set(specials)
    assert tokenizer.decode(sorted(tokenizer.special_token_ids)) == ""
    # A special token's name in a text is text.
    for text in ("<eod>", "<s_0>你好</s>", "<pad><unk>"):
        assert not (tokenizer.special_token_ids - {tokenizer.backend.unk_token_id}) & set(
            encode(tokenizer, text)
        )


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_is_plain_text(name: str, folders: dict[str, Path]) -> None:
    """Only CPM-Ant and CPM-Ant+ have a token in front of a prompt, and lose unknown characters."""
    tokenizer = Tokenizer.load(folders[name])
    text = "今天天气很好😀"
    ids = encode(tokenizer, text)
    unknown = tokenizer.backend.unk_token_id
    assert unknown in ids
    if "CPM-Ant" in name:
        assert tokenizer.encode(text) == [6, *(i for i in ids if i != unknown)]
        assert tokenizer.bos_token_id == 6
    else:
        assert tokenizer.encode(text) == ids
        assert tokenizer.bos_token_id is None


def test_evas_empty_line_counts(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["EVA"])
    lines = cpm_originals.lines_of(folders["EVA"])
    assert lines[8] == "" and tokenizer.vocab_size == len(lines)
    assert encode(tokenizer, "，") == [9]
    assert tokenizer.token_bytes(8) == b"" and tokenizer.decode([8]) == ""


def test_line_ends_of_another_system(folders: dict[str, Path], tmp_path: Path) -> None:
    lines = cpm_originals.lines_of(save_eva(tmp_path))
    for text in ("\r\n".join(lines), "\n".join(lines)):
        (tmp_path / "vocab.txt").write_bytes(text.encode())
        assert Tokenizer.load(tmp_path).vocab_size == len(lines)


@pytest.mark.parametrize("name", ["CPM2Tokenizer", "EVATokenizer", "CpmAntTokenizer", "CPMAntTokenizerFast"])
def test_a_class_names_the_form(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = {"CPM2": "CPM-2", "EVA": "EVA"}.get(name.removesuffix("Tokenizer"), "CPM-Ant")
    (tmp_path / "vocab.txt").write_bytes((folders[folder] / "vocab.txt").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokenizer, theirs = Tokenizer.load(tmp_path), Tokenizer.load(folders[folder])
    text = "“今天！”Ａ…"
    assert tokenizer.encode(text) == theirs.encode(text)


def test_a_vocabulary_without_a_name_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    vocabulary = (folders["CPM-2"] / "vocab.txt").read_bytes()
    (tmp_path / "vocab.txt").write_bytes(vocabulary)
    for config in ({}, {"model_type": "bert"}, {"tokenizer_class": "BertTokenizer"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="tokenizer_class.*CPM2Tokenizer"):
            Tokenizer.load(tmp_path)


def test_files_that_do_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CpmAntTokenizer"}))
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(CheckpointNotFound, match=r"CPM-Ant.*vocab\.txt.*copy"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").write_bytes((folders["EVA"] / "vocab.txt").read_bytes())
    with pytest.raises(CorruptFile, match=r"lacks </_>, </n>.*CPM-Ant"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CpmTokenizer"}))
    (tmp_path / "spiece.model").write_bytes(b"garbage")
    with pytest.raises(CorruptFile, match="sentencepiece"):
        Tokenizer.load(tmp_path)


def test_a_missing_package_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    load_segmenter.cache_clear()
    for name in ("CPM-1", "EVA"):
        with pytest.raises(ConfigError, match=r"jieba.*pip install 'penstock-llm\[cpm\]'"):
            Tokenizer.load(folders[name])


def test_jieba_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jieba's own cache has a fixed name, where any user can put a file for others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load_segmenter.cache_clear()
    assert list(load_segmenter()("天空是蔚蓝色")) == ["天空", "是", "蔚蓝色"]
    assert not list(tmp_path.iterdir())


def test_a_long_run_of_characters_is_cut() -> None:
    """Rare characters without punctuation, on which jieba takes the square of their number."""
    segment, dice = load_segmenter(), random.Random(9)
    run = "".join(chr(dice.randint(0x4E00, 0x9FA5)) for _ in range(2 * MAX_RUN_CHARS + 100))
    whole = run[: MAX_RUN_CHARS - 1]
    assert list(segment(whole)) == cpm_originals.cut(whole)
    first, second = run[:MAX_RUN_CHARS], run[MAX_RUN_CHARS : 2 * MAX_RUN_CHARS]
    parts = ["今天，" + first, second, run[2 * MAX_RUN_CHARS :] + "！好"]
    assert list(segment("".join(parts))) == [word for part in parts for word in cpm_originals.cut(part)]
    letters = "a" * (2 * MAX_RUN_CHARS)
    assert list(segment(letters)) == [letters]
