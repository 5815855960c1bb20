"""What the form of a prompt demands of the sampling of its answer."""

from __future__ import annotations

from dataclasses import replace

from penstock import Blanks, FormedPrompt, SamplingParams


def follow_form(
    params: SamplingParams, form: FormedPrompt | None, max_tokens_per_blank: int | None = None
) -> SamplingParams:
    """`params` with the demands of a form."""
    if form is None:
        return params
    # The closing token of the only blank is an end token, which is no part of the answer.
    ends = form.closers if len(form.closers) == 1 else ()
    blanks = Blanks(form.closers, form.forbidden, max_tokens_per_blank) if form.closers else None
    stop_token_ids = (*params.stop_token_ids, *form.stop_token_ids, *ends)
    return replace(params, stop_token_ids=stop_token_ids, blanks=blanks)
