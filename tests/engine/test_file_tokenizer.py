"""tokenizer.json without transformers, against transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from penstock.text.file_tokenizer import PLAIN_MODELS, FileTokenizer, read_file_tokenizer
from penstock.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "engine" / "penstock" / "demo_model"
TEXTS = [
    "",
    " Once upon a time,\n\nthere was",
    "<|user|>Hello<|end|> there",
    "日本\ud7ff é\u200b",
    "<|pad|><|none|>",
]
ADDED = {"content": "<|bos|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def folder_of(folder: Path, model_type: str = "llama", **config: Any) -> Path:
    """The demo model's tokenizer, with changes in tokenizer_config.json; None leaves a key out."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    told = json.loads((DEMO / "tokenizer_config.json").read_text()) | config
    told = {key: value for key, value in told.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def check_equal(folder: Path) -> None:
    own, theirs = read_file_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert own is not None and type(theirs) is TokenizersBackend
    assert own.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "vocab_size", "all_special_ids"):
        assert getattr(own, name) == getattr(theirs, name), name
    for name in ("special_tokens_map", "chat_template", "added_tokens_decoder"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert len(own) == len(theirs) and own.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for adds in (True, False):
            ids = own.encode(text, add_special_tokens=adds)
            assert ids == theirs.encode(text, add_special_tokens=adds)
            for skips in (True, False):
                theirs_text = theirs.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
                assert own.decode(ids, skip_special_tokens=skips) == theirs_text
        pair = theirs(text, TEXTS[1], return_token_type_ids=True)
        assert own(text, TEXTS[1]) == {key: pair[key] for key in ("input_ids", "token_type_ids")}
    for token_id in (0, 1, 300, len(own) - 1, len(own)):
        assert own.convert_ids_to_tokens(token_id) == theirs.convert_ids_to_tokens(token_id)


@pytest.mark.parametrize("kind", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", sorted(PLAIN_MODELS))
def test_transformers_takes_tokenizer_json_as_it_is(kind: str, model_type: str, tmp_path: Path) -> None:
    """For each model_type that is listed; another release of transformers may take another class."""
    folder = folder_of(tmp_path, model_type, tokenizer_class=kind)
    own, theirs = read_file_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert own is not None and type(theirs) is TokenizersBackend
    assert own.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    "config",
    [
        {}, {"added_tokens_decoder": {"1": ADDED | {"special": True}}}, {"extra_special_tokens": None},
        {"extra_special_tokens": None, "additional_special_tokens": ["<|user|>"]}, {"pad_token": None},
        {"eos_token": ADDED | {"content": "<|end|>", "__type": "AddedToken"}}, {"add_bos_token": False},
        {"model_max_length": 9, "add_prefix_space": True, "legacy": False, "split_special_tokens": False},
    ],
)  # fmt: skip
def test_ids_and_texts_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    check_equal(folder_of(tmp_path, **config))


@pytest.mark.parametrize("template", ["plain", None, [{"name": "default", "template": "a"}]])
def test_templates_of_the_config(template: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chat_template=template)
    (folder / "chat_template.jinja").unlink()
    check_equal(folder)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen2", {}), ("mistral", {}), ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"tokenizer_class": None}), ("llama", {"image_token": "<|user|>"}),
        ("llama", {"extra_special_tokens": {"image_token": "<|user|>"}}), ("llama", {"bos_token": "<new>"}),
        ("llama", {"added_tokens_decoder": {"1": ADDED | {"special": True, "lstrip": True}}}),
        ("llama", {"split_special_tokens": True}), ("llama", {"auto_map": {"AutoTokenizer": ["a", "b"]}}),
    ],
)  # fmt: skip
def test_what_changes_the_file_is_left_to_transformers(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    assert read_file_tokenizer(folder_of(tmp_path, model_type, **config)) is None


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "added_tokens.json", "additional_chat_templates"]
)
def test_other_files_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text("{}")
    assert read_file_tokenizer(folder) is None


def test_a_damaged_file_is_left_to_transformers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    assert read_file_tokenizer(folder) is None
    assert read_file_tokenizer(tmp_path / "none") is None


def test_the_demo_needs_no_transformers() -> None:
    assert isinstance(Tokenizer.load(DEMO).backend, FileTokenizer)
    program = (
        "import sys; from pathlib import Path; from penstock import Tokenizer, render_chat\n"
        "tokenizer = Tokenizer.load(Path(sys.argv[1]))\n"
        "render_chat(tokenizer, [{'role': 'user', 'content': 'Hello'}])\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(DEMO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
