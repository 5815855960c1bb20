"""The detokenizer against decoding the whole answer at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import save_byte_level, save_sentencepiece

from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import NoText, Tokenizer

INCOMPLETE = "\ufffd"
SNIPPETS = [*"ab 中文模型😀é", "\u200d", "\u0301", "👨‍👩‍👧", "the ", " pipe", "🇩🇪", "👍🏽", "\n", "ß"]

texts = st.one_of(
    st.lists(st.sampled_from(SNIPPETS), max_size=20).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
stops = st.lists(
    st.text(st.sampled_from("ab中😀 "), min_size=1, max_size=4), min_size=1, max_size=3, unique=True
).map(tuple)
stop_texts = st.text(st.sampled_from("ab中😀 "), max_size=25)
light = settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    save_byte_level(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("llama2")
    save_sentencepiece(folder)
    return Tokenizer.load(folder)


def feed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """All that is returned; the last one by finish()."""
    return [*map(detokenizer.add, token_ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """One token per byte."""
    of_bytes = {tokenizer.token_bytes(i): i for i in range(3, tokenizer.vocab_size)}
    return [of_bytes[bytes([byte])] for byte in content]


def cut(text: str, stop: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, and that string: tried by plain search."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(texts, texts)
@light
def test_pieces_concatenate_to_the_text(byte_level: Tokenizer, prompt: str, text: str) -> None:
    token_ids = byte_level.encode(text)
    pieces = feed(Detokenizer(byte_level, byte_level.encode(prompt)), token_ids)
    assert "".join(pieces) == byte_level.decode(token_ids) == text
    if INCOMPLETE not in text:
        assert not any(INCOMPLETE in piece for piece in pieces)
        assert pieces[-1] == ""


@given(st.lists(st.integers(0, 329), max_size=40), st.booleans())
@light
def test_any_token_ids_concatenate_to_their_text(
    byte_level: Tokenizer, token_ids: list[int], skip_special: bool
) -> None:
    """Also of bytes that are not UTF-8: what is out was never wrong."""
    detokenizer = Detokenizer(byte_level, [], skip_special_tokens=skip_special)
    assert "".join(feed(detokenizer, token_ids)) == byte_level.decode(token_ids, skip_special)


@given(st.lists(st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x41, 0xC3, 0xFF]), max_size=40))
@light
def test_any_bytes_concatenate_to_their_text(byte_level: Tokenizer, content: list[int]) -> None:
    token_ids = byte_ids(byte_level, bytes(content))
    pieces = feed(Detokenizer(byte_level, []), token_ids)
    assert "".join(pieces) == bytes(content).decode("utf-8", errors="replace")


def test_a_character_is_out_with_its_last_byte(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [])
    ids = byte_ids(byte_level, "a😀é".encode())
    assert [detokenizer.add(i) for i in ids] == ["a", "", "", "", "😀", "", "é"]


def test_finish_returns_incomplete_bytes_once(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [])
    assert [detokenizer.add(i) for i in byte_ids(byte_level, b"a\xe4\xb8")] == ["a", "", ""]
    assert [detokenizer.finish(), detokenizer.finish()] == [INCOMPLETE, ""]


def test_bytes_that_are_no_utf8_are_not_held_back_for_long(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [])
    pieces = [detokenizer.add(i) for i in byte_ids(byte_level, b"\xff" * 100)]
    assert len("".join(pieces)) > 85


def test_a_prompt_may_end_within_a_character(byte_level: Tokenizer) -> None:
    prompt, answer = byte_ids(byte_level, b"a\xe4\xb8"), byte_ids(byte_level, b"\xadb")
    assert "".join(feed(Detokenizer(byte_level, prompt), answer)) == "中b"


def test_special_tokens_within_a_character(byte_level: Tokenizer) -> None:
    first, *rest = byte_ids(byte_level, "中".encode())
    token_ids = [0, first, *[2] * 30, *rest, 1]
    assert feed(Detokenizer(byte_level, []), token_ids)[-3:] == ["中", "", ""]
    kept = Detokenizer(byte_level, [], skip_special_tokens=False)
    assert "".join(feed(kept, token_ids)) == byte_level.decode(token_ids, False)


@given(texts, texts)
@light
def test_sentencepiece_meets_its_context(llama2: Tokenizer, prompt: str, text: str) -> None:
    """An answer starts with the space that its first token has, unless nothing precedes it."""
    before = llama2.encode("x" + prompt, add_special_tokens=False)
    answer = llama2.encode(text, add_special_tokens=False)
    whole = llama2.decode(before + answer)
    # Literal U+2581 is a space to sentencepiece; runs of U+FFFD look like bytes that are incomplete.
    expected = (" " + text if text else "").replace("\u2581", " ")
    if INCOMPLETE not in prompt + text:
        assert "".join(feed(Detokenizer(llama2, before), answer)) == expected
        assert whole == llama2.decode(before) + expected
        assert "".join(feed(Detokenizer(llama2, []), answer)) == llama2.decode(answer) == expected[1:]


@pytest.mark.parametrize("begin", ["", "x", "Launch ", "\n", "字"])
@pytest.mark.parametrize("answer", ["🚀🚀 go", "🚀", "𠮷野家", "\n\n🚀", "é🚀x"])
def test_the_context_does_not_begin_within_a_character(
    llama2: Tokenizer, byte_level: Tokenizer, begin: str, answer: str
) -> None:
    """Whatever the number of byte tokens before the answer; a stop string in it is found."""
    for prompt in (begin + "🚀" * n + end for n in range(4) for end in ("", "\n", "é", "𠮷", "𠮷𠮷\n")):
        for tokenizer in (llama2, byte_level):
            before = tokenizer.encode(prompt, add_special_tokens=False)
            token_ids = byte_ids(tokenizer, answer.encode())
            assert "".join(feed(Detokenizer(tokenizer, before), token_ids)) == answer
            stopped = Detokenizer(tokenizer, before, (answer[-1:],))
            assert "".join(feed(stopped, token_ids)) == answer[: answer.index(answer[-1])]
            assert stopped.stopped_by == answer[-1]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_characters_that_are_out_stay_where_the_answer_ends_within_one(
    llama2: Tokenizer, num_bytes: int
) -> None:
    rocket = byte_ids(llama2, "🚀".encode())
    rest = INCOMPLETE * num_bytes
    before = llama2.encode("Launch 🚀🚀", add_special_tokens=False)
    assert "".join(feed(Detokenizer(llama2, before), rocket[:num_bytes])) == rest
    assert "".join(feed(Detokenizer(llama2, before), [*rocket, *rocket[:num_bytes]])) == "🚀" + rest


def test_where_nothing_is_a_word() -> None:
    assert feed(Detokenizer(NoText(), range(20)), range(3)) == [""] * 4


def test_sentencepiece_keeps_the_space_after_a_special_token(llama2: Tokenizer) -> None:
    the, eos = llama2.encode("the", add_special_tokens=False), 2
    token_ids = [*the, eos, *the, eos, eos, *the]
    assert "".join(feed(Detokenizer(llama2, [1]), token_ids)) == llama2.decode(token_ids) == "the the the"


@given(st.lists(st.integers(0, 299), max_size=40))
@light
def test_sentencepiece_survives_any_token_ids(llama2: Tokenizer, token_ids: list[int]) -> None:
    """Of a run of byte tokens that is not UTF-8 sentencepiece replaces even the characters that were complete
    on the way, which are out. Everything else is the text of the answer."""
    text = "".join(feed(Detokenizer(llama2, []), token_ids))
    byte_tokens = {i for i in range(300) if llama2.backend.convert_ids_to_tokens(i).startswith("<0x")}
    if byte_tokens.isdisjoint(token_ids):
        assert text == llama2.decode(token_ids)
    without = [i for i in token_ids if i not in byte_tokens]
    # All but the bytes, in order.
    remaining = iter(text)
    assert all(character in remaining for character in llama2.decode(without).lstrip(" "))


@given(stop_texts, stops, st.booleans(), st.booleans())
@light
def test_the_answer_ends_at_the_stop_string_that_is_complete_first(
    byte_level: Tokenizer, text: str, stop: tuple[str, ...], include: bool, by_bytes: bool
) -> None:
    """However the text is tokenized; held-back beginnings of stop strings come out at the end."""
    token_ids = byte_ids(byte_level, text.encode()) if by_bytes else byte_level.encode(text)
    detokenizer = Detokenizer(byte_level, [], stop, include_stop_str_in_output=include)
    pieces = feed(detokenizer, token_ids)
    assert ("".join(pieces), detokenizer.stopped_by) == cut(text, stop, include)


@given(stop_texts, stops)
@light
def test_what_is_out_is_certain_and_not_late(byte_level: Tokenizer, text: str, stop: tuple[str, ...]) -> None:
    """After each token everything is out that can't be the beginning of a stop string."""
    detokenizer, out, fed = Detokenizer(byte_level, [], stop), "", ""
    for character in text:
        for token_id in byte_ids(byte_level, character.encode()):
            out += detokenizer.add(token_id)
        fed += character
        if detokenizer.stopped_by is not None:
            return
        held = fed.removeprefix(out)
        assert fed.startswith(out)
        assert held == "" or any(s.startswith(held) for s in stop)


