"""BeamRequest: a request whose answers a beam search finds. Each beam is a sequence; all beams are a
group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.errors import ComputationError, RequestFailed, TooFewAnswers
from penstock.generation.beam_search import BeamParams, BeamSearch, Candidate, Finished
from penstock.generation.chosen import Chosen, SampledToken
from penstock.generation.requests.answer import Answer, Gain
from penstock.generation.requests.request import (
    NAN_IN_PROMPT,
    PromptLogprobs,
    Request,
    RequestOutput,
    has_nan,
)
from penstock.generation.scheduling.sequence_group import SequenceGroup, branch
from penstock.generation.sequence import Sequence
from penstock.text.tokenizer import Tokenizer

#: Admission.replace(): lets other sequences take the places of a group.
ContinueAs = Callable[[SequenceGroup, list[tuple[Sequence, Sequence]]], None]


@dataclass(frozen=True)
class Beam:
    """An answer in the making, or a whole one."""

    sequence: Sequence
    answer: Answer
    #: All that the answer has gained so far.
    gain: Gain
    #: The sum of the log-probabilities of its tokens.
    total: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.gain.finish_reason is not None

    def extended(self, token: SampledToken, total: float) -> Beam:
        """The answer with one token more. This one stays as it is."""
        sequence, gain = branch(self.sequence), self.gain.fork()
        answer = self.answer.fork(sequence)
        answer.extend([token], gain)
        return Beam(sequence, answer, gain, total)


class BeamRequest(Request):
    """A search. Its only output comes at its end."""

    def __init__(
        self, sequence: Sequence, tokenizer: Tokenizer, params: BeamParams, continue_as: ContinueAs
    ) -> None:
        """Raises RequestFailed if the tokenizer can't take the prompt."""
        super().__init__(sequence, tokenizer)
        self._params = params
        self._continue_as = continue_as
        self._group = SequenceGroup(sequence, params.num_beams)
        max_length = sequence.max_total_tokens - sequence.num_prompt_tokens
        self._search = BeamSearch(params, Beam(sequence, self._answer, self._gain), max_length)
        #: What was chosen for the beams of this round.
        self._chosen: dict[Sequence, Chosen] = {}
        #: Why a beam has no next token. The search fails with the first such reason, if no answer is found.
        self._dead_end: RequestFailed | None = None

    def advance(self, sequence: Sequence, chosen: Chosen) -> RequestOutput | None:
        """Note what may follow a beam. When all beams of the round are computed, the search takes the next
        ones."""
        if isinstance(chosen.error, ComputationError):
            return self._failed(chosen.error)
        self._dead_end = self._dead_end or chosen.error
        self._chosen[sequence] = chosen
        if not all(map(self._is_computed, self._search.beams)):
            return None
        try:
            branches = self._take_round()
        except Exception:  # whatever a tokenizer raises must not cost the other requests
            return self._failed(self._without_text())
        if not self._search.beams:
            return self._end()
        self._continue_as(self._group, branches)
        self.sequence = self._search.beams[0].sequence
        self._chosen.clear()
        return None

    def _is_computed(self, beam: Beam) -> bool:
        """A beam that was preempted is computed again, although its proposals are known: its blocks are
        gone."""
        return beam.sequence in self._chosen and not beam.sequence.num_pending_tokens

    def _take_round(self) -> list[tuple[Sequence, Sequence]]:
        """The next beams. Returns their sequences, each with the one that it goes on from; [] at the search's
        end."""
        parents = self._search.beams
        chosen = [self._chosen[beam.sequence] for beam in parents]
        came_from: dict[Sequence, Sequence] = {}

        def extend(candidate: Candidate) -> Beam:
            parent, own = parents[candidate.beam], chosen[candidate.beam].proposals
            beam = parent.extended(own[candidate.proposal].token, candidate.total)
            came_from[beam.sequence] = parent.sequence
            return beam

        proposals = [[proposal.logprob for proposal in each.proposals] for each in chosen]
        beams = self._search.advance(proposals, extend)
        return [(came_from[beam.sequence], beam.sequence) for beam in beams]

    def _end(self) -> RequestOutput:
        found, num_wanted = self._search.finished, self._params.num_answers
        if len(found) < num_wanted:
            return self._failed(TooFewAnswers(len(found), num_wanted) if found else self._reason())
        prompt_logprobs = self._prompt_logprobs()
        if has_nan(prompt_logprobs):
            return self._failed(ComputationError(NAN_IN_PROMPT))
        best, *others = (self._told(each, prompt_logprobs) for each in found[:num_wanted])
        return replace(best, others=tuple(others))

    def _reason(self) -> RequestFailed:
        assert self._dead_end is not None, "a search without answers has a beam that could not go on"
        return self._dead_end

    def _told(self, finished: Finished[Beam], prompt_logprobs: PromptLogprobs) -> RequestOutput:
        beam = finished.hypothesis
        return replace(self._output(beam.sequence, beam.gain, prompt_logprobs), score=finished.score)
