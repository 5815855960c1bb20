"""Thinking: the part of an answer that comes before what was asked for; ThinkingMatcher: where an answer
stands in it. No torch here. A marker is found in the bytes of the tokens, since it may be one token or
several."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from penstock.errors import InvalidParameter
from penstock.generation.grammars.matching import Matching

#: All tokens, as bits.
_ALL = -1


@dataclass(frozen=True)
class Thinking:
    """The answer thinks, and the request's grammar begins after the thinking."""

    #: The text that begins the thinking, unless the prompt has it (`is_open`), and the text that ends it.
    opener: str
    closer: str
    is_open: bool
    #: The token of the opener, where it is one token. Only then a grammar leaves the model the choice to
    #: think.
    opener_id: int | None = None
    #: Tokens of the thinking after which `forced` follows, which ends the thinking. None: no limit.
    max_tokens: int | None = None
    forced: tuple[int, ...] = ()
    #: Tokens that must come after the closer, before the grammar begins.
    lead: tuple[int, ...] = ()
    #: Whether the model may end its answer in the thinking, also where a grammar is to follow: gpt-oss calls
    #: tools there.
    may_end: bool = False

    def __post_init__(self) -> None:
        if not self.closer:
            raise InvalidParameter("thinking", "thinking has no text that ends it; it needs one")
        if self.max_tokens is not None and (self.max_tokens < 0 or not self.forced):
            raise InvalidParameter(
                "thinking", "a limit of thinking must be at least 0, and needs tokens that end the thinking"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        own = () if self.opener_id is None else (self.opener_id,)
        return (*self.forced, *self.lead, *own)


class _Phase(Enum):
    #: The answer may begin to think.
    BEFORE = 0
    WITHIN = 1
    #: Tokens are forced: the end of the thinking, and what leads to the answer.
    FORCED = 2
    BEHIND = 3


class ThinkingMatcher:
    """Has the attributes of the Matcher of a grammar (matching.py). `inner` is the matcher of what comes
    after the thinking; None: anything may come."""

    def __init__(
        self,
        thinking: Thinking,
        inner: Matching | None,
        token_bytes: Callable[[int], bytes],
        end_token_ids: Iterable[int],
    ) -> None:
        self._thinking = thinking
        self._inner = inner
        self._token_bytes = token_bytes
        self._closer = thinking.closer.encode()
        is_bound = inner is not None and not thinking.may_end
        self._ends = sum(1 << token_id for token_id in set(end_token_ids)) if is_bound else 0
        self._phase = _Phase.WITHIN if thinking.is_open else _Phase.BEFORE
        if inner is not None and not thinking.is_open and thinking.opener_id is None:
            self._phase = _Phase.BEHIND
        #: The bytes of the last tokens, which may hold a part of a marker.
        self._tail = b""
        self._num_tokens = 0
        self._queue: tuple[int, ...] = ()
        self._before: tuple[_Phase, bytes, int, tuple[int, ...]] | None = None
        self._check_limit()

    @property
    def is_complete(self) -> bool:
        return self._phase is _Phase.BEHIND and self._inner is not None and self._inner.is_complete

    @property
    def error(self) -> str:
        is_inner = self._phase in (_Phase.BEFORE, _Phase.BEHIND) and self._inner is not None
        return self._inner.error if is_inner and self._inner is not None else ""

    @property
    def forced(self) -> int | None:
        if self._phase is _Phase.FORCED:
            return self._queue[0]
        if self._phase is _Phase.BEHIND and self._inner is not None:
            return self._inner.forced
        return None

    @property
    def allowed(self) -> int:
        """Bit i: token i may come next. -1 has the bits of all tokens."""
        match self._phase:
            case _Phase.FORCED:
                return 1 << self._queue[0]
            case _Phase.WITHIN:
                return ~self._ends
        allowed = _ALL if self._inner is None else self._inner.allowed
        opener = self._thinking.opener_id
        if self._phase is _Phase.BEHIND or opener is None:
            return allowed
        return allowed & ~(1 << opener) if self._thinking.max_tokens == 0 else allowed | 1 << opener

    def advance(self, token_id: int) -> None:
        self._before = self._phase, self._tail, self._num_tokens, self._queue
        match self._phase:
            case _Phase.BEFORE:
                self._begin(token_id)
            case _Phase.WITHIN:
                self._think(token_id)
            case _Phase.FORCED:
                self._queue = self._queue[1:]
                if not self._queue:
                    self._phase = _Phase.BEHIND
            case _Phase.BEHIND:
                if self._inner is not None:
                    self._inner.advance(token_id)

    def _begin(self, token_id: int) -> None:
        self._tail += self._token_bytes(token_id)
        begun, opener = self._tail.lstrip(), self._thinking.opener.encode()
        if token_id == self._thinking.opener_id or begun.startswith(opener):
            self._phase, self._tail = _Phase.WITHIN, b""
            self._check_limit()
        elif self._inner is not None or not opener.startswith(begun):
            self._phase = _Phase.BEHIND
            if self._inner is not None:
                self._inner.advance(token_id)

    def _think(self, token_id: int) -> None:
        self._num_tokens += 1
        self._tail += self._token_bytes(token_id)
        if self._closer in self._tail:
            self._force(self._thinking.lead)
            return
        self._tail = self._tail[-len(self._closer) :]
        self._check_limit()

    def _check_limit(self) -> None:
        most = self._thinking.max_tokens
        if self._phase is _Phase.WITHIN and most is not None and self._num_tokens >= most:
            self._force(self._thinking.forced + self._thinking.lead)

    def _force(self, token_ids: tuple[int, ...]) -> None:
        self._queue = token_ids
        self._phase = _Phase.FORCED if token_ids else _Phase.BEHIND

    def after(self, token_id: int) -> ThinkingMatcher:
        other = self.fork()
        other.advance(token_id)
        return other

    def fork(self) -> ThinkingMatcher:
        other = copy.copy(self)
        other._inner = self._inner and self._inner.fork()
        return other

    def retreat(self) -> None:
        """Take the last token back, once."""
        assert self._before is not None
        has_moved = self._phase is _Phase.BEHIND and self._before[0] in (_Phase.BEFORE, _Phase.BEHIND)
        if self._inner is not None and has_moved:
            self._inner.retreat()
        self._phase, self._tail, self._num_tokens, self._queue = self._before
