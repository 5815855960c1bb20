"""PlanesDrafter: the upper planes of a model's own weights, which are the model in 4 bits, guess what the
model will say.

Where all upper planes stay in memory and lower ones are streamed, guessing reads nothing from the disk and
takes no memory of its own. It goes on from the exact keys and values of the text; those of guesses lie in
free blocks, and are given back before the step that computes the guesses begins.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from collections.abc import Sequence as List

import torch

from penstock.errors import CapacityError, ConfigError, MemoryName
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import Assumed, assumed_planes
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.scheduling.block_manager import BlockManager
from penstock.generation.sequence import Sequence
from penstock.loader import Model
from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.weights.formats.model_formats import has_planes
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.streamer import LayerStreamer

#: Tokens that are said to be likely behind a place.
NUM_CANDIDATES = 4
#: More pending tokens than these, of a prompt or a grammar, are not computed for guesses.
MAX_PENDING = 8


def check_planes(model: Model, plan: MemoryPlan) -> None:
    """Raises ConfigError for a model whose weights are in no planes or whose steps need more, and
    CapacityError if upper planes are streamed."""
    tensors = model.store.tensors
    if not has_planes(tensors):
        raise ConfigError("upper planes guess only in a model in planes: take --weights planes")
    if len(tensors.stacks) > 1 or model.spec.state_bytes or model.spec.num_experts_per_token:
        raise ConfigError(
            f"upper planes can't guess for {model.spec.architecture}: it has experts, recurrent states or an "
            "encoder"
        )
    if any(not layer.is_resident and not layer.is_lower for layer in plan.layers):
        memory: MemoryName = "device" if plan.has_gpu else "host"
        raise CapacityError(
            "upper planes guess only where they all stay in memory, and some are streamed. Raise "
            f"--{memory}-memory, or name a small draft model",
            memory,
        )


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

    def layers(self, stack: str) -> Generator[LayerWeights, None, None]:
        yield from self._layers

    def synchronize(self) -> None:
        self._streamer.synchronize()


class PlanesDrafter:
    """Used by the engine thread, between two steps."""

    #: Bytes of the host's memory that are its own, and of a card's.
    num_bytes = num_card_bytes = 0

    def __init__(self, model: Model, blocks: BlockManager, max_num_seqs: int, predict: Predict) -> None:
        """blocks: of the model's keys and values. predict: the time of the model's steps."""
        self._planes, self._blocks, self._predict = UpperPlanes(model.streamer), blocks, predict
        self._executor = model.executor.beside(self._planes)
        self._sampler = Sampler(model.spec.vocab_size, frozenset())
        self._forks, self._max_rows = ForkLimit(), max_num_seqs
        #: By the number of a sequence and the node of the step's guesses; -1: the text's end.
        self._branches: dict[tuple[int, int], Sequence] = {}

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        return assumed_planes(self.seconds)

    def seconds(self, num_places: int) -> float:
        """What one level of guesses takes: half of the bytes that a step reads from memory, or as much
        arithmetic; 0 if nothing was measured."""
        step = self._predict(num_places, num_places)
        return max(0.5 * step.terms.get("memory", 0.0), step.products_s, step.terms.get("arithmetic", 0.0))

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """Nothing: the model's keys and values are there."""
        return 0.0

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. A sequence with many pending tokens, or without free blocks, is not among those that
        are returned."""
        if not self._planes.are_there:
            return []
        return [each for each in sequences if self._begin(each)]

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """Guesser.expand(): what may follow each place."""
        branches = [self._at(place) for place in places]
        found = iter(self._candidates([branch for branch in branches if branch is not None]))
        return [next(found) if branch is not None else [] for branch in branches]

    def finish(self) -> None:
        """The blocks of all guesses are free again."""
        for branch in self._branches.values():
            self._blocks.release(branch)
        self._branches.clear()

    def close(self) -> None: ...

    def _begin(self, sequence: Sequence) -> bool:
        if sequence.num_pending_tokens > MAX_PENDING or sequence.encoder is not None:
            return False
        return self._fork(sequence, -1, copy.copy(sequence)) is not None

    def _at(self, place: Place) -> Sequence | None:
        """The branch whose last token is that of a place. None if it has no room, or if its grammar is
        complete."""
        number = place.sequence.sequence_id
        if place.node < 0:
            return self._branches[number, -1]
        parent = self._branches.get((number, place.parent))
        if parent is None or parent.num_tokens >= parent.max_total_tokens:
            return None
        if not self._forks.take(place.sequence):
            return None
        matcher = parent.matcher.after(place.token_id) if parent.matcher is not None else None
        if matcher is not None and matcher.is_complete:
            return None
        branch = copy.copy(parent)
        branch.token_ids, branch.matcher = [*parent.token_ids, place.token_id], matcher
        return self._fork(parent, place.node, branch)

    def _fork(self, parent: Sequence, node: int, branch: Sequence) -> Sequence | None:
        """Give a branch, which goes on from its parent, blocks of its own from its first pending token on:
        what guesses write must never be in a block that the model's sequences read. None without room."""
        branch.block_table = []
        self._blocks.share(parent, branch)
        first, size = branch.num_computed_tokens // self._blocks.block_size, self._blocks.block_size
        offset = branch.num_computed_tokens % size
        pool, table = self._blocks.pool, branch.block_table
        num_blocks = self._blocks.blocks_for(branch.num_tokens)
        if pool.num_free < num_blocks - first:
            self._blocks.release(branch)
            return None
        for index in range(first, len(table)):
            shared = table[index]
            # Only the first of these blocks has tokens in front of the pending ones.
            table[index] = self._blocks.copy(shared) if offset and index == first else pool.take()
            pool.disown(shared)
        table.extend(pool.take() for _ in range(num_blocks - len(table)))
        self._branches[branch.sequence_id, node] = branch
        return branch

    def _candidates(self, branches: List[Sequence]) -> list[list[tuple[int, float]]]:
        """Compute what is pending of each branch. Returns for each its likely next tokens and their
        shares."""
        if not branches:
            return []
        parts = tuple(ScheduledSequence(each, each.num_pending_tokens, True) for each in branches)
        # Copies for the model's step, which are among these, may as well be made now.
        batch = Batch(parts, self._blocks.take_copies())
        logits = self._executor.forward(ModelInputs.of(batch, self._blocks.block_size))
        found = self._sampler.candidates(logits, batch, NUM_CANDIDATES)
        for branch in branches:
            branch.advance(branch.num_pending_tokens)
        return found
