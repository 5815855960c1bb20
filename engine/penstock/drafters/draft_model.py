"""DraftModel: a small model that guesses what a large one will say.

It draws with the parameters, the seed and the noise of the request, and obeys the request's grammar. So it
says the large model's token wherever the two distributions are alike. It has its own keys and values, of the
tokens that stood and of the last tree of guesses, whose branches share blocks as beams do: guesses that came
true need not be computed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from penstock.config import EngineConfig
from penstock.drafters.memory_beside import card_bytes, config_beside, machine_beside, plan_beside
from penstock.drafters.vocabularies import check_tokens
from penstock.errors import CapacityError, MemoryName
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import Assumed, assumed_model
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.scheduling.rope_lengths import RopeLengths
from penstock.generation.sequence import Sequence
from penstock.goes_with import Feature, check_together
from penstock.loader import LoadedModel, PlannedModel, begin_reading, begin_tokenizer, open_folder
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import MemoryPlan, gib
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.hub import find_model

#: Tokens of texts that have room, unless the config has fewer for the model itself.
NUM_KV_TOKENS = 8192
#: Most tokens of prompts that one call computes for the draft model.
MAX_CHUNK = 256
#: Tokens that are said to be likely after a place.
NUM_CANDIDATES = 4
#: Tokens that a sequence has room for, if guesses are made at all.
_MARGIN = 32
#: Recurrent states of a draft model that has some, of texts and of branches together.
NUM_STATES = 32


@dataclass
class _Twin:
    """What the draft model has of a sequence."""

    sequence: weakref.ref[Sequence]
    #: -1: the sequence's tokens; else those and a path of guesses up to a node of the step's guesses.
    branches: dict[int, Sequence]


def own_config(config: EngineConfig, state_bytes: int = 0) -> EngineConfig:
    """The config of a draft model beside an engine of this config. state_bytes: ModelSpec.state_bytes of the
    draft model. Each branch has a state of its own."""
    num_seqs = max(config.max_num_seqs, NUM_STATES) if state_bytes else config.max_num_seqs
    return EngineConfig(
        activations="int8",  # guesses may be less exact
        host_memory_bytes=config.host_memory_bytes,
        num_kv_tokens=min(NUM_KV_TOKENS, config.num_kv_tokens or NUM_KV_TOKENS),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(MAX_CHUNK, num_seqs),
        num_threads=config.num_threads,
        device="cpu",  # or the model's card: plan_beside()
        enable_prefix_caching=False,
        state_bytes=NUM_STATES * state_bytes or None,
        speculation="off",
        allow_pickle=config.allow_pickle,
    )


def check_plan(name: str | Path, plan: MemoryPlan) -> None:
    """Raises CapacityError for a draft model that this plan of its own does not keep in memory."""
    if num_streamed := sum(not layer.is_resident for layer in plan.layers):
        memory: MemoryName = "device" if plan.has_gpu else "host"
        budget = plan.device_budget_bytes if plan.has_gpu else plan.host_budget_bytes
        raise CapacityError(
            f"the draft model {name} does not fit into {gib(budget)}: {num_streamed} of its layers would be "
            f"read in each step. Take a smaller one, or raise --{memory}-memory",
            memory,
        )


def _within(sequence: Sequence, vocab_size: int) -> SamplingParams | None:
    """The sequence's parameters for a model with so many tokens. None if they leave no token."""
    params = sequence.params
    allowed = params.allowed_token_ids
    if allowed is not None:
        allowed = tuple(token_id for token_id in allowed if token_id < vocab_size)
        if not allowed:
            return None
    return replace(
        params,
        logprobs=None,
        prompt_logprobs=None,
        prediction=(),
        seed=sequence.seed,
        allowed_token_ids=allowed,
        logit_bias={id_: bias for id_, bias in params.logit_bias.items() if id_ < vocab_size},
        bad_words=tuple(word for word in params.bad_words if max(word) < vocab_size),
    )


