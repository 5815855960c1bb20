"""MiddleTokens: the special tokens by which decoders of code fill in the middle of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer

#: A character that no tokenizer merges with others. Encoded in front of a text, the character keeps a
#: sentencepiece tokenizer from putting a space there.
_MARK = "\x02"


@dataclass(frozen=True)
class MiddleTokens:
    """Names of tokens. A prompt is: prefix token, text before the blank, suffix token, text after the blank,
    middle token. The model goes on with the text of the blank."""

    prefix: str
    suffix: str
    middle: str
    #: Tokens that may end the middle, beside the model's own end tokens. Not every vocabulary has all.
    ends: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, str, str]:
        return self.prefix, self.suffix, self.middle

    def prompt(self, tokenizer: Tokenizer, vocab: Mapping[str, int], before: str, behind: str) -> list[int]:
        prefix, suffix, middle = (vocab[name] for name in self.names)
        first = tokenizer.encode(before, add_special_tokens=False)
        rest = _encode_inner(tokenizer, behind)
        return [*tokenizer.encode(""), prefix, *first, suffix, *rest, middle]

    def stop_token_ids(self, vocab: Mapping[str, int]) -> tuple[int, ...]:
        """The tokens that end an answer. The three tokens of the prompt have no place in an answer either."""
        return tuple(vocab[name] for name in (*self.names, *self.ends) if name in vocab)


#: The forms of models that people have. Names in full-width bars are DeepSeek's.
KINDS = (
    # Qwen2.5-Coder, CodeGemma
    MiddleTokens(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite Code
    MiddleTokens(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    # SantaCoder
    MiddleTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder
    MiddleTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    # CodeLlama
    MiddleTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
)


def find_middle_tokens(vocab: Mapping[str, int]) -> MiddleTokens | None:
    """The form whose three tokens a vocabulary has."""
    return next((kind for kind in KINDS if all(name in vocab for name in kind.names)), None)


def _encode_inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that goes on where another one ended."""
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    ids = tokenizer.encode(_MARK + text, add_special_tokens=False)
    return ids[len(mark) :] if mark and ids[: len(mark)] == mark else tokenizer.encode(text, False)
