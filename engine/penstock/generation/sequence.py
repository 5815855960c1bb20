"""Sequence: the tokens of one answer in the making, and what was asked of it. No torch here."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import InvalidParameter
from penstock.generation.grammar import Grammar

if TYPE_CHECKING:
    from penstock.generation.grammar_matcher import Matcher

MAX_LOGPROBS = 20


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are OpenAI's, and vLLM's "abort" and "error"."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller left
    ERROR = "error"  # it could not be computed


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Defaults as OpenAI's: plain sampling at temperature 1.

    Raises InvalidParameter (with the parameter's name) for values out of range.
    """

    #: 0 is greedy.
    temperature: float = 1.0
    #: Keep the k most likely tokens; 0 or -1 is all.
    top_k: int = 0
    #: Keep the most likely tokens that make up this much probability (nucleus, arXiv 1904.09751).
    top_p: float = 1.0
    #: Drop tokens less likely than min_p times the most likely one (arXiv 2407.01082).
    min_p: float = 0.0
    #: Divide (or multiply, if negative) the logits of tokens seen in prompt or answer (CTRL, arXiv
    #: 1909.05858). 1 is off.
    repetition_penalty: float = 1.0
    #: Subtracted from the logits of tokens that the answer holds.
    presence_penalty: float = 0.0
    #: Subtracted once per occurrence in the answer.
    frequency_penalty: float = 0.0
    #: Added to logits, by token id.
    logit_bias: dict[int, float] = field(default_factory=dict)
    #: Same seed, same prompt, same parameters: same answer. None draws a fresh one.
    seed: int | None = None
    #: The answer ends before the first of these strings.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Let the stop string (or stop token's text) be part of the answer.
    include_stop_str_in_output: bool = False
    #: None: until the context is full. 0: the prompt is computed, for its log-probabilities, and no answer.
    max_tokens: int | None = None
    #: The model's end token and stop_token_ids can't be chosen before this many tokens.
    min_tokens: int = 0
    #: Go on after the model's end token.
    ignore_eos: bool = False
    #: What the answer must be. It ends where the grammar ends, whatever min_tokens says, unless its length is
    #: up before. Tokens that the grammar forces are appended without a step of their own, except where
    #: logprobs are asked for; the tokens are the same.
    grammar: Grammar | None = None
    #: Report the log-probability of each chosen token and of this many likeliest. None: neither.
    #: They are of the model's own distribution, before temperature, penalties, filters and grammar.
    logprobs: int | None = None
    #: The same for each token of the prompt but the first; they come with the first output.
    prompt_logprobs: int | None = None
    #: Nothing but these can be chosen. None: everything.
    allowed_token_ids: tuple[int, ...] | None = None
    #: Sequences of tokens that the answer must not hold: the last of one is not chosen after the others.
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 100, "at least 0 (and finite)")
        self._check("top_k", self.top_k >= -1, "at least -1 (-1 and 0 keep all tokens)")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "between -2 and 2")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise InvalidParameter(
                    "logit_bias",
                    f"logit_bias maps token {token_id} to {bias}; biases lie between -100 and 100",
                )
        if self.seed is not None:
            self._check("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        self._check("stop", all(self.stop), "one or more strings, none of them empty")
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens >= 0, "at least 0")
            self._check("min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        if self.grammar is not None:
            rule = "false together with a grammar, which says itself where the answer may end"
            self._check("ignore_eos", not self.ignore_eos, rule)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                self._check(name, 0 <= count <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            is_good = bool(allowed) and min(allowed) >= 0
            self._check("allowed_token_ids", is_good, "one or more token ids, or left out")
        words = all(word and min(word) >= 0 for word in self.bad_words)
        self._check("bad_words", words, "sequences of one or more tokens")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidParameter(name, f"{name} is {getattr(self, name)!r}; it must be {rule}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm."""

    token_id: int
    logprob: float
    #: The likeliest tokens, likeliest first.
    top: tuple[tuple[int, float], ...] = ()
    #: Of the token among all; 1 is the likeliest.
    rank: int = 0


class Sequence:
    """One prompt and its answer. Owned by the engine thread."""

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        max_total_tokens: int,
        matcher: Matcher | None = None,
        *,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
    ) -> None:
        """max_total_tokens: prompt and answer end there at the latest. matcher: of params.grammar, at its
        beginning. priority: lower runs earlier. client: whose share of the engine it takes. cache_salt: only
        sequences with the same one share K and V."""
        self.sequence_id = sequence_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        #: Knows the tokens of the answer so far; a preemption changes nothing.
        self.matcher = matcher
        #: Of the draws; fixed for the sequence's life.
        self.seed = params.seed if params.seed is not None else random.getrandbits(63)
        self.priority = priority
        self.client = client
        self.cache_salt = cache_salt
        #: Tokens whose K and V are in the cache. Preemption sets it back to 0.
        self.num_computed_tokens = 0
        #: RopeSpec.frequency_length() of its computed tokens and those of the next step. The scheduler keeps
        #: it.
        self.rope_length = 0
        self.block_table: list[int] = []
        #: Of the prompt's tokens as far as they are known, if asked for; nothing comes before the first.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        #: Of its full blocks; kept by the block manager.
        self.block_keys: list[bytes] = []
        #: False: every token is computed, because the hidden state or the logits of each are wanted.
        self.reads_prefix_cache = params.prompt_logprobs is None
        #: Tokens of the prompt whose K and V others had computed.
        self.num_cached_tokens = 0
        #: It has been in a step, or was about to be.
        self.has_started = False
        self.num_preemptions = 0
        #: What it had computed was dropped at some time: it was preempted, or its step was not computed, or
        #: it has grown out of the frequencies of its keys.
        self.was_preempted = False
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed yet: a prompt, a resumed sequence's all, or the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    def skip_to(self, num_computed_tokens: int) -> None:
        """So many tokens are in the cache, though others computed them. What a sequence finds again that was
        preempted counts as its own."""
        if not self.was_preempted:
            end = min(num_computed_tokens, self.num_prompt_tokens)
            self.num_cached_tokens += max(0, end - self.num_computed_tokens)
        self.num_computed_tokens = num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.finish_reason})"
        )
