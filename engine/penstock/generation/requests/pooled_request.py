"""PooledRequest: a request for the vector of a text or the score of a pair, which has no answer in text."""

from __future__ import annotations

from dataclasses import replace

from penstock.generation.chosen import Chosen
from penstock.generation.requests.answer import Gain
from penstock.generation.requests.request import Request, RequestOutput
from penstock.generation.sequence import FinishReason, Sequence


class PooledRequest(Request):
    """Its only output comes when the whole text is computed."""

    def advance(self, sequence: Sequence, chosen: Chosen) -> RequestOutput | None:
        if chosen.error is not None:
            return self._failed(chosen.error)
        output = self._output(sequence, Gain(finish_reason=FinishReason.STOP), None)
        return replace(output, pooled=chosen.pooled)
