"""LongestMatch: a word -> the longest pieces of a vocabulary, from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: A longer word is unknown as a whole. The models were trained so.
MAX_WORD_CHARS = 200


class LongestMatch:
    """Finds pieces greedily. A character with which no piece begins becomes the unknown token."""

    def __init__(
        self,
        ids: Mapping[str, int],
        unknown: int,
        continuation: str = "",
        max_word_chars: int | None = MAX_WORD_CHARS,
    ) -> None:
        """continuation: what pieces begin with that stand within a word and have no Chinese character.
        max_word_chars: None where a word is a whole text."""
        self._ids = ids
        self._unknown = unknown
        self._continuation = continuation
        self._max_word_chars = max_word_chars
        self._max_chars = max(map(len, ids))

    def encode(self, words: Iterable[str]) -> list[int]:
        return [token_id for word in words for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        if self._max_word_chars is not None and len(word) > self._max_word_chars:
            return [self._unknown]
        ids: list[int] = []
        start = 0
        while start < len(word):
            token_id, start = self._longest(word, start)
            ids.append(token_id)
        return ids

    def _longest(self, word: str, start: int) -> tuple[int, int]:
        """The piece that begins at `start`, and where the piece ends."""
        for end in range(min(len(word), start + self._max_chars), start, -1):
            part = word[start:end]
            if start and self._continuation and not has_chinese(part):
                part = self._continuation + part
            if (token_id := self._ids.get(part)) is not None:
                return token_id, end
        return self._unknown, start + 1


def has_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)
