"""RequestLimits: which requests a loaded model can compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import ContextOverflow, InvalidParameter
from penstock.generation.requests.generation_request import (
    GenerationRequest,
    PoolingParams,
    SamplingParams,
    ValidRequest,
)
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.spec import ModelSpec

if TYPE_CHECKING:
    from penstock.generation.beam_search import BeamParams
    from penstock.generation.grammars.grammar_matcher import GrammarCompiler

OTHER_ROUTES = (
    "Ask /v1/embeddings for vectors, /v1/score and /v1/rerank for scores; --runner generate serves a decoder "
    "for text"
)
KV_LIMIT = ", which is what its keys and values have room for (--kv-tokens, --kv-cache-memory)"


@dataclass(frozen=True)
class BeamRoom:
    """What bounds the beams of one search."""

    #: Sequences of a step.
    max_num_seqs: int
    num_kv_blocks: int
    #: Tokens of a block.
    block_size: int

    def longest(self, num_beams: int, num_encoded: int) -> int:
        """The most tokens of each beam's text, if the beams share no block of their texts. They do share
        blocks, but not for certain: beams that were preempted may be computed side by side."""
        num_left = self.num_kv_blocks - -(-num_encoded // self.block_size)
        return max(0, num_left) // num_beams * self.block_size


class RequestLimits:
    """The bounds that a model and its memory set to every request. Safe to use from any thread."""

    def __init__(
        self,
        spec: ModelSpec,
        max_model_len: int,
        is_context_cut: bool,
        grammars: GrammarCompiler,
        beam_room: BeamRoom,
        max_step_tokens: int = 0,
        pooling: PoolingSpec | None = None,
    ) -> None:
        """max_model_len: tokens of a prompt and its answer together. is_context_cut: the KV cache sets
        max_model_len, since the cache is smaller than the model's context. max_step_tokens: tokens that a
        step has at most. pooling: how the model pools, if it does."""
        self._pooling = pooling
        self._beam_room, self._num_soft = beam_room, len(spec.soft_prompt)
        self.vocab_size, self._embedding_size = spec.vocab_size, spec.embedding_size
        self._has_encoder = spec.has_encoder
        self._sees_both_ways = spec.sees_prompt_both_ways
        #: The longest prompt that a step can compute whole, where it has to; 0: prompts can be cut.
        self._longest_whole = max_step_tokens - len(spec.soft_prompt) if spec.sees_prompt_both_ways else 0
        self._num_start = len(spec.decoder_start)
        self.max_model_len = max_model_len
        self.is_context_cut = is_context_cut
        self._grammars = grammars

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """The request as one that can be computed. A ValidRequest is not checked again. A grammar that was
        not seen before is compiled, which may take a while. A beam search without max_tokens gets as many as
        all its beams have room for.

        Raises InvalidParameter and ContextOverflow.
        """
        if isinstance(request, ValidRequest):
            return request
        self._check_purpose(request.pooling)
        self._check_prompt(request)
        if request.params.prompt_logprobs is not None:
            self._check_prompt_logprobs(request)
        self._check_token_ids(request.params)
        if request.params.grammar is not None:
            self._grammars.check(request.params.grammar)
        self._check_start(request.answer_start)
        num_prompt = request.num_prompt_tokens + len(request.answer_start)
        self._check_length(num_prompt, request.params.max_tokens)
        self._check_whole(num_prompt)
        if request.params.beams is not None:
            request = self._with_room(request, request.params.beams)
        return ValidRequest.of(request)

    def _with_room(self, request: GenerationRequest, beams: BeamParams) -> GenerationRequest:
        """The request of a search with max_tokens. Raises InvalidParameter if the beams have no room."""
        room, num_prompt = self._beam_room, request.num_prompt_tokens
        if beams.num_beams > room.max_num_seqs:
            raise InvalidParameter(
                "best_of",
                f"{beams.num_beams} beams are asked for; a step has {room.max_num_seqs} sequences at most "
                "(--max-num-seqs)",
            )
        num_start = self._num_start + len(request.answer_start)
        num_encoded, num_text = 0, num_prompt + self._num_soft
        if self._has_encoder:
            num_encoded, num_text = num_prompt, num_start
        num_left = room.longest(beams.num_beams, num_encoded) - num_text
        wanted = request.params.max_tokens
        if num_left < (wanted or 1):
            raise InvalidParameter(
                "best_of",
                f"{beams.num_beams} beams of {num_text} tokens and {wanted or 1} more do not fit together: "
                f"there is room for keys and values of {room.num_kv_blocks * room.block_size} tokens "
                "(--kv-tokens, --kv-cache-memory). Ask for fewer beams or tokens, or shorten the prompt",
            )
        if wanted is None:
            wanted = min(num_left, self.max_model_len - num_prompt - num_start)
        return replace(request, params=replace(request.params, max_tokens=wanted))

    def _check_purpose(self, params: PoolingParams | None) -> None:
        if self._pooling is None and params is not None:
            raise InvalidParameter(
                "model",
                "this model is served to write text. Start the server with --runner pooling for its vectors, "
                "or serve a model that is made for them, such as Qwen/Qwen3-Embedding-0.6B or BAAI/bge-m3, "
                "and for scores BAAI/bge-reranker-v2-m3",
            )
        if self._pooling is None:
            return
        if params is None:
            what = "gives scores to pairs of texts" if self._pooling.is_score else "gives vectors to texts"
            raise InvalidParameter("model", f"this model {what} and writes no text. {OTHER_ROUTES}")
        wanted = params.dimensions
        if wanted is not None and not self._pooling.allows(wanted):
            allowed = self._pooling.allowed_dimensions
            raise InvalidParameter("dimensions", f"dimensions is {wanted}; it must be {allowed}")

    def _check_prompt(self, request: GenerationRequest) -> None:
        token_ids, embeds = request.prompt_token_ids, request.prompt_embeds
        if embeds is not None and embeds.hidden_size != self._embedding_size:
            raise InvalidParameter(
                "prompt_embeds",
                f"prompt_embeds has shape {[embeds.num_tokens, embeds.hidden_size]}; this model's embedding "
                f"has size {self._embedding_size}, so that the shape has to be [tokens, "
                f"{self._embedding_size}]",
            )
        if not token_ids and embeds is not None:
            return
        if not token_ids:
            raise InvalidParameter("prompt", "the prompt is empty; it needs at least one token")
        least = -embeds.num_tokens if embeds is not None else 0
        if min(token_ids) < least or max(token_ids) >= self.vocab_size:
            vectors = f", or {least}..-1 for a vector" if least else ""
            raise InvalidParameter(
                "prompt", f"prompt token ids must lie in 0..{self.vocab_size - 1}{vectors}"
            )

    def _check_prompt_logprobs(self, request: GenerationRequest) -> None:
        what = "encodes the prompt" if self._has_encoder else "sees the prompt both ways"
        if self._has_encoder or self._sees_both_ways:
            raise InvalidParameter(
                "prompt_logprobs",
                f"prompt_logprobs have no meaning here: this model {what}, and predicts none of its tokens",
            )
        if request.prompt_embeds is not None:
            raise InvalidParameter(
                "prompt_logprobs",
                "prompt_logprobs can't be had with prompt_embeds: vectors are no tokens, and have no "
                "probability. Leave prompt_logprobs out",
            )

    def _check_whole(self, num_prompt: int) -> None:
        if self._sees_both_ways and num_prompt > self._longest_whole:
            raise InvalidParameter(
                "prompt",
                f"the prompt has {num_prompt} tokens. This model sees a prompt both ways, so that one step "
                f"computes all of it, and a step here has room for {self._longest_whole} tokens of a prompt. "
                "Shorten the prompt, or start with a larger --max-num-batched-tokens",
            )

    def _check_start(self, token_ids: tuple[int, ...]) -> None:
        if token_ids and not self._has_encoder:
            raise InvalidParameter(
                "answer_start", "answer_start is for models with an encoder; append it to the prompt"
            )
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            raise InvalidParameter(
                "answer_start", f"answer_start has a token id outside of 0..{self.vocab_size - 1}"
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, token_ids in (
            ("blanks", params.blanks.token_ids if params.blanks else ()),
            ("thinking", params.thinking.token_ids if params.thinking else ()),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token_id for word in params.bad_words for token_id in word]),
            ("prediction", params.prediction),
        ):
            if max(token_ids, default=0) >= self.vocab_size:
                raise InvalidParameter(name, f"{name} has a token id above {self.vocab_size - 1}")
        for name in ("allowed_token_ids", "stop_token_ids"):
            if len(getattr(params, name) or ()) > self.vocab_size:
                raise InvalidParameter(
                    name, f"{name} has more than the {self.vocab_size} token ids that there are"
                )

    def _check_length(self, num_prompt: int, max_tokens: int | None) -> None:
        num_prompt += self._num_start
        wanted = 1 if max_tokens is None else max_tokens
        if num_prompt + wanted <= self.max_model_len:
            return
        context = f"{self.max_model_len} tokens{KV_LIMIT if self.is_context_cut else ''}"
        # LiteLLM, and so many agents, know the error by the words "this model's maximum context length is".
        message = (
            f"the prompt has {num_prompt} tokens and {wanted} more are asked for, together "
            f"{num_prompt + wanted}; here this model's maximum context length is {context}. Shorten the "
            "prompt or ask for fewer"
        )
        if self._pooling is not None:
            message = (
                f"the text has {num_prompt} tokens; this model's context here is {context}. Shorten the text"
            )
        elif num_prompt >= self.max_model_len:
            message = (
                f"the prompt has {num_prompt} tokens; here this model's maximum context length is {context}, "
                "and an answer has to fit into it as well. Shorten the prompt"
            )
        num_answer = wanted if num_prompt < self.max_model_len else 0
        raise ContextOverflow(message, num_prompt, self.max_model_len, num_answer)
