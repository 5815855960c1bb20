"""The matcher against plain loops over texts, for each kind of tokenizer; what it refuses and why."""

from __future__ import annotations

import base64
import gc
import json
import random
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpm_folders import save_cpm2_english
from llguidance import LLMatcher
from tiny_tokenizers import save_byte_level, save_gemma, save_sentencepiece, train_sentencepiece

from penstock.errors import InvalidParameter
from penstock.generation.grammars import grammar_matcher
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.grammar_matcher import GrammarCompiler, Matcher
from penstock.text.tokenizer import NoText, Tokenizer

PADDING = 7


def save_tiktoken(folder: Path) -> None:
    folder.mkdir()
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" t", b'{"']
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    save_config(folder, "PreTrainedTokenizerFast")


def save_bare_sentencepiece(folder: Path, kind: str) -> None:
    """A folder without tokenizer.json."""
    save_sentencepiece(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "trained.model").rename(folder / "tokenizer.model")
    save_config(folder, kind)


def save_config(folder: Path, kind: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))


SAVE: dict[str, Callable[[Path], object]] = {
    "byte-level": save_byte_level,
    "llama-2": save_sentencepiece,
    "sentencepiece alone": lambda folder: save_bare_sentencepiece(folder, "LlamaTokenizer"),
    "gemma": save_gemma,
    "gemma's sentencepiece alone": lambda folder: train_sentencepiece(folder / "tokenizer.model", "gemma"),
    "tiktoken alone": save_tiktoken,
}


@pytest.fixture(scope="module", params=SAVE)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers") / "one"
    SAVE[request.param](folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-level")
    save_byte_level(folder)
    return Tokenizer.load(folder)


def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


def allowed_ids(matcher: Matcher) -> set[int]:
    return {token_id for token_id in range(matcher.allowed.bit_length()) if matcher.allowed >> token_id & 1}


def forced_ids(matcher: Matcher) -> list[int]:
    ids = []
    while matcher.forced is not None:
        ids.append(matcher.forced)
        matcher.advance(matcher.forced)
    return ids


CHOICES = ["water", "wheel", "the water", "the wheel turns", "中文", "中国", "é", "é😀", '"\\\n', "a", "ab"]


def test_what_is_allowed_is_what_some_choice_goes_on_with(tokenizer: Tokenizer) -> None:
    """A plain loop over all tokens: each whose bytes continue one of the texts, and the ends where one is
    complete. Where all texts go on alike, only the tokenizer's own tokens for that."""
    dice = random.Random(0)
    texts = [text.encode() for text in CHOICES]
    grammars = compiler(tokenizer)
    for _ in range(40):
        matcher, said = grammars.matcher(Grammar.choice(CHOICES)), b""
        while not matcher.is_complete:
            left = [text[len(said) :] for text in texts if text.startswith(said)]
            expected = {
                token_id
                for token_id in set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids
                if (token := tokenizer.token_bytes(token_id)) and any(text.startswith(token) for text in left)
            }
            if b"" in left:
                expected |= tokenizer.eos_token_ids
            first_bytes = {text[:1] for text in left}
            # A tokenizer without an end token has llguidance's, behind all others.
            allowed = {token_id for token_id in allowed_ids(matcher) if token_id < tokenizer.vocab_size}
            assert allowed == expected if len(first_bytes) > 1 else allowed <= expected
            assert not matcher.error
            token_id = dice.choice(sorted(allowed - tokenizer.eos_token_ids))
            said += tokenizer.token_bytes(token_id)
            matcher.advance(token_id)
        assert said in texts


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["the water runs down the pipe", "中文模型 in 中国", "😀👨‍👩‍👧 café", '{"a":["b"]}']
)
def test_a_text_is_forced_in_the_tokenizers_own_tokens(text: str, tokenizer: Tokenizer) -> None:
    """Those that it has for the text in the middle of another, as any tokenizer may treat a beginning so
    or so."""
    matcher = compiler(tokenizer).matcher(Grammar.choice([text]))
    ids = forced_ids(matcher)
    assert matcher.is_complete and not matcher.error
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    before = tokenizer.encode("\n", add_special_tokens=False)
    assert before + ids == tokenizer.encode("\n" + text, add_special_tokens=False)


