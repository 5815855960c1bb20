"""PlanesDrafter: the upper planes of a model's own weights, which are the model in 4 bits, guess what the
model will say.

Where all upper planes stay in memory and lower ones are streamed, guessing reads nothing from the disk and
takes no memory of its own. It goes on from the exact keys and values of the text; those of guesses lie in
free blocks, and are given back before the step that computes the guesses begins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator
from collections.abc import Sequence as List
from functools import partial

import torch

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError, MemoryName
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import Assumed, assumed_planes
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.loader import Model
from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad
from penstock.weights.formats.model_formats import has_planes
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.streamer import LayerStreamer

#: Tokens that are said to be likely after a place.
NUM_CANDIDATES = 4
#: More pending tokens than these, of a prompt or a grammar, are not computed for guesses.
MAX_PENDING = 8
NO_PLANES = "upper planes guess only in a model in planes: take --weights planes"


def check_planes(model: Model, plan: MemoryPlan) -> None:
    """Raises ConfigError for a model whose weights are in no planes, and CapacityError if upper planes are
    streamed."""
    tensors = model.store.tensors
    if not has_planes(tensors):
        raise ConfigError(NO_PLANES)
    check_upper_planes(plan)


def check_upper_planes(plan: MemoryPlan) -> None:
    """Raises CapacityError if upper planes are streamed by this plan of a model in planes."""
    if any(not layer.is_resident and not layer.is_lower for layer in plan.layers):
        memory: MemoryName = "device" if plan.has_gpu else "host"
        raise CapacityError(
            "upper planes guess only where they all stay in memory, and some are streamed. Raise "
            f"--{memory}-memory, or name a small draft model in their place",
            memory,
        )


def guess_share(rows_per_token: int, multiplies_bytes: bool) -> float:
    """What a guess costs of a token's rows, with its 8-bit activations: all of them where the kernels don't
    multiply bytes."""
    return 1 / rows_per_token if multiplies_bytes else 1.0


def pass_s(plan: MemoryPlan, predict: Predict, share: float, num_places: int) -> float:
    """What a pass over the upper planes takes; 0 if nothing was measured. predict: of the model's steps.
    share: guess_share(). A pass reads the upper planes' part of what a step reads from memory and writes
    there, and has rows for each place. Beyond the first, a row takes what it takes in a step, or its
    arithmetic: a few rows hide theirs behind the reading of 8 bits, and 4 bits are read too soon for that. A
    card that shares products computes a pass alone."""
    one, step, as_many_rows = (
        predict(StepLoad(count, count, is_alone=True))
        for count in (1, num_places, math.ceil(num_places * share))
    )
    upper, streamed = float(sum(layer.num_bytes for layer in plan.layers if not layer.is_lower)), 2.0
    if plan.kept_share is not None:
        upper /= 1 + plan.kept_share  # the card keeps this share of the lower planes beside them
        streamed = 1.5  # half of a rest are upper planes, which the card has
    whole = sum(layer.num_bytes * (1 if layer.is_resident else streamed) for layer in plan.layers)
    read_s = one.terms.get("memory", 0.0) * upper / whole
    arithmetic_s = step.terms.get("arithmetic", 0.0) - one.terms.get("arithmetic", 0.0)
    return read_s + max(as_many_rows.products_s - one.products_s, arithmetic_s * share)


class UpperPlanes:
    """A LayerSource of the layers' units without their lower planes. They stay in memory."""

    def __init__(self, streamer: LayerStreamer) -> None:
        self._streamer = streamer
        self._layers: list[LayerWeights] = []

    @property
    def torch_device(self) -> torch.device:
        return self._streamer.torch_device

    @property
    def are_there(self) -> bool:
        """Whether all of them have been read."""
        self._layers = self._layers or self._streamer.upper_planes()
        return bool(self._layers)

    def begin_step(self, num_tokens: int) -> None: ...

    def runs(self, stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
        yield from ([weights] for weights in self._layers)

    def synchronize(self) -> None:
        self._streamer.synchronize()


class PlanesDrafter:
    """Used by the engine thread, between two steps."""

    #: Bytes of the host's memory that are its own, and of a card's.
    num_bytes = num_card_bytes = 0
    #: Guesser.levels_of_pass
    levels_of_pass = 1

    def __init__(
        self, model: Model, plan: MemoryPlan, blocks: BlockManager, config: EngineConfig, predict: Predict
    ) -> None:
        """blocks: of the model's keys and values. config: of the model. predict: the time of its steps."""
        self._planes, self._blocks = UpperPlanes(model.streamer), blocks
        family = model.executor.family
        share = guess_share(config.rows_per_token, getattr(family.kernels, "multiplies_bytes", True))
        #: Places -> seconds of a pass over them; 0 if nothing was measured.
        self.seconds = partial(pass_s, plan, predict, share)
        # Guesses may be less exact. Where bytes are multiplied, they have half as many rows, and rows bind a
        # pass from the third place on.
        family = family.with_kernels(family.kernels.with_int8_activations())
        self._executor = model.executor.beside(self._planes, family)
        self._sampler = Sampler(model.spec.vocab_size, frozenset())
        self._forks, self._max_num_tokens = ForkLimit(), config.max_num_batched_tokens
        #: By the number of a sequence and the node of the step's guesses; -1: the text's end.
        self._branches: dict[tuple[int, int], Sequence] = {}

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        return assumed_planes(self.seconds)

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """Nothing: the model's keys and values are there."""
        return 0.0

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. A sequence with many pending tokens is not among those that are returned."""
        if not self._planes.are_there:
            return []
        return [each for each in sequences if each.num_pending_tokens <= MAX_PENDING and each.encoder is None]

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """Guesser.expand(): what may follow each place."""
        room, branches = self._max_num_tokens, list[Sequence | None]()
        for place in places:
            branches.append(self._at(place, room))
            room -= branches[-1].num_pending_tokens if branches[-1] is not None else 0
        found = iter(self._candidates([branch for branch in branches if branch is not None]))
        return [next(found) if branch is not None else [] for branch in branches]

    def finish(self) -> None:
        """The blocks of all guesses are free again."""
        for branch in self._branches.values():
            self._blocks.release(branch)
        self._branches.clear()

    def close(self) -> None: ...

    def _at(self, place: Place, room: int) -> Sequence | None:
        """The branch whose last token is that of a place, of which at most `room` tokens are pending. None if
        there is no room, or if its grammar is complete."""
        number = place.sequence.sequence_id
        parent = place.sequence if place.node < 0 else self._branches.get((number, place.parent))
        if parent is None:
            return None
        branch = copy.copy(parent) if place.node < 0 else self._next(parent, place)
        if branch is None or branch.num_pending_tokens > room or not self._place(parent, branch):
            return None
        self._branches[number, place.node] = branch
        return branch

    def _next(self, parent: Sequence, place: Place) -> Sequence | None:
        """A branch with one token more, and without blocks. None where its text has to end."""
        if parent.num_tokens >= parent.max_total_tokens:
            return None
        return self._forks.longer(parent, place.token_id, place.sequence)

    def _place(self, parent: Sequence, branch: Sequence) -> bool:
        """Give a branch, which goes on from a parent, blocks of its own from the first pending token on: what
        guesses write must never be in a block that the model's sequences read. False without room."""
        branch.block_table = []
        self._blocks.share(parent, branch)
        first, size = branch.num_computed_tokens // self._blocks.block_size, self._blocks.block_size
        offset = branch.num_computed_tokens % size
        pool, table = self._blocks.pool, branch.block_table
        num_blocks = self._blocks.blocks_for(branch.num_tokens)
        if pool.num_free < num_blocks - first:
            self._blocks.release(branch)
            return False
        for index in range(first, len(table)):
            shared = table[index]
            # Only the first of these blocks has tokens in front of the pending ones.
            table[index] = self._blocks.copy(shared) if offset and index == first else pool.take()
            pool.disown(shared)
        table.extend(pool.take() for _ in range(num_blocks - len(table)))
        return True

    def _candidates(self, branches: List[Sequence]) -> list[list[tuple[int, float]]]:
        """Compute what is pending of each branch. Returns for each its likely next tokens with their
        shares."""
        if not branches:
            return []
        parts = tuple(ScheduledSequence(branch, branch.num_pending_tokens, True) for branch in branches)
        # Copies for the model's step, which are among these, may as well be made now.
        batch = Batch(parts, self._blocks.take_copies())
        logits = self._executor.forward(ModelInputs.of(batch, self._blocks.block_size))
        found = self._sampler.candidates(logits, batch, NUM_CANDIDATES)
        for branch in branches:
            branch.advance(branch.num_pending_tokens)
        return found
