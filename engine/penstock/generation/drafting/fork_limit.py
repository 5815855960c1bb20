"""ForkLimit: how far guesses may be followed along a grammar."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from penstock.generation.sequence import Sequence

if TYPE_CHECKING:
    from penstock.generation.grammars.grammar import Grammar

#: Forks of a grammar's matchers. A compiled grammar has room for 50,000 states of its lexer, which all its
#: matchers share, and a fork along a wrong guess takes one or two. They must not use up what answers need.
MAX_FORKS = 4000


class ForkLimit:
    """Counts the forks of each grammar. Beyond the limit, guesses are one token deep."""

    def __init__(self) -> None:
        self._spent: WeakKeyDictionary[Grammar, int] = WeakKeyDictionary()

    def take(self, sequence: Sequence) -> bool:
        """Whether there may be one more fork of the sequence's matcher."""
        grammar = sequence.params.grammar
        if grammar is None:
            return True
        spent = self._spent.get(grammar, 0)
        self._spent[grammar] = min(spent + 1, MAX_FORKS)
        return spent < MAX_FORKS

    def longer(self, text: Sequence, token_id: int, asked: Sequence) -> Sequence | None:
        """A text with one token more, whose guesses `asked` wants: a copy, with a matcher of its own. None
        beyond the limit, or if the text's grammar is complete then."""
        if not self.take(asked):
            return None
        matcher = text.matcher.after(token_id) if text.matcher is not None else None
        if matcher is not None and matcher.is_complete:
            return None
        found = copy.copy(text)
        found.token_ids, found.matcher = [*text.token_ids, token_id], matcher
        return found
