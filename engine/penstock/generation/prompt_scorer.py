"""Log-probabilities of prompt tokens, from what a sweep has made of the positions before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from penstock.generation.executor import Cancelled
from penstock.generation.sampler import token_logprobs
from penstock.generation.scheduler import Batch
from penstock.generation.sequence import Sequence


def positions_to_score(batch: Batch) -> Iterator[tuple[int, Sequence, int]]:
    """(row among the step's tokens, its sequence, index of the prompt token that it predicts), in order.

    What is known already is left out: a preempted sequence computes its prompt again.
    """
    first_row = 0
    for item in batch.scheduled:
        sequence = item.sequence
        if sequence.params.prompt_logprobs is not None:
            start = sequence.num_computed_tokens
            first = max(start, len(sequence.prompt_logprobs) - 1)
            end = min(start + item.num_new_tokens, sequence.num_prompt_tokens - 1)
            # K and V that came from elsewhere would leave a gap.
            assert start < len(sequence.prompt_logprobs) or start >= end, f"{sequence} was not swept whole"
            for position in range(first, end):
                yield first_row + position - start, sequence, position + 1
        first_row += item.num_new_tokens


def score_prompts(
    batch: Batch,
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    max_rows: int,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Append to the `prompt_logprobs` of the batch's sequences, which have not advanced yet.

    hidden [num_tokens, hidden_size]; head(rows [n, hidden_size]) gives logits [n, vocab_size] and is asked
    for at most `max_rows` at a time, so that a long prompt takes no more memory than a full batch. Raises
    Cancelled between two such slices once is_cancelled() says so; what is known then stays known.
    """
    positions = list(positions_to_score(batch))
    for first in range(0, len(positions), max_rows):
        if is_cancelled():
            raise Cancelled
        group = positions[first : first + max_rows]
        logits = head(hidden[[row for row, _, _ in group]])
        for row, (_, sequence, index) in zip(logits, group, strict=True):
            num_top = sequence.params.prompt_logprobs or 0
            scored = token_logprobs(row, sequence.token_ids[index], num_top)
            sequence.prompt_logprobs.append(scored)
