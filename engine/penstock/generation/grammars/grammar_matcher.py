"""GrammarCompiler: grammars for one model's vocabulary; Matcher: where one answer stands in its grammar.

llguidance does the work. It is told two things of a tokenizer. The first is the bytes of each token, which
are the bytes that the detokenizer makes text of. The second is how the tokenizer itself writes a text: where
a grammar leaves only one text, only the tokenizer's own token is allowed, so that the model sees the tokens
that it was trained on.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from penstock.errors import InvalidParameter, RequestFailed
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.generation.grammars.grammar import Grammar
    from penstock.generation.grammars.grammar_trial import GrammarTrial

logger = logging.getLogger(__name__)

#: Grammars that are known to pass the trial, or to be refused.
MAX_TRIED = 256
#: A character that no tokenizer merges with others, and that no prompt has.
_MARK = "\x02"
_NO_TOKEN = "no token of the model's vocabulary may come next"
_SAMPLE = "It is 1, 2 or 3."


class GrammarCompiler:
    """Compiles grammars for one model. Safe from any thread. The first grammar takes longer, since the whole
    vocabulary is read."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the number of logits, which may be more than the tokens: models pad their
        vocabulary."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._passes = lru_cache(maxsize=MAX_TRIED)(self._try_once)
        #: A Grammar's id() -> the compiled grammar, for as long as the Grammar lives.
        self._compiled: dict[int, LLMatcher] = {}

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidParameter for a grammar that is wrong, too large, or not for this model. A new
        Grammar object takes a while, even if it equals another."""
        self._compile(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher for a new answer. Raises what check() raises.

        Answers with the same Grammar object share the compiled grammar and its lexer's limit: an answer that
        exceeds the limit ends them all. So each request has a Grammar object of its own, which only the
        request's own answers share.
        """
        return Matcher(self._compile(grammar).deep_copy(), self._built_vocabulary())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from penstock.generation.grammars.grammar import invalid
        from penstock.generation.grammars.grammar_trial import LIMITS, MAX_SECONDS, source

        if compiled := self._compiled.get(id(grammar)):
            return compiled
        if not self._passes(grammar.kind, grammar.text):
            raise _unusable(
                grammar.kind,
                f"reading it, or following it in an answer, takes more than {MAX_SECONDS:g} s or too much "
                "memory; make it smaller, with fewer rules that use each other and smaller numbers "
                "(multipleOf with bounds, repetitions)",
            )
        vocabulary = self._built_vocabulary()
        try:
            text = source(grammar.kind, grammar.text)
        except ValueError as error:
            raise _unusable(grammar.kind, str(error)) from None
        compiled = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
        matcher = Matcher(compiled.deep_copy(), vocabulary)
        if matcher.error:
            raise _unusable(grammar.kind, matcher.error)
        if matcher.is_complete:
            raise invalid(f"the {_NAMES[grammar.kind]} admits no text but the empty one")
        while matcher.forced is not None:  # a limit may be met where the first choice is
            matcher.advance(matcher.forced)
        if matcher.error:
            raise _unusable(grammar.kind, matcher.error)
        self._compiled[id(grammar)] = compiled
        weakref.finalize(grammar, self._compiled.pop, id(grammar), None).atexit = False
        return compiled

    def _try_once(self, kind: str, text: str) -> bool:
        try:
            return self._built_vocabulary().trial.passes(kind, text)
        except OSError as error:
            raise RequestFailed(f"the request's grammar can't be tried: {error}") from error

    def close(self) -> None:
        """End the process that tries grammars. Idempotent."""
        with self._lock:
            if self._vocabulary is not None:
                self._vocabulary.trial.close()

    def _built_vocabulary(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary


class Matcher:
    """Where one answer stands in its grammar. The place depends on the answer's own tokens and on nothing
    else."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary  # kept here because llguidance does not keep it alive
        #: The tokens that must follow, the next token last. All are found together, since one costs as much
        #: as all.
        self._run: list[int] = []
        self._look()

    def advance(self, token_id: int) -> None:
        """Go on with the answer's next token, which must be allowed."""
        self._matcher.consume_token(token_id)
        if self._run:
            self._run.pop()
        self._look()

    def after(self, token_id: int) -> Matcher:
        """A matcher that stands one token further. This matcher stays where it is."""
        other = self.fork()
        other.advance(token_id)
        return other

    def fork(self) -> Matcher:
        """Another matcher that stands at the same place."""
        other = copy.copy(self)
        other._matcher, other._run = self._matcher.deep_copy(), list(self._run)
        return other

    def retreat(self) -> None:
        """Take the last token back."""
        self._matcher.rollback(1)
        self._run = []
        self._look()

    def _look(self) -> None:
        self._run = self._run or self._matcher.compute_ff_tokens()[::-1]
        #: Bit i: token i may come next. All end tokens may come where the answer may end.
        self.allowed = 1 << self._run[-1] if self._run else self._mask()
        #: Why there is no next token, for example a limit of llguidance's. "" as long as there is one.
        self.error = _without_details(self._matcher.get_error())
        if not self.allowed and not self.error:
            self.error = _NO_TOKEN
        #: Only the end may follow.
        self.is_complete = not self.error and not self.allowed & ~self._vocabulary.end_bits
        #: The only token that may come next.
        self.forced: int | None = None
        if self.allowed.bit_count() == 1 and not self.error and not self.is_complete:
            self.forced = self.allowed.bit_length() - 1

    def _mask(self) -> int:
        return int.from_bytes(self._matcher.compute_bitmask(), "little")


class _Vocabulary:
    """A tokenizer, as llguidance wants to see it. Attributes and __call__ are those of llguidance's
    TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises InvalidParameter if the tokens' bytes are not what the tokenizer decodes them to."""
        self._own = tokenizer
        if not _is_spelled_by_its_tokens(tokenizer):
            from penstock.generation.grammars.grammar import invalid

            raise invalid(
                "this model's tokenizer can't be used with a grammar: a decoded text differs from the texts "
                "of its tokens put together"
            )
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        ends = self._ends = sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        specials = {token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size}
        #: Special tokens decode to nothing, so their names must not count as text.
        self._specials = specials | set(ends)
        self.special_token_ids = sorted(self._specials)
        #: None: llguidance adds an end token of its own after the others, which can't be chosen.
        self.eos_token_id = ends[0] if ends else None
        self.end_bits = sum(1 << token_id for token_id in ends or [vocab_size])
        # The reference is weak because Python's garbage collector does not see the cycle.
        wrapper: Any = weakref.proxy(self)
        self.tokenizer = LLTokenizer(wrapper, eos_token=ends or None)

    @cached_property
    def trial(self) -> GrammarTrial:
        from penstock.generation.grammars.grammar_trial import GrammarTrial

        return GrammarTrial(self.tokens, self.special_token_ids, self.eos_token_id, self._ends)

    def __call__(self, text: str) -> list[int]:
        """How the model's tokenizer writes a text in the middle of an answer."""
        try:
            for mark in ("", _MARK):  # sentencepiece puts a space before a text's beginning
                before = self._own.encode(mark, add_special_tokens=False) if mark else []
                ids = self._own.encode(mark + text, add_special_tokens=False)
                rest = ids[len(before) :]
                if ids[: len(before)] == before and self._is_spelled(text, rest):
                    # llguidance takes no token without bytes, such as CPM-1's mark of a word.
                    return [token_id for token_id in rest if self._own.token_bytes(token_id)]
        except Exception:  # tokenizers are not ours, and an error here would end the engine
            logger.exception("the tokenizer failed on a text that a grammar forces")
        # The tokenizer can't write this text: it folds case, or takes the text for a special token.
        return self.tokenizer.greedy_tokenize(text)

    def _is_spelled(self, text: str, token_ids: list[int]) -> bool:
        if not self._specials.isdisjoint(token_ids):
            return False
        return b"".join(map(self._own.token_bytes, token_ids)) == text.encode()


def _is_spelled_by_its_tokens(tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    if not ids:
        return False
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    return spelled.strip() == tokenizer.decode(ids).strip()


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "choice", "lark": "grammar"}


def _unusable(kind: str, why: str) -> InvalidParameter:
    from penstock.generation.grammars.grammar import invalid

    return invalid(f"the {_NAMES[kind]} can't be used: {why}")


def _without_details(error: str) -> str:
    if error.startswith("NoExtension"):
        return _NO_TOKEN
    return error.partition("\n<")[0].strip()
