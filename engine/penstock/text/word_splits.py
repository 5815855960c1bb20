"""How byte-level tokenizers split a text into words, by the names that GGUF files give to the rules
(`tokenizer.ggml.pre`). Each rule is a row of expressions: every expression splits the pieces that the one
before it left, and what lies between its matches stays a piece. A further name is a line of `WORD_RULES`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Spelling(Enum):
    """How a vocabulary spells a text."""

    #: With GPT-2's characters, each of which stands for a byte.
    BYTES = auto()
    #: As it is, with U+2581 for a space; what the vocabulary lacks as bytes, "<0xE4>".
    SPACES = auto()


@dataclass(frozen=True)
class WordRules:
    """The rules of one name, and what its tokenizers do beside splitting."""

    splits: tuple[str, ...]
    #: A word that is a token as a whole is this token, whether merges reach it or not.
    ignores_merges: bool = False
    #: Where the file does not say whether the begin token, or a separator, stands around a prompt.
    adds_bos: bool = False
    adds_sep: bool = False
    #: Letters and their accents become one character first, as the model's own tokenizer has it.
    composes: bool = False
    spelling: Spelling = Spelling.BYTES


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
#: GPT-2's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
#: A mark with the letters after it, letters, marks: DeepSeek's last expression.
_MARKS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


def _like_llama3(digits: str, begin: str = f"{_CONTRACTION}|", blanks: str = _BLANKS) -> str:
    return rf"{begin}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{blanks}"


def _like_gpt4o(digits: str, contraction: str, ends: str = r"[\r\n/]*", but: str = "") -> str:
    """Words of a large letter and small ones. `ends` may follow marks; `but` are no letters."""
    upper, lower = (rf"[\p{{L{x}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for x in ("u}\\p{Lt", "l"))
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_BLANKS}"
    )


_LLAMA3 = _like_llama3(r"\p{N}{1,3}")
_QWEN2 = _like_llama3(r"\p{N}")
_GPT4O = _like_gpt4o(r"\p{N}{1,3}", f"{_CONTRACTION}?")
_BY_LINES = r"[^\n]+|[\n]+"
#: Blanks in the longest halves that fit.
_JAIS2_BLANKS = "|".join(
    (r"\s*[\r\n]+", *(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}")
)
#: Letters of alphabets with large and small ones, as DeepSeek LLM has them: without Armenian, Georgian and
#: what is newer.
_DEEPSEEK_LETTERS = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^"
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e]]+"
)  # fmt: skip
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_AFMOE_LETTERS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_LETTERS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

_RULES: list[tuple[str, WordRules]] = [
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        WordRules((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", WordRules((_LLAMA3,))),
    ("glm4 glm5", WordRules((_LLAMA3,), ignores_merges=True)),
    ("jais-2", WordRules((_like_llama3(r"\p{N}{1,3}", blanks=_JAIS2_BLANKS),))),
    ("qwen2 deepseek-r1-qwen", WordRules((_QWEN2,), composes=True)),
    ("kormo f2llmv2 hunyuan solar-open grok-2 megrez stablelm2", WordRules((_QWEN2,))),
    (
        "qwen35",
        WordRules(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
            ),
            composes=True,
        ),
    ),
    ("laguna", WordRules((_BY_LINES, _QWEN2))),
    ("minicpm5", WordRules((r"\p{N}{1,3}", _like_llama3(r"\p{N}+")), ignores_merges=True)),
    ("seed-coder", WordRules((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",
    ))),
    ("bailingmoe bailingmoe2 llada-moe", WordRules((
        _like_llama3(r"\p{N}", "'(?i:[sdmt]|ll|ve|re)|", r"\s*[\r\n]|\s+(?!\S)|\s+"),
    ))),
    ("exaone-moe", WordRules((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ))),
    ("ufakzeka", WordRules((_like_llama3(r"\p{N}", ""),))),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais "
        "exaone4 trillion granite-docling",
        WordRules((_GPT2,)),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", WordRules((_GPT2,), adds_sep=True)),
    (
        "starcoder refact codeshell exaone minerva-7b mellum2 command-r smollm",
        WordRules((r"\p{N}", _GPT2)),
    ),
    ("falcon", WordRules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("tekken", WordRules((_like_gpt4o(r"\p{N}", ""),), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", WordRules((_GPT4O,))),
    ("granite-embed-multi-97m", WordRules((_GPT4O,), ignores_merges=True)),
    ("tiny_aya cohere2moe", WordRules((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("kimi-k2", WordRules((
        r"[\p{Han}]+|" + _like_gpt4o(r"\p{N}{1,3}", f"{_CONTRACTION}?", r"[\r\n]*", r"&&[^\p{Han}]"),
    ))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", WordRules((r"\p{N}{1,3}", _CJK, _MARKS))),
    ("spark2_5", WordRules((
        r"\p{N}{1,3}", _CJK, _MARKS.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}",
    ))),
    ("afmoe", WordRules((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_LETTERS, _MARKS))),
    (
        "youtu",
        WordRules((_YOUTU_LETTERS, _like_gpt4o(r"\p{N}", f"{_CONTRACTION}?")), ignores_merges=True),
    ),
    (
        "deepseek-coder",
        WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ),
    ("deepseek-llm", WordRules((
        r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _DEEPSEEK_CJK, r"\p{N}+",
    ))),
    ("bloom gpt3-finnish poro-chat", WordRules((_BLOOM,))),
    ("viking", WordRules((_BLOOM, r"\p{N}"))),
    ("superbpe", WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("chameleon", WordRules(_CHAMELEON, adds_bos=True)),
    ("gemma4", WordRules((_BY_LINES,), adds_bos=True, spelling=Spelling.SPACES)),
    ("granite-embed-multi-311m sarvam-moe", WordRules((_BY_LINES,), spelling=Spelling.SPACES)),
]  # fmt: skip

#: All rules that are known, by name.
WORD_RULES: dict[str, WordRules] = {name: rules for names, rules in _RULES for name in names.split()}
#: The rules of files that were made before files named any.
OLD_RULES = WORD_RULES["default"]
#: What an unknown name most likely means, where the user allows to guess: the rules of most models today.
GUESSED_RULES = WORD_RULES["llama-bpe"]