def test_nothing_comes_after_a_stop_string(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [], ("b中",))
    ids = byte_ids(byte_level, "ab中 the b中".encode())
    assert [detokenizer.add(i) for i in ids] == ["a", *[""] * (len(ids) - 1)]
    assert detokenizer.finish() == ""
    assert detokenizer.stopped_by == "b中"


def test_a_stop_string_can_be_complete_at_the_end_only(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [], ("a\ufffd",))
    assert "".join(feed(detokenizer, byte_ids(byte_level, b"xa\xe4"))) == "x"
    assert detokenizer.stopped_by == "a\ufffd"


def test_the_prompt_has_no_part_in_a_stop_string(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, byte_level.encode("x a"), ("ab",))
    assert "".join(feed(detokenizer, byte_level.encode("b ab"))) == "b "


@pytest.mark.parametrize(
    "content", [b"the pipe ", "中文😀".encode(), b"\xff", b"\xe4", "\ufffd".encode(), b""]
)
def test_the_cost_of_a_token_does_not_grow(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Counted in tokens decoded; b"" stands for special tokens."""
    token_ids = (byte_ids(byte_level, content) if content else [2]) * 100
    lengths: list[int] = []
    decode = byte_level.decode

    def counting(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(byte_level, "decode", counting)
    pieces = feed(Detokenizer(byte_level, [5] * 1000), token_ids)
    assert "".join(pieces) == decode(token_ids)
    assert max(lengths) <= 20
    assert sum(lengths) <= 25 * len(token_ids) + 50
