"""The tokenizer in a GGUF file, made of the file's tokens, merges and scores. The file has a name for the
rules by which a text is split into words; `word_splits.py` has the rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.gguf_file import read_metadata
from penstock.text.gguf_vocabulary import Kind, Vocabulary, end_tokens
from penstock.text.word_splits import GUESSED_RULES, OLD_RULES, WORD_RULES, Spelling, WordRules

logger = logging.getLogger(__name__)

_SPACE = "\u2581"
#: A longer token of sentencepiece is not looked through for the tokens that it is made of.
MAX_TOKEN_CHARACTERS = 4096


@dataclass(frozen=True)
class _Made:
    """A tokenizer without its added tokens."""

    vocabulary: Vocabulary
    #: Of the package tokenizers.
    backend: Any
    #: transformers' names of special tokens, and their ids.
    special: dict[str, int]
    #: Whether a begin token, an end token and a separator stand around a prompt, if the file does not say.
    adds: tuple[bool, bool, bool]


def read_gguf(file: Path, guesses: bool = False) -> tuple[Any, frozenset[int]]:
    """transformers' form of the tokenizer in a GGUF file, or in any part of one, and the tokens that end an
    answer. `guesses`: take the usual rules for names of rules that are not known. Raises CheckpointNotFound,
    CorruptFile and UnsupportedModel."""
    from transformers import PreTrainedTokenizerFast  # the import takes a second

    vocabulary = Vocabulary.of(file, read_metadata(file))
    if vocabulary.model not in _MODELS:
        raise UnsupportedModel(
            f"{file} has a tokenizer of kind {vocabulary.model!r} (tokenizer.ggml.model); Penstock reads "
            f"{', '.join(_MODELS)}. Use the original repository"
        )
    made = _MODELS[vocabulary.model](vocabulary, guesses)
    added = _added_tokens(made)
    made.backend.add_tokens(list(added.values()))
    _frame(made)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made.backend,
        clean_up_tokenization_spaces=False,
        chat_template=vocabulary.chat_template,
        **{name: added[token_id] for name, token_id in made.special.items()},
    )
    if len(tokenizer) != len(vocabulary.tokens):
        raise CorruptFile(
            f"{file} has {len(vocabulary.tokens)} tokens, of which a tokenizer of {len(tokenizer)} tokens "
            "was made; download the file again"
        )
    ends = {tokenizer.eos_token_id} - {None}
    return tokenizer, frozenset(ends.union(end_tokens(vocabulary.metadata)))


# ---- what is added to every kind of tokenizer


def _added_tokens(made: _Made) -> dict[int, Any]:
    """The tokens that are found in a text before it is split: control tokens, and tokens of the model's user.
    By id."""
    from tokenizers import AddedToken

    vocabulary, special = made.vocabulary, made.special.values()
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    # Phi 3's control tokens take the white space after them, which no file tells.
    takes_space = "phi-3" in name or "phi3" in name
    takes_none = ("<unk>", "<s>", "<|endoftext|>")
    added = {}
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        is_special = kind in (Kind.CONTROL, Kind.UNKNOWN) or token_id in special
        if is_special or kind == Kind.USER_DEFINED:
            rstrip = takes_space and token not in takes_none
            added[token_id] = AddedToken(token, special=is_special, normalized=False, rstrip=rstrip)
    return added


def _frame(made: _Made) -> None:
    """The tokens around a prompt, and between two texts."""
    from tokenizers import processors

    vocabulary = made.vocabulary
    adds_bos, adds_eos, adds_sep = (
        bool(vocabulary.get(f"add_{name}_token", default))
        for name, default in zip(("bos", "eos", "sep"), made.adds, strict=True)
    )
    begin = made.special.get("cls_token", made.special.get("bos_token")) if adds_bos else None
    end = made.special.get("sep_token") if adds_sep else None
    end = made.special.get("eos_token") if end is None and adds_eos else end
    names = {token_id: vocabulary.tokens[token_id] for token_id in (begin, end) if token_id is not None}

    def around(text: str, number: int) -> list[str]:
        tokens = (names.get(begin, ""), names.get(end, ""))  # type: ignore[arg-type]
        before, after = ([f"{name}:{number}"] if name else [] for name in tokens)
        return [*before, f"${text}:{number}", *after]

    first = around("A", 0)
    made.backend.post_processor = processors.TemplateProcessing(
        single=first,
        pair=[*first, *around("B", 1)],
        special_tokens=[(name, token_id) for token_id, name in names.items()],
    )


# ---- kinds of tokenizers


def _byte_level(vocabulary: Vocabulary, guesses: bool) -> _Made:
    """BPE within words, in GPT-2's spelling of bytes or in sentencepiece's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rules = _rules(vocabulary, guesses)
    is_bytes = rules.spelling is Spelling.BYTES
    vocabulary = vocabulary if is_bytes else vocabulary.with_marked_spaces(_SPACE)
    ids, merges = vocabulary.ids, vocabulary.merges
    if not merges:
        raise CorruptFile(f"{vocabulary.path} has no merges for its vocabulary: download the file again")
    model = models.BPE(
        ids,
        [pair for pair in merges if pair[0] in ids and pair[1] in ids and "".join(pair) in ids],
        ignore_merges=rules.ignores_merges,
        byte_fallback=not is_bytes,
    )
    backend = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rules.splits]
    if is_bytes:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
        backend.decoder = _space_decoder(False)
    if rules.composes:
        backend.normalizer = normalizers.NFC()
    return _Made(vocabulary, backend, vocabulary.special_tokens({}), (rules.adds_bos, False, rules.adds_sep))


