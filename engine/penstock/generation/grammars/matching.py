"""Matching: what sampler, sequence and answer ask of a form that the answer has to follow."""

from __future__ import annotations

from typing import Protocol


class Matching(Protocol):
    """Where one answer stands in its form: Matcher (grammar_matcher.py) for a grammar, BlankMatcher
    (blanks.py) for blanks, ThinkingMatcher (thinking.py) for an answer that thinks first. The place depends
    on the answer's own tokens and on nothing else."""

    @property
    def allowed(self) -> int:
        """Bit i: token i may come next."""
        ...

    @property
    def error(self) -> str:
        """Why there is no next token. "" as long as there is one."""
        ...

    @property
    def is_complete(self) -> bool:
        """Only the end may follow."""
        ...

    @property
    def forced(self) -> int | None:
        """The only token that may come next."""
        ...

    def advance(self, token_id: int) -> None:
        """Go on with the answer's next token, which must be allowed."""
        ...

    def after(self, token_id: int) -> Matching:
        """A matching that stands one token further. This one stays where it is."""
        ...

    def fork(self) -> Matching:
        """Another matching at the same place; advancing one does not move the other."""
        ...

    def retreat(self) -> None:
        """Take the last token back."""
        ...
