"""Names of tokens, and where they begin in a text."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from cpm_folders import save_cpm1
from tiny_tokenizers import save_byte_level, save_gemma, save_sentencepiece

from fakes import EOS, FakeTokenizer
from penstock.generation.logprobs import TokenLogprobs
from penstock.text.tokenizer import Tokenizer
from penstock_server.answers.logprobs import LogprobWriter, answer_offsets, prompt_offsets

FAKE: Any = FakeTokenizer()
TEXT = "The fox — naïve, 漢字 🦊 — ran."


def test_tokens_are_named_by_text_or_by_id() -> None:
    token = TokenLogprobs(104, -0.5, ((104, -0.5), (105, -1.0)), 1)
    (named,) = LogprobWriter(FAKE).chat([token])
    assert (named.token, named.bytes, [top.token for top in named.top_logprobs]) == ("h", [104], ["h", "i"])
    (by_id,) = LogprobWriter(FAKE, as_token_ids=True).chat([token])
    assert (by_id.token, by_id.bytes) == ("token_id:104", [104])
    assert [top.token for top in by_id.top_logprobs] == ["token_id:104", "token_id:105"]


def test_the_first_of_a_prompt_has_no_logprob() -> None:
    token = TokenLogprobs(105, -0.5, ((106, -0.1), (107, -0.2)), 3)
    told = LogprobWriter(FAKE).completion([104, 105], [None, token], [0, 1], 1).model_dump()
    assert told == {
        "tokens": ["h", "i"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"i": -0.5, "j": -0.1}],
        "text_offset": [0, 1],
    }


def test_ranks_of_prompt_tokens() -> None:
    token = TokenLogprobs(105, -0.5, ((106, -0.1), (105, -0.5), (107, -0.9)), 2)
    first, told = LogprobWriter(FAKE).prompt([None, token], 2)
    assert first is None and told is not None
    assert {token_id: (each.rank, each.decoded_token) for token_id, each in told.items()} == {
        105: (2, "i"),
        106: (1, "j"),
    }
    rare = TokenLogprobs(105, -9.0, ((106, -0.1),), 200)
    (entry,) = LogprobWriter(FAKE).prompt([rare], 0)
    assert entry is not None and [each.rank for each in entry.values()] == [200]


@pytest.fixture(scope="module", params=[save_byte_level, save_sentencepiece, save_gemma])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    request.param(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("text", [TEXT, "plain words", " a space first", "two  spaces"])
def test_offsets_of_a_prompt_are_where_its_tokens_begin(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    offsets = prompt_offsets(tokenizer, token_ids, text)
    assert len(offsets) == len(token_ids) and offsets == sorted(offsets)
    ends = [*offsets[1:], len(text)]
    for token_id, begin, end in zip(token_ids, offsets, ends, strict=True):
        name = tokenizer.token_text(token_id)
        if "\ufffd" not in name and tokenizer.decode([token_id]):
            assert text[begin:end] in (name, name[1:]), (name, begin, end)


def test_offsets_of_a_prompt_in_characters_of_several_bytes() -> None:
    assert prompt_offsets(FAKE, list("aé漢b".encode()), "aé漢b") == [0, 1, 1, 2, 2, 2, 3]


def test_offsets_where_a_tokenizer_changes_characters(tmp_path: Path) -> None:
    """CPM-1's makes full-width characters half-width."""
    tokenizer = Tokenizer.load(save_cpm1(tmp_path))
    text = "天空，窗外：Ｈ有；公园"
    token_ids = tokenizer.encode(text)
    offsets = prompt_offsets(tokenizer, token_ids, text)
    ends = [*offsets[1:], len(text)]
    assert "，" not in tokenizer.decode(token_ids)
    for token_id, begin, end in zip(token_ids, offsets, ends, strict=True):
        assert unicodedata.normalize("NFKC", text[begin:end]) == tokenizer.token_text(token_id)


def test_special_tokens_take_no_place() -> None:
    assert prompt_offsets(FAKE, [EOS, *b"ab", EOS], "ab") == [0, 0, 1, 2]


def test_offsets_of_an_answer_go_on() -> None:
    assert list(answer_offsets(FAKE, list("é!".encode()), 5)) == [5, 5, 6, 7]
    *offsets, end = answer_offsets(FAKE, list("é".encode())[:1], 5)
    assert (offsets, end) == ([5], 6)
    assert list(answer_offsets(FAKE, list("é".encode())[1:], end)) == [5, 6]
    assert list(answer_offsets(FAKE, [], 3)) == [3]
