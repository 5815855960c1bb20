"""From outputs of the engine to the objects of /v1/fill, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from penstock import BlankText, Detokenizer, FinishReason, RequestOutput, Tokenizer
from penstock_server.answers.answers import Answer, Answers
from penstock_server.answers.streaming import events
from penstock_server.protocol.answer_bodies import FINGERPRINT, Finish
from penstock_server.protocol.fill_bodies import FillAnswer, FillChunk, FilledSpan


@dataclass(frozen=True)
class SpanText:
    """New text of a blank."""

    index: int
    text: str
    finish_reason: Finish | None = None


class SpanReader:
    """Divides the tokens of an answer among the blanks of its prompt."""

    def __init__(
        self, tokenizer: Tokenizer, closers: Sequence[int], max_tokens_per_blank: int | None
    ) -> None:
        """closers: the token that ends each blank. With one closer or none, the whole answer is the text of
        the only blank. The only closer is a stop token then, so that the engine leaves it out of the text."""
        self._tokenizer = tokenizer
        self._closers = closers
        self._num_blanks = max(1, len(closers))
        self._max_tokens = max_tokens_per_blank
        self._index = 0
        self._num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, ())

    def read(self, token_ids: Sequence[int], text: str, finish_reason: FinishReason | None) -> list[SpanText]:
        """The new texts of an output. All blanks that are open when the answer ends end for its reason."""
        if self._num_blanks == 1:
            self._num_tokens += len(token_ids)
            is_closed = finish_reason is not None and token_ids and token_ids[-1] in self._closers
            reason = self._closed(self._num_tokens - 1) if is_closed else _finish(finish_reason)
            return [SpanText(0, text, reason)]
        spans = [span for token_id in token_ids if (span := self._add(token_id))]
        if finish_reason is not None:
            for index in range(self._index, self._num_blanks):
                rest = self._detokenizer.finish() if index == self._index else ""
                spans.append(SpanText(index, rest, _finish(finish_reason)))
        return spans

    def _add(self, token_id: int) -> SpanText | None:
        index = self._index
        if index == self._num_blanks:  # nothing follows the last blank
            return None
        if token_id != self._closers[index]:
            self._num_tokens += 1
            text = self._detokenizer.add(token_id)
            return SpanText(index, text) if text else None
        span = SpanText(index, self._detokenizer.finish(), self._closed(self._num_tokens))
        self._index, self._num_tokens = index + 1, 0
        self._detokenizer = Detokenizer(self._tokenizer, ())
        return span

    def _closed(self, num_tokens: int) -> Finish:
        """Why a blank with a text of `num_tokens` tokens was closed."""
        return "length" if num_tokens == self._max_tokens else "stop"


def _finish(reason: FinishReason | None) -> Finish | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


class FillFormat:
    """/v1/fill."""

    def __init__(self, request_id: str, model: str, text: BlankText, reader: SpanReader) -> None:
        self._head: dict[str, Any] = {
            "id": f"fill-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,  # a chunk is sent without the members that have defaults
        }
        self._text = text
        self._reader = reader
        self._spans = [FilledSpan(index=i, position=at, text="") for i, at in enumerate(text.positions)]

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        return events(self._chunks(answers, idle_s))

    async def _chunks(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[BaseModel | None, None]:
        async with aclosing(answers.outputs(idle_s)) as outputs:
            async for item in outputs:
                new = self._take(item[1]) if item is not None else []
                if new:
                    yield self._chunk(spans=new)
                elif idle_s:
                    yield None  # silence, or an output that is held back, maybe for long
        yield self._chunk(spans=[], text=self._filled, usage=answers.usage)

    def _chunk(self, **fields: Any) -> FillChunk:
        return FillChunk(**self._head, object="fill.chunk", **fields)

    def whole(self, answers: Answers) -> FillAnswer:
        self._take(answers[0])
        return FillAnswer(**self._head, text=self._filled, spans=self._spans, usage=answers.usage)

    def _take(self, output: RequestOutput | Answer) -> list[FilledSpan]:
        """Adds an output, or a whole answer; returns what is new in the blanks."""
        new = []
        for each in self._reader.read(output.token_ids, output.text, output.finish_reason):
            if not (each.text or each.finish_reason):
                continue
            span = self._spans[each.index]
            span.text += each.text
            span.finish_reason = each.finish_reason
            new.append(
                FilledSpan(
                    index=each.index,
                    position=span.position,
                    text=each.text,
                    finish_reason=each.finish_reason,
                )
            )
        return new

    @property
    def _filled(self) -> str:
        return self._text.filled([span.text for span in self._spans])