def test_tokens_of_spaces_are_spaces_to_a_grammar(tokenizer: Tokenizer) -> None:
    """Gemma's are added tokens, spelled with U+2581. Only the tokenizers of Gemma have them."""
    grammars = compiler(tokenizer)
    spaces = {i for i in range(tokenizer.vocab_size) if set(tokenizer.token_bytes(i)) == {ord(" ")}}
    assert spaces.isdisjoint(allowed_ids(grammars.matcher(Grammar.regex("[^ ]{2,8}"))))
    assert spaces <= allowed_ids(grammars.matcher(Grammar.regex("[ x]{1,40}")))
    text = "a        b"
    ids = forced_ids(grammars.matcher(Grammar.choice([text])))
    before = tokenizer.encode("\n", add_special_tokens=False)
    assert before + ids == tokenizer.encode("\n" + text, add_special_tokens=False)


def test_special_tokens_are_no_text(byte_level: Tokenizer) -> None:
    """decode() drops them, so the name of one is written in letters, and none is allowed in a string."""
    grammars = compiler(byte_level)
    ids = forced_ids(grammars.matcher(Grammar.choice(["a<eos>b<note>"])))
    assert byte_level.decode(ids) == "a<eos>b<note>" and not {0, 1, 2} & set(ids)
    anything = grammars.matcher(Grammar.regex("(.|\n)+"))
    assert not allowed_ids(anything) & {0, 1, 2}
    assert max(allowed_ids(anything)) < byte_level.vocab_size


def test_every_end_token_ends(byte_level: Tokenizer) -> None:
    both = Tokenizer(byte_level.backend, frozenset({1, 2, 9999}))
    matcher = compiler(both).matcher(Grammar.regex("a+"))
    (letter,) = byte_level.encode("a")
    assert not allowed_ids(matcher) & {1, 2}
    matcher.advance(letter)
    assert {1, 2} <= allowed_ids(matcher) and not matcher.is_complete


def test_without_an_end_token_only_the_grammar_ends(byte_level: Tokenizer) -> None:
    matcher = compiler(Tokenizer(byte_level.backend, frozenset())).matcher(Grammar.regex("a+b?"))
    a, b = byte_level.encode("ab")
    matcher.advance(a)
    assert {i for i in allowed_ids(matcher) if i < byte_level.vocab_size} == {a, b}
    matcher.advance(b)
    assert matcher.is_complete


