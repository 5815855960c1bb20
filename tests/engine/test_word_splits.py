"""How words are split, by every name of rules that a GGUF file may have (`tokenizer.ggml.pre`), against the
expressions of llama.cpp's table (src/llama-vocab.cpp and unicode.cpp), run by the package `regex`: each
expression splits the pieces of the one before it, and what lies between matches stays a piece."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import regex
from tokenizers import Regex, pre_tokenizers

from penstock.text.word_splits import WORD_RULES, Spelling

CT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
G = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
W = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CODER_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
PS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + W
)
U, V = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
U_NOT_HAN, V_NOT_HAN = (rf"(?:(?!\p{{Han}}){letters})" for letters in (U, V))
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def llama(digits: str, ends: str = r"[\r\n]*") -> str:
    return rf"{CT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{W}"


def cased(contraction: str, digits: str, ends: str, upper: str = U, lower: str = V) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{ends}|{W}"
    )


class Row(NamedTuple):
    """Rules of some names, as the table has them."""

    names: str
    splits: tuple[str, ...]
    #: I: a whole piece in the vocabulary is one token. B: a begin token. S: a separator.
    flags: str = ""


THREE, ONE, QWEN2 = r"\p{N}{1,3}", r"\p{N}", llama(r"\p{N}")
GPT4O = cased(f"{CT}?", THREE, r"[\r\n/]*")
LINES = r"[^\n]+|[\n]+"
ROWS = [
    Row("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        (llama(THREE),), "IB"),
    Row("dbrx smaug-bpe chatglm-bpe", (llama(THREE),)),
    Row("glm4", (llama(THREE),), "I"),
    Row("jais-2", (llama(THREE).replace(W, r"\s*[\r\n]+|" + "|".join(rf"\s{{{n}}}(?!\S)" for n in (
        512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"),)),
    Row("qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2 megrez stablelm2", (QWEN2,)),
    Row("qwen35", (rf"{CT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                   rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{W}",)),
    Row("laguna", (LINES, QWEN2)),
    Row("minicpm5", (THREE, llama(r"\p{N}+")), "I"),
    Row("seed-coder", (rf"{CT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{W}",)),
    Row("bailingmoe bailingmoe2 llada-moe", (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",)),
    Row("exaone-moe", (rf"{CT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                       r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    Row("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais "
        "exaone4 trillion granite-docling", (G,)),
    Row("jina-v1-en jina-v2-code roberta-bpe", (G,), "S"),
    Row("starcoder refact codeshell exaone minerva-7b mellum2 command-r smollm", (ONE, G)),
    Row("falcon", (PUNCTUATION, G, "[0-9][0-9][0-9]")),
    Row("default", (r"[\p{P}\$\+<=>\^~\|]+", G, r"\p{N}+", "[0-9][0-9][0-9]")),
    Row("tekken", (cased("", ONE, r"[\r\n/]*"),), "IB"),
    Row("gpt-4o llama4 kanana2 talkie minimax-m2", (GPT4O,)),
    Row("granite-embed-multi-97m", (GPT4O,), "I"),
    Row("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    Row("kimi-k2", (r"[\p{Han}]+|" + cased(f"{CT}?", THREE, r"[\r\n]*", U_NOT_HAN, V_NOT_HAN),)),
    Row("deepseek-v3 hunyuan-dense joyai-llm", (THREE, CJK, PS)),
    Row("afmoe", (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
                  r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
                  r"\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
                  r"\u1100-\u11ff]+", PS)),
    Row("youtu", (r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
                  r"\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + CJK,
                  cased(f"{CT}?", ONE, r"[\r\n/]*")), "I"),
    Row("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CODER_CJK, ONE)),
    Row("deepseek-llm", (
        r"[\r\n]",
        r"\s?(?:(?![\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa"
        r"\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb"
        r"\U0001df00-\U0001df1e])[\p{Lu}\p{Ll}\p{Lt}])+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", CODER_CJK, r"\p{N}+")),
    Row("bloom gpt3-finnish poro-chat", (BLOOM,)),
    Row("viking", (BLOOM, ONE)),
    Row("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    Row("chameleon", (r"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", ONE,
                      r"[\p{P}!-/:-@\[-`{-~]", G), "B"),
    Row("gemma4", (LINES,), "B"),
    Row("granite-embed-multi-311m sarvam-moe", (LINES,)),
]  # fmt: skip
#: Names that the table lacks, since they are newer.
NEWER = {"glm5", "hy_v4", "spark2_5", "ufakzeka"}

#: What texts are made of.
PARTS = (
    "12345678 3.14 1,000,000 0x1F 7th \u0661\u0662\u0663 \u00bd\u00b2 \u2167 99bottles 2024-11-29",
    "def f(x): return x[0] != None # why?|{a:b};<p>&amp;</p>|x+=1|$HOME/*.py|https://a.b/c?d=e&f=g|a_b->c::d",
    "\u4f60\u597d \u4e16\u754c\uff0c\u4eca\u5929\u3002 \u3053\u3093\u306b\u3061\u306f"
    " \u30ab\u30bf\u30ab\u30ca \u3000\u5168\u89d2\uff11\uff12 \ud55c\uad6d\uc5b4\uc694"
    " \u3105\u3106 \uff01\uff5e",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    " \u2764\ufe0f \U0001f1e9\U0001f1ea a\U0001f680b \u2603",
    "I'm you'LL we've it's don't DON'T he'D they'Re 'S 'tis o'clock x's 'll",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627\u060c \u05e9\u05dc\u05d5\u05dd"
    " \u0928\u092e\u0938\u094d\u0924\u0947\u0964 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    " \u0393\u03b5\u03b9\u03ac \u0531\u0575\u0562 \u10d2\u10d0\u10db \u01c5 \u02b0a e\u0301t\u0301e \ufb01"
    " \u1780\u17d2\u1793 \u1019\u103c",
    "helloWorld HTTPServer iPhone ABCdef \u00c9cole camelCaseHTML McDonald's <sentinel:3> IMGIMGABZ",
)  # fmt: skip
BLANKS = ("", " ", "  ", "   ", "     ", "\n", "\n\n", " \n ", "\r\n", "\t", "\t\t ", "\u00a0", " /\n",
          "...\n\n", "!? ")  # fmt: skip


def texts() -> list[str]:
    """300 texts: pieces of all kinds with all kinds of blanks between, some at the ends."""
    draw = random.Random(48)
    pieces = [piece for part in PARTS for piece in (*part.split(" "), *part.split("|"))]
    found = []
    for index in range(300):
        pool = pieces if index % 3 else PARTS[index % len(PARTS)].split(" ")
        chosen = draw.choices(pool, k=draw.randint(1, 12))
        found.append("".join(piece + draw.choice(BLANKS) for piece in chosen) + " " * (index % 5))
    return found


TEXTS = texts()


def split(text: str, expressions: tuple[str, ...]) -> list[str]:
    pieces = [text]
    for expression in expressions:
        found = list[str]()
        for piece in pieces:
            end = 0
            for match in regex.finditer(expression, piece):
                found += [piece[end : match.start()], match[0]]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


def test_all_names_are_there() -> None:
    assert {name for row in ROWS for name in row.names.split()} == set(WORD_RULES) - NEWER


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names.split()[0])
def test_300_texts(row: Row) -> None:
    rules = WORD_RULES[row.names.split()[0]]
    for name in row.names.split():
        own = WORD_RULES[name]
        assert own.splits == rules.splits, name
        flags = {"I": own.ignores_merges, "B": own.adds_bos, "S": own.adds_sep}
        assert "".join(flag for flag, has in flags.items() if has) == row.flags, name
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in rules.splits]
    splitter = pre_tokenizers.Sequence(steps)
    assert rules.spelling is (Spelling.SPACES if row.splits == (LINES,) else Spelling.BYTES)
    for text in TEXTS:
        words = [word for word, _ in splitter.pre_tokenize_str(text)]
        assert words == split(text, row.splits), text