class DraftModel:
    """A model in memory beside the one that it drafts for. Used by the engine thread."""

    #: Guesser.levels_of_pass
    levels_of_pass = 1

    def __init__(self, loaded: LoadedModel, hardware: HardwareProfile) -> None:
        """hardware: the machine before the draft model was there."""
        self._hardware = hardware
        self.model, self.plan, self.config = loaded.model, loaded.plan, loaded.config
        self._predict = loaded.predict
        self._states = StatePool(loaded.plan.num_state_slots, loaded.plan.num_state_slots)
        self._blocks = BlockManager(loaded.plan.num_kv_blocks, loaded.config.block_size, False, self._states)
        self._vocab_size = self.model.spec.vocab_size
        self._sampler = Sampler(self._vocab_size, frozenset())
        #: By the number of a sequence.
        self._twins: dict[int, _Twin] = {}
        self._rope, self._forks = RopeLengths(self.model.spec.rope), ForkLimit()

    @classmethod
    def load(
        cls,
        name: str | Path,
        config: EngineConfig,
        offline: bool = False,
        hardware: HardwareProfile | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> DraftModel:
        """Load a draft model by its name, wholly into memory, within the budget of `config`: onto the card of
        a model on a card, if it fits there (config.draft_device), else into the host's memory. `tokenizer`
        stands for that of a folder without tokenizer files. Raises what
        Engine.load() raises, CapacityError if the model does not fit, and ConfigError for a kind of model
        that can't draft."""
        own = own_config(config)
        folder = find_model(name, None, offline, allow_pickle=own.allow_pickle)
        opened = open_folder(folder, own)
        spec = opened.spec
        own = own_config(config, spec.state_bytes)

        def settle(planned: PlannedModel) -> PlannedModel:
            check_plan(name, planned.plan)
            return planned

        try:
            check_together({Feature.DRAFTING, *spec.features}, spec.architecture)
            words = tokenizer or begin_tokenizer(folder, own)
            planned = plan_beside(opened, own, config, hardware, settle)
            loaded = begin_reading(planned, words)
        except BaseException:
            opened.store.close()
            raise
        try:
            loaded.model.streamer.tiers.wait_until_loaded()
        except BaseException:
            loaded.model.close()
            raise
        return cls(loaded, planned.hardware)

    def share_vocabulary(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Guess only tokens that the other model has. Raises what check_tokens() raises."""
        check_tokens(self.model.tokenizer, tokenizer, min(vocab_size, self._vocab_size))
        self._vocab_size = min(self._vocab_size, vocab_size)

    def leave(
        self, config: EngineConfig, hardware: HardwareProfile | None
    ) -> tuple[EngineConfig, HardwareProfile]:
        """A config and a machine with the memory that this model leaves."""
        left = config_beside(config, self.plan)
        return left, machine_beside(config, hardware or self._hardware, self.plan)

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        spec = self.model.spec
        size = footprint(spec, self.model.store.tensors, spec.kv_layout(self.config.kv_dtype))
        return assumed_model(size.token_elements + size.head_elements, self.seconds)

    def seconds(self, num_places: int) -> float:
        """What one level of guesses takes; 0 if nothing was measured."""
        return self._predict(StepLoad.decode(num_places)).seconds

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """Guesser.backlog_s(): in calls of MAX_CHUNK tokens."""
        num_tokens = 0
        for each in sequences:
            twin = self._twins.get(each.sequence_id)
            known = max((b.num_computed_tokens for b in twin.branches.values()), default=0) if twin else 0
            num_tokens += max(0, each.num_tokens - 1 - known)
        num_chunks, rest = divmod(num_tokens, MAX_CHUNK)
        return num_chunks * self._predict(StepLoad(MAX_CHUNK, 0)).seconds + (
            self._predict(StepLoad(rest, 0)).seconds if rest else 0.0
        )

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. A sequence whose prompt is not computed here yet, or that has no room, is not among
        those that are returned."""
        self._forget()
        return self._catch_up({each: twin for each in sequences if (twin := self._follow(each)) is not None})

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """Guesser.expand(): what may follow each place."""
        room, twins = self.config.max_num_batched_tokens, list[Sequence | None]()
        for place in places:
            twin = self._at(place) if room > 0 else None
            room -= twin.num_pending_tokens if twin is not None else 0
            twins.append(twin if room >= 0 else None)  # the plan has memory for so many tokens
        found = iter(self._candidates([twin for twin in twins if twin is not None]))
        return [next(found) if twin is not None else [] for twin in twins]

    def finish(self) -> None:
        """Guesses stay: those that come true need not be computed again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the host's memory that are its own."""
        return self.plan.host_used_bytes

    @property
    def num_card_bytes(self) -> int:
        """Bytes of a card's memory that are its own."""
        return card_bytes(self.plan)

    def close(self) -> None:
        self.model.close()

    def _at(self, place: Place) -> Sequence | None:
        """The twin whose last token is that of a place. None if it has no room, or if its grammar is
        complete."""
        branches = self._twins[place.sequence.sequence_id].branches
        if place.node in branches:
            return branches[place.node]
        parent = branches.get(place.parent)
        if parent is None or parent.num_tokens + 1 >= self.model.max_model_len:
            return None
        if place.token_id >= self.model.spec.vocab_size or self._states.is_full:
            return None
        twin = self._forks.longer(parent, place.token_id, place.sequence)
        if twin is None:
            return None
        twin.block_table = []
        self._blocks.share(parent, twin)
        if not self._blocks.grow(twin):
            self._blocks.release(twin)
            return None
        branches[place.node] = twin
        return twin

    def _candidates(self, twins: List[Sequence]) -> list[list[tuple[int, float]]]:
        """Compute what is pending of each twin. Returns for each its likely next tokens and their shares."""
        if not twins:
            return []
        parts = tuple(ScheduledSequence.of(twin, twin.num_pending_tokens) for twin in twins)
        batch, logits = self._forward(parts)
        found = self._sampler.candidates(logits, batch, NUM_CANDIDATES)
        for twin in twins:
            twin.advance(twin.num_pending_tokens)
        return [[(id_, share) for id_, share in each if id_ < self._vocab_size] for each in found]

    def _forward(self, parts: tuple[ScheduledSequence, ...]) -> tuple[Batch, Iterator[Tensor]]:
        """A step of the draft model, and its logits."""
        copies, states = self._blocks.take_copies(), self._states.take_copies()
        batch = Batch(parts, copies, state_copies=states)
        return batch, self.model.executor.forward(ModelInputs.of(batch, self.config.block_size))

    def _follow(self, sequence: Sequence) -> Sequence | None:
        """The twin of a sequence, with its tokens. What the twin had guessed right stays computed. None if
        there is no room, or if the text is more than tokens that both models have: vectors, a soft prompt, an
        encoded input, a prompt that is seen both ways."""
        ids, own_size = sequence.token_ids, self.model.spec.vocab_size
        is_plain = (
            sequence.encoder is None and not sequence.prefix_len and 0 <= min(ids) <= max(ids) < own_size
        )
        if not is_plain or sequence.num_soft_tokens or sequence.request.prompt_embeds is not None:
            return None
        found = self._twins.get(sequence.sequence_id)
        if found is None:
            params = _within(sequence, own_size)
            if params is None:
                return None
            request = replace(sequence.request, params=params, adapter=None)  # of the other model
            twin = Sequence(sequence.sequence_id, request, self.model.max_model_len)
            self._twins[sequence.sequence_id] = _Twin(weakref.ref(sequence), {-1: twin})
        else:
            twin = self._go_on(found, sequence)
        twin.token_ids = list(sequence.token_ids)
        if self._states.is_needed and twin.num_computed_tokens >= sequence.num_tokens:
            self._blocks.release(twin)  # a state has no way back
            twin.restart()
        if twin.state_slot is None and self._states.is_full:
            return None
        twin.num_computed_tokens = min(twin.num_computed_tokens, sequence.num_tokens - 1)
        twin.matcher = sequence.matcher.fork() if sequence.matcher is not None else None
        # Beyond a length, some models turn keys by other frequencies.
        has_room = twin.num_tokens + _MARGIN < self.model.max_model_len and self._rope.keeps(twin, _MARGIN)
        return twin if has_room and self._blocks.grow(twin) else None

    def _go_on(self, found: _Twin, sequence: Sequence) -> Sequence:
        """The branch that came true furthest becomes the twin itself, with what was computed of it."""
        num_before = found.branches[-1].num_tokens
        tail = sequence.token_ids[num_before:]

        def num_true(branch: Sequence) -> int:
            guessed = branch.token_ids[num_before:]
            is_ahead = self._states.is_needed and branch.num_computed_tokens >= sequence.num_tokens
            return len(guessed) if tail[: len(guessed)] == guessed and not is_ahead else 0

        # The first of those that are equal is the text itself.
        twin = max(found.branches.values(), key=num_true)
        for branch in found.branches.values():
            if branch is not twin:
                self._blocks.release(branch)
        found.branches = {-1: twin}
        return twin

    def _catch_up(self, twins: Mapping[Sequence, Sequence]) -> list[Sequence]:
        """Compute a part of the prompts that are new. Returns the sequences whose twins have one pending
        token, or so few that they are computed with the first level."""
        room, ready = MAX_CHUNK, list[Sequence]()
        parts = []
        for sequence, twin in sorted(twins.items(), key=lambda item: item[1].num_pending_tokens):
            if twin.num_pending_tokens <= room:
                ready.append(sequence)
                room -= twin.num_pending_tokens
            elif room:
                parts.append(ScheduledSequence.of(twin, room))
                room = 0
        if parts:
            list(self._forward(tuple(parts))[1])
            for part in parts:
                part.sequence.advance(part.num_new_tokens)
        return ready

    def _forget(self) -> None:
        """Give back the blocks of sequences that have ended."""
        for number, twin in list(self._twins.items()):
            sequence = twin.sequence()
            if sequence is None or sequence.finish_reason is not None:
                for branch in twin.branches.values():
                    self._blocks.release(branch)
                del self._twins[number]
