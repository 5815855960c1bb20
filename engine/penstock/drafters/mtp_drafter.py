"""MTPDrafter: the head of multi-token prediction that came with a model guesses what the model will say.

The head's row for a token gets the token's embedding and the model's last hidden state of the token before.
Rows of tokens that stand are computed from the model's own states. A guess after a guess has the head's own
state, and its keys and values are given back before the next step. What the head has of a text may begin
anywhere: the model did not compute what was found in its cache. Rope turns by distances alone, so the head
counts places from where it began.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.drafters.heard_states import HeardStates
from penstock.drafters.memory_beside import card_bytes
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import Assumed, assumed_head
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.loader import LoadedModel, Model
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad
from penstock.model.family import GivenRows

#: Tokens that are said to be likely after a place.
NUM_CANDIDATES = 4
#: Hidden states that are kept for a later step, of all sequences together, where a step had no use for them.
MAX_WAITING = 256
#: Rows that a text has room for, if guesses are made at all.
_MARGIN = 32


@dataclass
class Branch:
    """A text that may end in guesses, and the head's rows of it."""

    text: Sequence
    #: Its tokens are those of the rows; blocks and lengths are those of the head's keys and values.
    rows: Sequence
    #: float32 [num_pending_rows, hidden_size], on the host: of the tokens before those of the pending rows.
    hidden: Tensor


@dataclass
class Twin:
    """What the head has of a sequence."""

    sequence: weakref.ref[Sequence]
    rows: Sequence
    #: The place in the text of the first row's token.
    first: int
    #: Hidden states of the model, on the host, that the head has not computed with yet.
    waiting: Tensor
    #: -1: the text; else the text and a path of guesses, by the node of the step's guesses.
    branches: dict[int, Branch] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The place of the text's next token whose hidden state is not known."""
        return self.first - 1 + self.rows.num_computed_tokens + len(self.waiting)


