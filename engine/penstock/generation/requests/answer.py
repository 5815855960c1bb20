"""Answer: an answer's tokens, one by one, with their text and the reason why the answer ends. Knows no
steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.generation.chosen import SampledToken
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.sequence import FinishReason, Sequence
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Gain:
    """What an answer gains in one step: tokens, until one of them ends the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_forced: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: The last token is an end or stop token, which is no part of the answer. The last token of a stop string
    #: or of a grammar is text.
    has_end_token: bool = False

    def fork(self) -> Gain:
        """An equal gain, to which other tokens are added."""
        return replace(self, token_ids=list(self.token_ids), logprobs=list(self.logprobs))


class Answer:
    """Appends tokens to a sequence and makes text of them."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = sequence.params
        self._sequence = sequence
        self._eos_token_ids = tokenizer.eos_token_ids
        # The text of a decoder goes on where the prompt ends. An answer to an encoded prompt is a text of its
        # own: its first token has no space in front, whatever the decoder begins with.
        before = sequence.text_ids if sequence.encoder is None else ()
        self._detokenizer = Detokenizer(
            tokenizer,
            before,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def fork(self, sequence: Sequence) -> Answer:
        """The same answer as that of another sequence, which has the same tokens and goes on otherwise."""
        other = copy.copy(self)
        other._sequence, other._detokenizer = sequence, self._detokenizer.fork()
        return other

    def begin(self) -> Gain:
        """Tokens that the grammar forces before anything is computed: they are computed together with the
        prompt. A token that might end the answer is left out, since only a step can tell of the end."""
        sequence, params, gain = self._sequence, self._sequence.params, Gain()
        while (forced := self._forced()) is not None and sequence.matcher is not None:
            is_last = sequence.num_tokens + 1 >= sequence.max_total_tokens
            if is_last or params.stop or forced in params.stop_token_ids:
                break
            sequence.matcher.advance(forced)
            if sequence.matcher.is_complete:
                sequence.matcher.retreat()
                break
            sequence.append(forced)
            gain.token_ids.append(forced)
            gain.text += self._detokenizer.add(forced)
            gain.num_forced += 1
        return gain

    def extend(self, tokens: Iterable[SampledToken], gain: Gain) -> None:
        """Append sampled tokens, and those that the grammar forces after them, until the answer ends."""
        for token_id, logprobs in tokens:
            self._append(token_id, gain)
            if logprobs is not None:
                gain.logprobs.append(logprobs)
            if gain.finish_reason is not None:
                return
        while gain.finish_reason is None and (forced := self._forced()) is not None:
            self._append(forced, gain)
            gain.num_forced += 1

    def _forced(self) -> int | None:
        """The token that must come next, which the sampler would choose as well.

        Log-probabilities of a token take its logits, which nobody computes for a forced token. Where they are
        asked for, all tokens are sampled. A beam search asks for them, too.
        """
        sequence, params = self._sequence, self._sequence.params
        if sequence.matcher is None or params.logprobs is not None or params.beams is not None:
            return None
        if params.bad_words or params.no_repeat_ngram_size or params.allowed_token_ids is not None:
            return None
        forced = sequence.matcher.forced
        is_forbidden = sequence.num_output_tokens < params.min_tokens and forced in params.stop_token_ids
        return None if is_forbidden else forced

    def _append(self, token_id: int, gain: Gain) -> None:
        """Append a token and its text; if the answer ends here, note why."""
        sequence, detokenizer, params = self._sequence, self._detokenizer, self._sequence.params
        sequence.append(token_id)
        gain.token_ids.append(token_id)
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        is_stop_token = token_id in params.stop_token_ids
        if is_eos or is_stop_token:
            # The mark of a blank's end is no text of the blank, also where the mark is an ordinary token.
            is_mark = params.blanks is not None and token_id in params.blanks.closers
            is_text = params.include_stop_str_in_output and not is_mark
            gain.text += detokenizer.add(token_id) if is_text else ""
            gain.stop_reason = token_id if is_stop_token else None
            gain.has_end_token = True
            return self._finish(FinishReason.STOP, gain)
        gain.text += detokenizer.add(token_id)
        if detokenizer.stopped_by is not None:
            gain.finish_reason, gain.stop_reason = FinishReason.STOP, detokenizer.stopped_by
            return None
        if sequence.matcher is not None:
            sequence.matcher.advance(token_id)
            if sequence.matcher.is_complete:
                self._finish(FinishReason.STOP, gain)
                gain.stop_reason = detokenizer.stopped_by
                return None
        if sequence.num_tokens >= sequence.max_total_tokens:
            self._finish(FinishReason.LENGTH, gain)
        return None

    def _finish(self, reason: FinishReason, gain: Gain) -> None:
        """End the answer. Nothing follows, so the text that was held back is part of the answer."""
        gain.text += self._detokenizer.finish()
        gain.finish_reason = reason
