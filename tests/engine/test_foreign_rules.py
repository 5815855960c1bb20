"""Rules of a tokenizer file that do not end are refused, and a tokenizer's panic is the request's fault."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from penstock.errors import CorruptFile, RequestError
from penstock.text import text_process
from penstock.text.tokenizer import Tokenizer

#: Takes time by 2**n for n letters without an end.
BAD = Regex("(a+)+$")
ENDLESS = ("a" * 26 + "b ") * 300


def fast() -> Any:
    letters = {letter: number for number, letter in enumerate("ab xyz")}
    return Fast(models.BPE(letters, []))


def loaded(tokenizer: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset())


def test_a_pattern_or_a_replacement_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_process, "MAX_SECONDS", 0.5)
    splitting, normalizing, growing = fast(), fast(), fast()
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(BAD, "isolated")])
    normalizing.normalizer = normalizers.Replace(BAD, "")
    growing.normalizer = normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 30)
    for each in (splitting, normalizing, growing):
        tokenizer = loaded(each)
        for encode in (tokenizer.encode, lambda text: tokenizer.encode_pair("x", text)):  # noqa: B023
            with pytest.raises(RequestError, match="too much time or memory"):
                encode(ENDLESS)
        assert tokenizer.encode("xyzxyzxyzxyzxyzxyzxyz") == each.encode("xyz" * 7).ids


def test_steps_that_double_a_text_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text, too."""
    normalizing, splitting, mixed = fast(), fast(), fast()
    normalizing.normalizer = normalizers.Sequence([normalizers.ByteLevel()] * 40)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Sequence([byte_level] * 40)])
    # Arabic of 18 letters for one, four of which become that one again.
    mixed.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.Replace("\u0644", "\ufdfa")] * 20
    )
    for each in (normalizing, splitting, mixed):
        tokenizer = loaded(each)
        with pytest.raises(RequestError, match="too much time or memory"):
            tokenizer.encode("\u00e9\ufdfa")
        assert tokenizer.encode("xyz") == each.encode("xyz").ids


def test_tables_that_stand_there_twice_are_tried() -> None:
    from penstock.text.foreign_rules import _repeats

    table = {"type": "Precompiled", "precompiled_charsmap": ""}
    assert not _repeats({"normalizer": table, "pre_tokenizer": {"type": "ByteLevel"}})
    assert _repeats({"normalizer": {"type": "Sequence", "normalizers": [table, {"type": "NFC"}, table]}})


def test_a_normalizer_that_prepends_much_is_refused() -> None:
    prepending = fast()
    prepending.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581" * 13)] * 5)
    with pytest.raises(CorruptFile, match="the normalizer prepends 65 characters; at most 64"):
        loaded(prepending)


def test_a_panic_is_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    panicking = fast()
    panicking.pre_tokenizer = pre_tokenizers.Split(BAD, "isolated")
    tokenizer = loaded(panicking)
    monkeypatch.setattr(tokenizer, "try_rules", lambda text: None)
    with pytest.raises(RequestError, match="can't read this text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_an_error_of_the_model_is_the_requests_fault() -> None:
    tokenizer = loaded(Fast(models.WordPiece({"a": 0})))
    with pytest.raises(RequestError, match="can't read this text: WordPiece"):
        tokenizer.encode("b")


def test_a_decoder_that_fails_leaves_the_tokens_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    def panic(*args: Any, **kwargs: Any) -> str:
        raise PanicException("no")

    tokenizer = loaded(fast())
    monkeypatch.setattr(tokenizer.backend, "decode", panic)
    assert tokenizer.decode([3, 4, 9]) == "xy"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace(BAD, "")]),
        decoders.Sequence([decoders.Replace("a", "aa")] * 30),
    ],
)
def test_a_decoder_with_patterns_is_refused(decoder: Any) -> None:
    decoding = fast()
    decoding.decoder = decoder
    with pytest.raises(CorruptFile, match=r"tokenizer.json: the decoder"):
        loaded(decoding)


def test_long_words_are_refused() -> None:
    with pytest.raises(CorruptFile, match="max_input_chars_per_word"):
        loaded(Fast(models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**6)))


def test_known_rules_are_not_tried() -> None:
    usual = fast()
    usual.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(" ", "\u2581"), normalizers.Prepend("\u2581")]
    )
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    usual.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(llama3), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    assert loaded(usual)._unknown_rules is None
    usual.pre_tokenizer = pre_tokenizers.Split(Regex(llama3 + "+"), "isolated")
    assert loaded(usual)._unknown_rules is not None


@pytest.mark.parametrize(("length", "is_known"), [(33, True), (65, False)])
def test_tables_of_long_replacements_are_tried(length: int, is_known: bool) -> None:
    from penstock.text.foreign_rules import _growing

    raw = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"x" * length + b"\0"
    rules = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}
    assert (not any(_growing({"normalizers": [rules]}))) == is_known
