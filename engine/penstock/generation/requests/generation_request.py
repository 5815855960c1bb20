"""GenerationRequest: what a caller asks of an engine, as one value. No torch here."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from penstock.errors import InvalidParameter

if TYPE_CHECKING:
    from penstock.generation.beam_search import BeamParams
    from penstock.generation.grammars.blanks import Blanks
    from penstock.generation.grammars.grammar import Grammar
    from penstock.generation.grammars.thinking import Thinking
    from penstock.generation.requests.prompt_embeds import PromptEmbeds
    from penstock.weights.adapters.adapter import Adapter

MAX_LOGPROBS = 20
#: Parameters of the draw, and their values that change nothing. A beam search draws nothing.
DRAW_PARAMS = {"temperature": (0, 1), "top_k": (0, -1), "top_p": (1,), "min_p": (0,)}

_unique = itertools.count()


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. The defaults are OpenAI's: plain sampling at temperature 1.

    Raises InvalidParameter (with the parameter's name) for values out of range.
    """

    #: 0 is greedy.
    temperature: float = 1.0
    #: Keep the k most likely tokens; 0 or -1 is all.
    top_k: int = 0
    #: Keep the most likely tokens that make up this much probability (nucleus, arXiv 1904.09751), at least
    #: one: 0 is greedy.
    top_p: float = 1.0
    #: Drop tokens less likely than min_p times the most likely one (arXiv 2407.01082).
    min_p: float = 0.0
    #: Divide (or multiply, if negative) the logits of tokens seen in prompt or answer (CTRL, arXiv
    #: 1909.05858). 1 is off.
    repetition_penalty: float = 1.0
    #: A token can't be chosen if it ends a sequence of this many tokens that occurs before, in the prompt or
    #: in the answer (transformers' NoRepeatNGramLogitsProcessor). 0 is off.
    no_repeat_ngram_size: int = 0
    #: Subtracted from the logits of tokens that are in the answer.
    presence_penalty: float = 0.0
    #: Subtracted from a token's logit once for each time that the answer has the token.
    frequency_penalty: float = 0.0
    #: Added to logits, by token id.
    logit_bias: dict[int, float] = field(default_factory=dict)
    #: The same seed, prompt and parameters give the same answer. None draws a new seed.
    seed: int | None = None
    #: The answer ends before the first of these strings.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Let the stop string (or stop token's text) be part of the answer.
    include_stop_str_in_output: bool = False
    #: None: until the context is full. 0: the prompt's log-probabilities are computed, and no answer.
    max_tokens: int | None = None
    #: The model's end token and stop_token_ids can't be chosen before this many tokens.
    min_tokens: int = 0
    #: Go on after the model's end token.
    ignore_eos: bool = False
    #: What the answer must be. The answer ends where the grammar ends, whatever min_tokens says, or before,
    #: at max_tokens. Tokens that the grammar forces are appended without a step of their own, except where
    #: logprobs are asked for. The tokens are the same in both cases.
    grammar: Grammar | None = None
    #: The answer fills in the blanks of the prompt, and ends with the last blank. Forced tokens are appended
    #: as those of a grammar.
    blanks: Blanks | None = None
    #: The answer may think before what the grammar demands, within a limit. None: it has no such part.
    thinking: Thinking | None = None
    #: Report the log-probability of each chosen token and of this many likeliest tokens. None: report
    #: nothing. The distribution is the model's own, before temperature, penalties, filters and grammar.
    logprobs: int | None = None
    #: The same for each token of the prompt but the first. They come with the first output.
    prompt_logprobs: int | None = None
    #: Only these tokens can be chosen. None: all tokens can.
    allowed_token_ids: tuple[int, ...] | None = None
    #: Sequences of tokens that the answer must not have: the last token of a sequence is not chosen after the
    #: others.
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    #: A text that the answer may resemble. Its tokens are guessed where the answer follows it, and change no
    #: token of the answer.
    prediction: tuple[int, ...] = ()
    #: Whether guesses of the answer's tokens may be computed ahead.
    speculation: bool = True
    #: Search for the best answers, in place of choosing each token for good. Bias, penalties and what forbids
    #: tokens act on log-probabilities then, which are not scaled anew, as in transformers. The answers come
    #: with the last output.
    beams: BeamParams | None = None

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 100, "at least 0 (and finite)")
        self._check("top_k", self.top_k >= -1, "at least -1 (-1 and 0 keep all tokens)")
        self._check("top_p", 0 <= self.top_p <= 1, "between 0 and 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0")
        self._check("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "at least 0 (0 is off)")
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
        if self.blanks is not None:
            self._check("grammar", self.grammar is None, "None where there are blanks")
            self._check("thinking", self.thinking is None, "None where there are blanks")
        if self.grammar is not None or self.blanks is not None:
            rule = "false where there is a grammar or a blank, which says where the answer may end"
            self._check("ignore_eos", not self.ignore_eos, rule)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                self._check(name, 0 <= count <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._check_token_ids()
        if self.beams is not None:
            for name, values in DRAW_PARAMS.items():
                rule = f"{' or '.join(map(str, values))} in a beam search, which draws nothing"
                self._check(name, getattr(self, name) in values, rule)
            self._check("max_tokens", self.max_tokens != 0, "at least 1 in a beam search")

    def _check_token_ids(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            is_good = bool(allowed) and min(allowed) >= 0
            self._check("allowed_token_ids", is_good, "one or more token ids, or left out")
        words = all(word and min(word) >= 0 for word in self.bad_words)
        self._check("bad_words", words, "sequences of one or more tokens")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidParameter(name, f"{name} is {reprlib.repr(getattr(self, name))}; it must be {rule}")


def without_draws(advice: Mapping[str, object]) -> dict[str, object]:
    """A model's own sampling parameters without those of the draw, for a beam search."""
    return {name: value for name, value in advice.items() if name not in DRAW_PARAMS}


@dataclass(frozen=True)
class PoolingParams:
    """What a caller wants of a model that pools."""

    #: Numbers of the vector, one of PoolingSpec.dimensions. None: all.
    dimensions: int | None = None
    #: The vector has length 1. None: as the model's own files say. A vector with fewer dimensions always has.
    normalizes: bool | None = None
    #: The first token of a pair's second text. 0: there is one text.
    second_from: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and how to answer it. The request goes unchanged from its maker to the Sequence, and its
    maker does not change the prompt's list any more."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    #: Differs from the ids of all other requests that the engine has at the same time.
    request_id: str = field(default_factory=lambda: f"request-{next(_unique)}")
    #: Lower numbers run earlier.
    priority: int = 0
    #: The client whose share of the engine the request takes.
    client: str = ""
    #: K and V are shared only among requests with the same salt.
    cache_salt: str = ""
    #: Seconds of the engine's clock (time.monotonic). The first step must begin before start_by, and the last
    #: must end before finish_by. Otherwise the request fails with QueueTimeout or DeadlineExceeded, after the
    #: step that is being computed at that time.
    start_by: float = math.inf
    finish_by: float = math.inf
    #: Vectors in front of the prompt's tokens, which there may be none of then. Token ids below 0 put vectors
    #: elsewhere: the id -1 stands for the first vector, -2 for the second, and none is put in front.
    prompt_embeds: PromptEmbeds | None = None
    #: What changes the model for this request (Engine.adapters); None: the model as it is.
    adapter: Adapter | None = None
    #: The first tokens that a model with an encoder writes, whatever their logits are. They are no part of
    #: the answer, and are computed together with the token with which every answer begins.
    answer_start: tuple[int, ...] = ()
    #: A vector or a score is wanted in place of text; `params` has max_tokens 0 then.
    pooling: PoolingParams | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Vectors and tokens of the prompt."""
        embeds = self.prompt_embeds
        num_in_front = embeds.num_in_front(self.prompt_token_ids) if embeds is not None else 0
        return num_in_front + len(self.prompt_token_ids)


@dataclass(frozen=True)
class ValidRequest(GenerationRequest):
    """A request that an engine can compute: Engine.validate() makes it."""

    def choice(self, params: SamplingParams) -> ValidRequest:
        """A request for another answer to the same prompt. The new request is valid without another check:
        `params` may differ in the seed and in what is reported, and in nothing else."""
        names = [each.name for each in fields(params) if each.name not in _FREE]
        changed = [name for name in names if getattr(params, name) != getattr(self.params, name)]
        assert not changed, f"{changed} differ: another request has to be validated"
        return replace(self, params=params, request_id=f"request-{next(_unique)}")

    @classmethod
    def of(cls, request: GenerationRequest) -> ValidRequest:
        """The same request, as a valid one. Only Engine.validate() may call of()."""
        return cls(**vars(request))


#: Fields of SamplingParams whose values in range are valid for every model.
_FREE = ("seed", "logprobs", "prompt_logprobs")