class MTPDrafter:
    """Used by the engine thread."""

    def __init__(self, loaded: LoadedModel, model: Model, plan: MemoryPlan) -> None:
        """loaded: the head, as a model of one layer. model: the one that it came with. plan: the head's,
        whose memory it takes beside the model."""
        self.head, self.plan, self.config = loaded.model, plan, loaded.config
        num_layers = model.spec.num_layers
        self._states = HeardStates(self._layers(num_layers), num_layers)
        self._predict, self._norm_final = loaded.predict, model.executor.norm_final
        self._blocks = BlockManager(loaded.plan.num_kv_blocks, loaded.config.block_size, False)
        self._sampler = Sampler(model.spec.vocab_size, frozenset())
        self._form = getattr(self.head.spec, "mtp", None)
        #: By the number of a sequence.
        self._twins: dict[int, Twin] = {}
        self._forks = ForkLimit()
        #: Rows that the first level of a sequence's guesses has beside those of tokens that stand.
        self._rows_beside = 0
        #: Guesser.levels_of_pass
        self.levels_of_pass = 1

    def _layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of the model whose hidden states the head gets."""
        return (num_layers - 1,)

    def _given(self, hidden: Tensor) -> Tensor:
        """What the head's rows get of hidden states, as HeardStates.take() has them: float32 [num_tokens,
        hidden_size], on the host."""
        return self._norm_final(hidden)

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        return assumed_head(self.seconds)

    def seconds(self, num_places: int) -> float:
        """What one level of guesses takes; 0 if nothing was measured."""
        return self._predict(StepLoad.decode(num_places)).seconds

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """Guesser.backlog_s(): rows beyond those of the first level."""
        self._take_in()
        twins = (self._twins.get(each.sequence_id) for each in sequences)
        num_waiting = sum(len(twin.waiting) - 1 for twin in twins if twin is not None)
        return self._predict(StepLoad(num_waiting, 0)).seconds if num_waiting > 0 else 0.0

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. A sequence whose last hidden states are not there, or that has no room, is not among
        those that are returned."""
        self._take_in()
        ready, room = list[Sequence](), self.config.max_num_batched_tokens
        for sequence in sequences:
            twin = self._twins.get(sequence.sequence_id)
            most = room - self._rows_beside
            if twin is None or not 0 < len(twin.waiting) <= most or not self._follow(twin, sequence):
                continue
            room = most - len(twin.waiting)
            ready.append(sequence)
        return ready

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """Guesser.expand(): what may follow each place."""
        branches = [self._at(place) for place in places]
        found = iter(self._candidates([branch for branch in branches if branch is not None]))
        return [next(found) if branch is not None else [] for branch in branches]

    def listen(self, batch: Batch) -> Callable[[int, Tensor], None]:
        """What the sweep of the model's next step should call after each layer."""
        self._take_in()
        self._forget()
        self._shrink()
        return self._states.listen(batch)

    def _shrink(self) -> None:
        """Hidden states that nobody had a use for are kept as far as there is memory for them."""
        waiting = [twin for twin in self._twins.values() if len(twin.waiting)]
        if sum(len(twin.waiting) for twin in waiting) <= MAX_WAITING:
            return
        most = MAX_WAITING // len(waiting)
        for twin in waiting:
            if len(twin.waiting) > most:
                self._begin_at(twin, twin.end - most, twin.waiting[len(twin.waiting) - most :].clone())

    def finish(self) -> None:
        """Guesses stay until the next step has hidden states in their place."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the host's memory that are its own."""
        return self.plan.host_used_bytes

    @property
    def num_card_bytes(self) -> int:
        """Bytes of a card's memory that are its own."""
        return card_bytes(self.plan)

    def close(self) -> None:
        self.head.close()

    def _take_in(self) -> None:
        """Note the hidden states of the last step."""
        for sequence, start, hidden in self._states.take():
            if sequence.request.prompt_embeds is not None or sequence.encoder is not None:
                continue  # the head's rows need tokens
            twin = self._twins.get(sequence.sequence_id)
            if twin is None:
                request = replace(sequence.request, adapter=None)  # which changes the model's layers
                rows = Sequence(sequence.sequence_id, request, self.head.max_model_len)
                none = torch.empty(0, self.head.spec.hidden_size)
                twin = Twin(weakref.ref(sequence), rows, 1, none)
                self._twins[sequence.sequence_id] = twin
            hidden = self._given(hidden[max(0, twin.end - start) :])
            if start > twin.end:  # others had computed what lies between
                self._begin_at(twin, start, hidden)
            else:
                twin.waiting = torch.cat((twin.waiting, hidden))

    def _begin_at(self, twin: Twin, place: int, hidden: Tensor) -> None:
        """Let the head's rows begin with this place's hidden state."""
        self._release(twin)
        self._blocks.release(twin.rows)
        twin.rows.num_computed_tokens = 0
        twin.first, twin.waiting = place + 1, hidden

    def _follow(self, twin: Twin, sequence: Sequence) -> bool:
        """Have the rows of a sequence's text up to its last token. False if the model has not computed all
        tokens before that one, or if there is no room."""
        if twin.end != sequence.num_tokens - 1:
            return False
        self._release(twin)
        if not self._grow(twin, sequence):
            self._begin_at(twin, twin.end - len(twin.waiting), twin.waiting)
            if not self._grow(twin, sequence):
                return False
        twin.branches[-1] = Branch(sequence, twin.rows, twin.waiting)
        return True

    def _grow(self, twin: Twin, sequence: Sequence) -> bool:
        twin.rows.token_ids = sequence.token_ids[twin.first :]
        return self._has_room(twin.rows)

    def _has_room(self, rows: Sequence) -> bool:
        """Give rows of a text their blocks, if there are any left."""
        return rows.num_tokens + _MARGIN < self.head.max_model_len and self._blocks.grow(rows)

    def _at(self, place: Place) -> Branch | None:
        """The branch whose last token is that of a place. None if it has no room, or if its grammar is
        complete."""
        branches = self._twins[place.sequence.sequence_id].branches
        if place.node < 0:
            return branches[-1]
        parent = branches.get(place.parent)
        if parent is None or parent.rows.num_tokens + 1 >= self.head.max_model_len:
            return None
        text = self._forks.longer(parent.text, place.token_id, place.sequence)
        if text is None:
            return None
        rows = copy.copy(parent.rows)
        rows.token_ids, rows.block_table = [*parent.rows.token_ids, place.token_id], []
        self._blocks.share(parent.rows, rows)
        if not self._blocks.grow(rows):
            self._blocks.release(rows)
            return None
        branches[place.node] = Branch(text, rows, parent.hidden)
        return branches[place.node]

    def _candidates(self, branches: List[Branch]) -> list[list[tuple[int, float]]]:
        """Compute the pending rows of each branch. Returns for each its likely next tokens and their
        shares."""
        if not branches:
            return []
        parts = [ScheduledSequence(each.rows, each.rows.num_pending_tokens, True) for each in branches]
        inputs = ModelInputs.of(Batch(tuple(parts), self._blocks.take_copies()), self.config.block_size)
        vectors = torch.cat([each.hidden for each in branches])
        executor, most = self.head.executor, self.config.max_num_seqs
        given = GivenRows(torch.arange(len(vectors)), vectors)
        hidden = executor.wanted(replace(inputs, given=given))
        logits = (executor.head(hidden[first : first + most]) for first in range(0, len(hidden), most))
        texts = tuple(ScheduledSequence(each.text, 1, True) for each in branches)
        found = self._sampler.candidates(logits, Batch(texts), NUM_CANDIDATES)
        is_normed = self._form is not None and self._form.is_normed
        hidden = executor.norm_final(hidden) if is_normed else hidden.to("cpu")
        for index, branch in enumerate(branches):
            branch.rows.advance(branch.rows.num_pending_tokens)
            branch.hidden = hidden[index : index + 1]
            if branch.rows is (twin := self._twins[branch.text.sequence_id]).rows:
                twin.waiting = twin.waiting[:0]
        return found

    def _release(self, twin: Twin) -> None:
        """Give the rows of guesses back."""
        for branch in twin.branches.values():
            if branch.rows is not twin.rows:
                self._blocks.release(branch.rows)
        twin.branches.clear()

    def _forget(self) -> None:
        """Give back the blocks of sequences that have ended."""
        for number, twin in list(self._twins.items()):
            sequence = twin.sequence()
            if sequence is None or sequence.finish_reason is not None:
                self._release(twin)
                self._blocks.release(twin.rows)
                del self._twins[number]
