"""CPM-1: GPT-2's weights and a tokenizer of its own, in the forms that folders have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cpm_folders import SENTENCES, save_cpm1, save_cpm1_model

from penstock.engine import Engine
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.grammar_matcher import GrammarCompiler
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.sequence import FinishReason
from penstock.model.registry import open_model
from penstock.text.tokenizer import Tokenizer
from penstock.weights.conversion.convert import convert


@pytest.fixture(scope="module")
def cpm1_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cpm1(tmp_path_factory.mktemp("cpm-1"))


@pytest.fixture(scope="module")
def cpm1(cpm1_folder: Path) -> Tokenizer:
    return Tokenizer.load(cpm1_folder)


def test_marks_of_cpm1(cpm1: Tokenizer) -> None:
    ids = cpm1.encode("天空 窗外\n")
    assert (ids.count(10), ids[-1]) == (1, 3)
    assert [cpm1.token_bytes(i) for i in (3, 8, 9, 10)] == [b"\n", b"", b",", b" "]
    assert cpm1.decode(ids) == "天空 窗外\n"
    assert cpm1.decode([8, *ids, 7], skip_special_tokens=False) == "天空 窗外\n<eod>"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 50256}}, {7}),
        ({"generation_config": {"eos_token_id": 2}, "config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {"eos_token_id": [7, 12]}}, {7, 12}),
        ({"generation_config": {"eos_token_id": [1, 2]}}, {7}),
        ({"tokenizer_config": {"tokenizer_class": "CpmTokenizer", "eos_token": "</s>"}}, {7}),
    ],
)
def test_an_answer_ends_with_eod(
    files: dict[str, Any], expected: set[int], cpm1_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "spiece.model").write_bytes((cpm1_folder / "spiece.model").read_bytes())
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "gpt2"} | content))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_what_transformers_class_adds_is_left_out(cpm1: Tokenizer, tmp_path: Path) -> None:
    """Its `<cls>` has an id behind the embedding's last row."""
    save_cpm1(
        tmp_path, tokenizer_class="CpmTokenizerFast", cls_token="<cls>", eos_token="</s>",
        additional_special_tokens=["<eop>", "<eod>"], chat_template="{{ messages[0].content }}",
        added_tokens_decoder={str(cpm1.vocab_size): {"content": "<cls>", "special": True}},
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9999, "content": "<cls>"}]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == cpm1.vocab_size
    assert tokenizer.encode("天空是蔚蓝色") == cpm1.encode("天空是蔚蓝色")
    assert tokenizer.has_chat_template


@pytest.mark.parametrize("file", ["spiece.model", "chinese_vocab.model", "tokenizer.model"])
def test_cpm1_is_known_by_its_pieces(file: str, cpm1: Tokenizer, tmp_path: Path) -> None:
    """CPM-1's own repository has no tokenizer_config.json, and a vocab.json of another kind."""
    save_cpm1(tmp_path, file)
    (tmp_path / "vocab.json").write_text("{}")
    assert Tokenizer.load(tmp_path).encode("天空 窗外") == cpm1.encode("天空 窗外")


def test_cpm1_writes_a_given_text(cpm1: Tokenizer) -> None:
    """A grammar's tokens are those of the tokenizer, without the mark of a word, which has no text."""
    grammars = GrammarCompiler(cpm1, cpm1.vocab_size)
    for text in SENTENCES[:6]:
        # Half-width as the model's normalizer makes the text.
        text = cpm1.decode(cpm1.encode(text))
        matcher, ids = grammars.matcher(Grammar.choice([text])), []
        while matcher.forced is not None:
            ids.append(matcher.forced)
            matcher.advance(matcher.forced)
        assert matcher.is_complete and not matcher.error
        assert cpm1.decode(ids) == text
        assert ids == [i for i in cpm1.encode(text) if i != 8]


def test_cpm1_in_the_engine(tmp_path: Path) -> None:
    """From transformers' folder, and from the folder that `penstock convert` makes of it."""
    prompt, answer = "今天天气很好，", "我们去 公园\n散步吧"
    source, converted = save_cpm1_model(tmp_path / "cpm-1", prompt, answer), tmp_path / "int8"
    convert(open_model(source).store, converted)
    for folder in (source, converted):
        with Engine.load(folder) as engine:
            assert engine.max_model_len == 1024
            assert engine.spec.vocab_size == engine.tokenizer.vocab_size
            params = SamplingParams(max_tokens=60, temperature=0)
            (completion,) = engine.generate([engine.tokenizer.encode(prompt)], params)
        assert (completion.text, completion.finish_reason) == (answer, FinishReason.STOP)
        assert completion.token_ids[-1] == 7
