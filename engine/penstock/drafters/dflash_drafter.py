"""DFlashDrafter: a DFlash head guesses a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.drafters.mtp_drafter import NUM_CANDIDATES, Branch, MTPDrafter, Twin
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import Assumed, assumed_dflash
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.loader import LoadedModel, Model
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad
from penstock.model.family import GivenRows
from penstock.model.heads.dflash import DFlash, DFlashSpec

#: The likeliest tokens that are kept of each guess, for draws and grammars that forbid the first ones.
_NUM_KEPT = 64


class _Block(NamedTuple):
    """The guesses of a pass: for each place after a text the likeliest tokens, and their logits."""

    tokens: Tensor  # int64 [num_guesses, num_kept]
    logits: Tensor  # float32 [num_guesses, num_kept]


def load_of_pass(spec: DFlashSpec, num_seqs: int) -> StepLoad:
    """What the blocks of so many sequences take."""
    return StepLoad(num_seqs * spec.block_size, num_seqs * spec.num_guesses)


class DFlashDrafter(MTPDrafter):
    """Hidden states wait as with MTPDrafter, and become context rows, whose keys and values stay. The first
    level of guesses computes the block; further ones read what it guessed at their depth, since a guess of a
    block does not depend on those before it."""

    def __init__(self, loaded: LoadedModel, model: Model, plan: MemoryPlan) -> None:
        family = loaded.model.executor.family
        assert isinstance(family, DFlash)
        self._family, self._embedding = family, loaded.model.executor.ends[0]
        super().__init__(loaded, model, plan)
        self._rows_beside, self.levels_of_pass = family.spec.block_size, family.spec.num_guesses
        #: Of this step, by the number of a sequence.
        self._guessed: dict[int, _Block] = {}

    def _layers(self, num_layers: int) -> tuple[int, ...]:
        return self._family.spec.layers_of(num_layers)

    def _given(self, hidden: Tensor) -> Tensor:
        return self._family.condense(self._embedding, hidden.to("cpu"))

    @property
    def assumed(self) -> Assumed:
        return assumed_dflash(self._pass_s, self._family.spec.num_guesses)

    def seconds(self, num_places: int) -> float:
        """Guesser.seconds(): levels after the first one take nothing."""
        return 0.0 if self._guessed else self._pass_s(num_places)

    def _pass_s(self, num_seqs: int) -> float:
        return self._predict(load_of_pass(self._family.spec, num_seqs)).seconds

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        self._guessed.clear()
        return super().start(sequences)

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        if begun := [place.sequence.sequence_id for place in places if place.node < 0]:
            self._guess([self._twins[number] for number in begun])
        branches = [self._behind(place) for place in places]
        texts = [branch.text for branch in branches if branch is not None]
        batch = Batch(tuple(ScheduledSequence(text, 1, True) for text in texts))
        found = iter(self._sampler.candidates(self._logits(texts), batch, NUM_CANDIDATES))
        return [next(found) if branch is not None else [] for branch in branches]

    def finish(self) -> None:
        self._guessed.clear()

    def _grow(self, twin: Twin, sequence: Sequence) -> bool:
        """The rows are those of the tokens before the text's last one, and the block."""
        spec, rows = self._family.spec, twin.rows
        rows.token_ids = sequence.token_ids[twin.first - 1 :] + [spec.mask_token] * spec.num_guesses
        return self._has_room(rows)

    @torch.inference_mode()
    def _guess(self, twins: List[Twin]) -> None:
        """Compute the blocks of these sequences, and the context rows that wait."""
        most, num = self.config.max_num_seqs, self._family.spec.num_guesses
        parts = tuple(ScheduledSequence(each.rows, each.rows.num_pending_tokens, True) for each in twins)
        context, wanted, first = list[int](), list[int](), 0
        for twin, part in zip(twins, parts, strict=True):
            end = first + part.num_new_tokens
            context += range(first, first + len(twin.waiting))
            wanted += range(end - num, end)
            first = end
        inputs = ModelInputs.of(Batch(parts, self._blocks.take_copies()), self.config.block_size)
        given = GivenRows(torch.tensor(context), torch.cat([twin.waiting for twin in twins]))
        executor = self.head.executor
        hidden = executor.wanted(replace(inputs, given=given, wanted_rows=torch.tensor(wanted)))
        kept = min(_NUM_KEPT, self.head.spec.vocab_size)
        best = [
            executor.head(hidden[first : first + most]).topk(kept) for first in range(0, len(hidden), most)
        ]
        tokens, logits = (torch.cat([each[index] for each in best]).view(-1, num, kept) for index in (1, 0))
        for twin, *block in zip(twins, tokens, logits, strict=True):
            self._guessed[twin.rows.sequence_id] = _Block(*block)
            twin.rows.advance(len(twin.waiting))
            twin.waiting = twin.waiting[:0]

    def _behind(self, place: Place) -> Branch | None:
        """The text up to a place. None if the block ends there, or if its grammar is complete."""
        twin = self._twins[place.sequence.sequence_id]
        if place.node < 0:
            return twin.branches[-1]
        parent = twin.branches.get(place.parent)
        num_left = 0 if parent is None else self._family.spec.num_guesses - self._depth(parent.text) - 1
        if parent is None or num_left <= 0:
            return None
        text = self._forks.longer(parent.text, place.token_id, place.sequence)
        if text is None:
            return None
        twin.branches[place.node] = Branch(text, twin.rows, twin.waiting)
        return twin.branches[place.node]

    def _depth(self, text: Sequence) -> int:
        """Guesses at the end of a text."""
        return text.num_tokens - self._twins[text.sequence_id].branches[-1].text.num_tokens

    def _logits(self, texts: List[Sequence]) -> Iterator[Tensor]:
        """What the blocks say after each text, float32 [1, vocab_size]; -inf for what was not kept."""
        for text in texts:
            block, depth = self._guessed[text.sequence_id], self._depth(text)
            row = torch.full((1, self.head.spec.vocab_size), float("-inf"))
            row[0, block.tokens[depth]] = block.logits[depth]
            yield row
