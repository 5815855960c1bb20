"""Guesses: what may follow a sequence's tokens, as a tree that grows, with the chance of each guess."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Sequence as List

from penstock.generation.drafting.acceptance import Acceptance, kind_of_match, kind_of_rank
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.fork_limit import ForkLimit
from penstock.generation.drafting.recycled_tokens import RecycledTokens
from penstock.generation.sequence import Sequence

#: Most guesses of one sequence that are looked at by their likely followers.
_MAX_SPREAD = 24


class Guesses:
    """The guesses of one sequence in one step. Nodes are numbered in the order in which they were added, so a
    node comes after the one that it follows. -1 stands for the sequence's last token."""

    def __init__(self, sequence: Sequence, acceptance: Acceptance, least_chance: float) -> None:
        """least_chance: guesses that are right less often don't pay, and are not looked at."""
        # Whoever keeps guesses does not keep their sequence.
        self._sequence = weakref.ref(sequence)
        self._acceptance, self._least_chance = acceptance, least_chance
        self._rates: dict[int, float] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.kinds: list[int] = []
        #: Kinds of all guesses, also of those that are too rarely right to be here.
        self.kinds_met = set[int]()
        #: That a guess and all those before it are right.
        self.chances: list[float] = []
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def sequence(self) -> Sequence:
        sequence = self._sequence()
        assert sequence is not None, "its guesses were asked for after it ended"
        return sequence

    def rate(self, kind: int) -> float:
        """Acceptance.rate(), the same for the whole step."""
        if kind not in self._rates:
            self._rates[kind] = self._acceptance.rate(kind)
        return self._rates[kind]

    def chance(self, node: int) -> float:
        return 1.0 if node < 0 else self.chances[node]

    def _last_two(self, node: int) -> tuple[int, int]:
        """The tokens at a guess and before it; -1 where none is before."""
        text = self.sequence.token_ids
        if node < 0:
            return text[-2] if len(text) > 1 else -1, text[-1]
        parent = self.parents[node]
        return self.token_ids[parent] if parent >= 0 else text[-1], self.token_ids[node]

    def add(self, parent: int, token_id: int, kind: int) -> int | None:
        """A guess that follows `parent`. A guess that is there already has the better of both chances. None
        if the chance is too small, or if the sequence's grammar forbids the token."""
        chance = self.chance(parent) * self.rate(kind)
        self.kinds_met.add(kind)
        if chance < self._least_chance or token_id < 0:
            return None
        node = self._nodes.get((parent, token_id))
        if node is None:
            matcher = self.sequence.matcher
            if parent < 0 and matcher is not None and not matcher.allowed >> token_id & 1:
                return None
            node = self._nodes[parent, token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.kinds.append(kind)
            self.chances.append(chance)
        elif chance > self.chances[node]:
            self.kinds[node], self.chances[node] = kind, chance
        return node

    def doubt(self, parent: int, token_ids: List[int], rate: float) -> None:
        """A model says what may follow `parent`, and names a right token at this rate. Other guesses are less
        likely therefore (by Bayes' rule), and so are those that follow them."""
        scales = dict[int, float]()
        for node, before in enumerate(self.parents):
            if before == parent and self.token_ids[node] not in token_ids:
                chance = self.chances[node] / self.chance(parent)
                scales[node] = (1 - rate) / (1 - rate * chance)
            elif before in scales:
                scales[node] = scales[before]
        for node, scale in scales.items():
            self.chances[node] *= scale

    def add_chain(self, token_ids: List[int], num_same: int, first_kind: int | None = None) -> None:
        """What followed the same `num_same` tokens elsewhere. Where a guess matters, those before it
        are right: they are the same in both places, too."""
        node = -1
        for number, token_id in enumerate(token_ids):
            kind = kind_of_match(num_same + number)
            found = self.add(node, token_id, kind if number or first_kind is None else first_kind)
            if found is None:
                return
            node = found

    def spread(self, recycled: RecycledTokens) -> None:
        """Add what was likely after each guess at another time, the likeliest guesses first."""
        heap = [(-1.0, -1), *((-chance, node) for node, chance in enumerate(self.chances))]
        heapq.heapify(heap)
        for _ in range(_MAX_SPREAD):
            if not heap:
                return
            _, parent = heapq.heappop(heap)
            followers, are_behind_two = recycled.followers(*self._last_two(parent))
            for rank, token_id in enumerate(followers):
                num_before = len(self.token_ids)
                node = self.add(parent, token_id, kind_of_rank(rank, are_behind_two))
                if node is not None and node == num_before:
                    heapq.heappush(heap, (-self.chances[node], node))

    def tree(self, nodes: List[int], forks: ForkLimit) -> DraftTree:
        """Some nodes, likeliest first, up to tokens that the sequence's grammar forbids."""
        tree = DraftTree(tuple(self.token_ids), tuple(self.parents))
        matchers = {-1: self.sequence.matcher}
        if matchers[-1] is None:
            return tree.keep(nodes)
        kept = list[int]()
        for node in nodes:
            matcher = matchers.get(self.parents[node])
            token_id = self.token_ids[node]
            if matcher is not None and not matcher.is_complete and matcher.allowed >> token_id & 1:
                kept.append(node)
                if forks.take(self.sequence):
                    matchers[node] = matcher.after(token_id)
        return tree.keep(kept)

    def right(self, token_ids: List[int]) -> list[int]:
        """The nodes that these tokens lead to, which are what followed the text."""
        path = [-1]
        for token_id in token_ids:
            node = self._nodes.get((path[-1], token_id))
            if node is None:
                break
            path.append(node)
        return path[1:]
