"""Log-probabilities of prompts against transformers, and their bookkeeping; that they are the same bits in
any company is in test_engine.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_families import dequantized
from transformers import LlamaForCausalLM

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ComputationError
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import FinishReason, Sequence

PROMPT = [random.Random(3).randrange(2, 278) for _ in range(40)]
SCORING = SamplingParams(max_tokens=0, prompt_logprobs=3)


@torch.inference_mode()
def expected_logprobs(folder: Path) -> torch.Tensor:
    """transformers' [prompt, vocab], on the same INT8 weights."""
    model = dequantized(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), folder)
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].double(), -1)


def test_they_are_the_models(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(kv_dtype="float32")) as engine:
        (scored,) = engine.generate([PROMPT], SCORING)
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(PROMPT)
    for row, token_id, entry in zip(
        expected_logprobs(tiny_llama), PROMPT[1:], scored.prompt_logprobs[1:], strict=False
    ):
        assert entry is not None and entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=2e-2)
        values, ids = row.topk(3)
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=2e-2)
        assert abs(entry.rank - 1 - int((row > row[token_id]).sum())) <= 2
        assert entry.top[0][0] == ids[0] or values[0] - values[1] < 4e-2


def test_without_an_answer_nothing_is_chosen(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(max_model_len=40)) as engine:
        (scored,) = engine.generate([PROMPT], SCORING)
        (silent,) = engine.generate([PROMPT], SamplingParams(max_tokens=0))
        assert engine.metrics.generated_tokens == engine.metrics.kv_blocks_used == 0
    assert (scored.token_ids, scored.text, scored.finish_reason) == ([], "", FinishReason.LENGTH)
    assert (silent.prompt_logprobs, silent.finish_reason) == (None, FinishReason.LENGTH)


def test_they_come_once_and_first(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(max_num_batched_tokens=7)) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
        engine.add(GenerationRequest(PROMPT, params, "a"))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]


def test_a_prompt_of_one_token_has_none(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama) as engine:
        (scored,) = engine.generate([[5]], SCORING)
    assert scored.prompt_logprobs == (None,)


def test_no_more_rows_than_sequences_go_through_the_head_at_once(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(max_num_seqs=4)) as engine:
        head, sizes = engine.model.executor.head, []

        def watched(hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return head(hidden)

        engine.model.executor.head = watched  # type: ignore[method-assign]
        engine.generate([PROMPT], SCORING)
    assert max(sizes) == 4 and sum(sizes) == len(PROMPT)


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    request = GenerationRequest([5, 6, 7, 8, 9], SamplingParams(prompt_logprobs=0))
    sequence, other = (
        Sequence(0, request, 9),
        Sequence(1, GenerationRequest([5, 6], SamplingParams()), 9),
    )
    sequence.advance(1)
    sequence.block_table.append(1)
    other.block_table.append(0)
    scores = sequence.prompt_scores
    assert scores is not None
    scores.add(1, [TokenLogprobs(6, 0.0), TokenLogprobs(7, 0.0)])

    def wanted(num_new_tokens: int) -> tuple[list[int], list[int]]:
        """Tokens to be scored, and rows of logits."""
        batch = Batch((ScheduledSequence.of(other, 2), ScheduledSequence.of(sequence, num_new_tokens)))
        rows = ModelInputs.of(batch, 16).wanted_rows.tolist()
        assert batch.num_rows == len(rows)
        return list(batch.scheduled[1].scored), rows

    assert wanted(1) == ([], [1])  # the row of the other one's last token
    assert wanted(3) == ([3, 4], [1, 3, 4])
    assert wanted(4) == ([3, 4], [1, 3, 4, 5])  # what the last one predicts is the answer's
    with pytest.raises(AssertionError, match="not swept whole"):
        scores.add(4, [TokenLogprobs(9, 0.0)])


def test_a_row_that_is_no_numbers_is_an_error(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama) as engine:
        head = engine.model.executor.head
        poisoned = [True]

        def once(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            if poisoned:
                logits[poisoned.pop() - 1] = torch.nan
            return logits

        engine.model.executor.head = once  # type: ignore[method-assign]
        with pytest.raises(ComputationError, match="prompt"):
            engine.generate([PROMPT], SCORING)
        assert not engine.has_work
        assert engine.generate([PROMPT], SCORING)[0].prompt_logprobs


def test_nobody_waits_for_the_scores_of_a_prompt_that_was_given_up(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(max_num_seqs=4)) as engine:
        head, aborted = engine.model.executor.head, set[str]()
        sizes = []

        def leave(hidden: torch.Tensor) -> torch.Tensor:
            aborted.add("a")
            sizes.append(len(hidden))
            return head(hidden)

        engine.model.executor.head = leave  # type: ignore[method-assign]
        engine.add(GenerationRequest(PROMPT, SCORING, "a"))
        assert engine.step(aborted) == [] and sizes == [4]
        aborted.clear()
        engine.model.executor.head = head  # type: ignore[method-assign]
        (output,) = engine.step()
        assert output.prompt_logprobs == engine.generate([PROMPT], SCORING)[0].prompt_logprobs


def test_a_prompt_that_others_computed_is_scored_whole(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama) as engine:
        (fresh,) = engine.generate([PROMPT], SCORING)
        engine.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))
        hits = engine.metrics.prefix_cache_hits
        assert engine.generate([PROMPT], SCORING) == [fresh]
        assert engine.metrics.prefix_cache_hits == hits
        engine.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))
        assert engine.metrics.prefix_cache_hits > hits