def _rules(vocabulary: Vocabulary, guesses: bool) -> WordRules:
    name = vocabulary.get("pre") or (vocabulary.model if vocabulary.model in WORD_RULES else None)
    if name is None:
        logger.warning(
            "%s does not say by which rules its tokenizer splits words, as files from before May 2024: the "
            "rules of that time hold, which some models don't have. A newer file of the model tells them",
            vocabulary.path,
        )
        return OLD_RULES
    if name in WORD_RULES:
        return WORD_RULES[name]
    if not guesses:
        raise UnsupportedModel(
            f"{vocabulary.path} has a tokenizer that splits words by the rules {name!r} "
            "(tokenizer.ggml.pre), which are not known here. Use the original repository; or allow the usual "
            "rules in their place (--guess-tokenizer), with which some texts get other tokens than those "
            "that the model knows"
        )
    logger.warning(
        "%s has a tokenizer that splits words by the rules %r, which are not known here: words are split by "
        "the usual rules, and some texts get other tokens than those that the model knows",
        vocabulary.path, name,
    )  # fmt: skip
    return GUESSED_RULES


def _sentencepiece(vocabulary: Vocabulary, guesses: bool) -> _Made:
    """sentencepiece's BPE, in which the score of a token tells when it is made of two others."""
    from tokenizers import Tokenizer, models, normalizers

    vocabulary = vocabulary.with_marked_spaces(_SPACE)
    special = vocabulary.special_tokens({"bos_token": 1, "eos_token": 2, "unk_token": 0})
    unknown = special.get("unk_token")
    model = models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _space_decoder(has_prefix)
    return _Made(vocabulary, backend, special, (True, False, False))


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token first: tokens of the model's user, the longest
    first, then all others by their scores. Control tokens and bytes are not made of others."""
    ids = {
        token: (token_id, kind)
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (Kind.NORMAL, Kind.UNUSED, Kind.USER_DEFINED)
    }
    _check_lengths(vocabulary.path, ids)
    scores, pairs = vocabulary.scores, list[tuple[bool, float, int, int, str]]()
    for token, (token_id, kind) in ids.items():
        is_own = kind != Kind.USER_DEFINED
        rank = -scores[token_id] if is_own else -len(token)
        pairs += [
            (is_own, rank, token_id, -cut, token)
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
    return [(token[:-cut], token[-cut:]) for *_, cut, token in sorted(pairs)]


def _check_lengths(path: Path, tokens: Iterable[str]) -> None:
    """Raises CorruptFile for a token that is too long: to look at each of its cuts takes time that grows with
    the square of its length."""
    for token in tokens:
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise CorruptFile(
                f"{path} has a token of {len(token)} characters in its vocabulary, which begins with "
                f"{token[:32]!r}; Penstock takes at most {MAX_TOKEN_CHARACTERS}. Download the file again"
            )


def _word_piece(vocabulary: Vocabulary, guesses: bool) -> _Made:
    """BERT's WordPiece. The file marks the beginnings of words, in place of what follows them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    defaults = {"cls_token": 101, "unk_token": 100, "sep_token": 102, "pad_token": 0, "mask_token": 103}
    special = vocabulary.special_tokens(defaults)
    own = {Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED}
    tokens = [
        token if kind in own or token_id in special.values()
        else token[1:] if token.startswith(_SPACE) else f"##{token}"
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    ]  # fmt: skip
    vocabulary = replace(vocabulary, tokens=tokens)
    unknown = special.get("unk_token")
    if unknown is None or len(vocabulary.ids) != len(tokens):
        raise CorruptFile(f"{vocabulary.path} has no vocabulary of WordPiece: download the file again")
    backend = Tokenizer(models.WordPiece(vocabulary.ids, unk_token=tokens[unknown]))
    lowers = bool(vocabulary.get("normalizer.lowercase", True))
    strips = bool(vocabulary.get("normalizer.strip_accents", lowers))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _Made(vocabulary, backend, special, (True, False, True))


def _unigram(vocabulary: Vocabulary, guesses: bool) -> _Made:
    """sentencepiece's Unigram: of all ways to cut a word, the one whose tokens have the best scores together
    (T5, XLM-RoBERTa)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = vocabulary.with_marked_spaces(_SPACE)
    special = vocabulary.special_tokens({"eos_token": 1, "unk_token": 2, "pad_token": 0})
    scored = list(zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True))
    backend = Tokenizer(models.Unigram(scored, special.get("unk_token"), byte_fallback=False))
    steps: list[Any] = []
    if charsmap := vocabulary.get("precompiled_charsmap"):
        try:
            steps.append(normalizers.Precompiled(bytes(byte & 255 for byte in charsmap)))
        except Exception as error:  # tokenizers has no narrower one
            raise CorruptFile(f"{vocabulary.path} has a table of characters that is none") from error
    if vocabulary.get("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(cut), " " * (cut == " {2,}")) for cut in ("^ +| +$", " {2,}")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.get("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return _Made(vocabulary, backend, special, (False, True, False))


def _space_decoder(has_prefix: bool) -> Any:
    from tokenizers import decoders

    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


_MODELS: dict[str, Callable[[Vocabulary, bool], _Made]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _byte_level,
    "bert": _word_piece,
    "t5": _unigram,
}