def test_a_step_back(byte_level: Tokenizer) -> None:
    matcher = compiler(byte_level).matcher(Grammar.regex("ab?"))
    a, b = byte_level.encode("ab")
    first = matcher.allowed
    matcher.advance(a)
    second = matcher.allowed
    matcher.advance(b)
    assert matcher.is_complete
    matcher.retreat()
    assert matcher.allowed == second and not matcher.is_complete
    matcher.retreat()
    assert matcher.allowed == first


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.regex("(ab"), "regular expression can't be used: .*unclosed group"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.regex(""), "no text but the empty one"),
        (Grammar.lark("start: nothing"), 'unknown name: "nothing"'),
        (Grammar.lark("start: x\nx: x"), "no token of the model's vocabulary"),
        (Grammar.lark("start: " + "(" * 9999 + ")" * 9999), "too deeply nested"),
        (Grammar.json_schema({"type": "strang"}), "JSON schema can't be used: Invalid type: strang"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (Grammar.json_schema({"$ref": "http://127.0.0.1:9/x"}), "not present"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys.*uniqueItems"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Grammar.json_schema({"x-guidance": {"nonsense": 1}}), "unknown field `nonsense`"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_with_the_reason(
    grammar: Grammar, said: str, byte_level: Tokenizer
) -> None:
    grammars = compiler(byte_level)
    for use in (grammars.check, grammars.matcher):
        with pytest.raises(InvalidParameter, match=f"(?s){said}") as caught:
            use(grammar)
        assert caught.value.param == "grammar"


def test_a_limit_met_on_the_way_is_an_error_of_this_answer_alone(byte_level: Tokenizer) -> None:
    grammars = compiler(byte_level)
    # It never ends, which the trial of a grammar can't see behind so many choices.
    grammar = Grammar.lark('start: "b" | /[ac]{100}/ rest\nrest: /a/ rest')
    matcher = grammars.matcher(grammar)
    for _ in range(100):
        matcher.advance(*byte_level.encode("a"))
    forced_ids(matcher)
    assert "Too many items" in matcher.error
    assert matcher.forced is None and not matcher.is_complete
    assert not grammars.matcher(grammar).error


def test_answers_of_one_request_share_what_was_compiled(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def counted(*arguments: Any, **options: Any) -> LLMatcher:
        compiled.append(arguments[1])
        return LLMatcher(*arguments, **options)

    monkeypatch.setattr(grammar_matcher, "LLMatcher", counted)
    grammars = compiler(byte_level)
    grammar = Grammar.regex("(ab|ba)+")
    a, b = byte_level.encode("a") + byte_level.encode("b")
    grammars.check(grammar)
    first, second = grammars.matcher(grammar), grammars.matcher(grammar)
    first.advance(a)
    assert len(compiled) == 1
    # Each stands where its own tokens have led it, as one that shares nothing.
    second.advance(b)
    second.advance(a)
    alone = compiler(byte_level).matcher(Grammar.regex("(ab|ba)+"))
    for token_id in (b, a):
        alone.advance(token_id)
    assert allowed_ids(first) == {b}
    assert allowed_ids(second) == allowed_ids(alone) and {a, b} <= allowed_ids(second)


def test_what_was_compiled_is_gone_with_the_request(byte_level: Tokenizer) -> None:
    grammars = compiler(byte_level)
    for _ in range(3):
        grammar = Grammar.regex("ab?")
        grammars.check(grammar)
    assert len(grammars._compiled) == 1
    del grammar
    gc.collect()
    assert not grammars._compiled


def test_a_tokenizer_whose_text_is_not_its_tokens_is_refused(tmp_path: Path) -> None:
    """CPM-2's tokenizer of two languages writes spaces that no token has."""
    for tokenizer in (Tokenizer.load(save_cpm2_english(tmp_path / "cpm")), NoText()):
        with pytest.raises(InvalidParameter, match="tokenizer can't be used with a grammar"):
            GrammarCompiler(tokenizer, 300).check(Grammar.json_object())


def test_white_space_is_the_callers_choice(byte_level: Tokenizer) -> None:
    grammars = compiler(byte_level)
    (brace,) = byte_level.encode("{")
    space = byte_level.encode(" ")[0]
    for options, has_space in (({}, False), ({"x-guidance": {"whitespace_flexible": True}}, True)):
        matcher = grammars.matcher(Grammar.json_schema({"type": "object"} | options))
        matcher.advance(brace)
        assert (space in allowed_ids(matcher)) == has_space


def test_nothing_is_left_of_a_compiler(byte_level: Tokenizer) -> None:
    matcher = compiler(byte_level).matcher(Grammar.choice(["the water", "the wheel"]))
    gc.collect()
    vocabulary = weakref.ref(matcher._vocabulary)
    forced_ids(matcher)  # needs the tokenizer, though the compiler is gone
    assert not matcher.error
    del matcher
    gc.collect()
    assert vocabulary() is None


def test_any_thread_may_be_the_first(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    save_byte_level(tmp_path)
    grammars = compiler(Tokenizer.load(tmp_path))
    found: list[object] = []

    def check(number: int) -> None:
        grammar = Grammar.choice([f"the {number % 5} water"])
        grammars.check(grammar)
        found.append(len(forced_ids(grammars.matcher(grammar))))

    threads = [threading.Thread(target=check, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and len(set(found)) == 1


def optional(number: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{each}": {"type": "integer"} for each in range(number)}}


def test_thousands_of_choices_and_a_thousand_optional_properties(byte_level: Tokenizer) -> None:
    grammars = compiler(byte_level)
    matcher = grammars.matcher(Grammar.choice([f"answer {each}" for each in range(5000)]))
    said = byte_level.decode(forced_ids(matcher))
    assert said == "answer " and not matcher.error and matcher.allowed.bit_count() >= 10
    matcher = grammars.matcher(Grammar.json_schema(optional(1000)))
    forced_ids(matcher)
    assert not matcher.error


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema(optional(1001)), "the object at # has 1001 optional properties"),
        (
            lambda: Grammar.json_schema({"type": "object", "properties": {"a": {"items": optional(2000)}}}),
            "the object at #/properties/a/items has 2000 optional",
        ),
        # The rules' limit is met only behind the text that all of them begin with.
        (lambda: Grammar.lark("start: " + " | ".join(f'"answer {each}"' for each in range(9000))), "items"),
        (lambda: Grammar.lark("start: /a/ start"), "items"),
        (lambda: Grammar.json_schema("[" * 300_000), "300000 characters"),
    ],
)
def test_what_no_step_could_follow_is_refused_before_the_first(
    byte_level: Tokenizer, make: Callable[[], Grammar], said: str
) -> None:
    with pytest.raises(InvalidParameter, match=said):
        compiler(byte_level).check(make())
