"""DraftTree: guesses of what follows a text. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple


class DraftTree(NamedTuple):
    """Nodes, each with a token and the node that it follows. A step computes all nodes. Right nodes make up
    one path from the text's end, since the nodes that follow the same node have different tokens."""

    token_ids: tuple[int, ...] = ()
    #: For each node the node that it follows, which stands earlier in this list; -1: the text's end.
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, token_ids: List[int]) -> DraftTree:
        """Each guess follows the one before."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __bool__(self) -> bool:
        return bool(self.token_ids)

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> list[int]:
        """For each node how many nodes lead to it, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    @property
    def runs(self) -> list[range]:
        """The nodes, cut where a node does not follow the node before it in the list. The first run begins at
        the text's end. Each other run begins beside a node of an earlier run."""
        starts = [node for node, parent in enumerate(self.parents) if parent != node - 1]
        ends = [*starts, self.num_nodes]
        return [range(start, end) for start, end in zip([0, *starts], ends, strict=True) if end > start]

    def path(self, node: int) -> list[int]:
        """The nodes that lead to a node, and the node itself; none for -1."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def follow(self, token_ids: Iterable[int]) -> list[int]:
        """The nodes that these tokens lead to from the text's end, up to the first token without a node."""
        children = {(parent, token): node for node, (token, parent) in enumerate(zip(*self, strict=True))}
        found: list[int] = []
        for token in token_ids:
            node = children.get((found[-1] if found else -1, token))
            if node is None:
                break
            found.append(node)
        return found

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """Some nodes, in the order given. Each one's parent comes before it."""
        places = {-1: -1}
        kept = list(nodes)
        for place, node in enumerate(kept):
            places[node] = place
        return DraftTree(
            tuple(self.token_ids[node] for node in kept),
            tuple(places[self.parents[node]] for node in kept),
        )

    def within(self, num_nodes: int, max_depth: int) -> DraftTree:
        """The first nodes, at most `num_nodes`, that are at most `max_depth` deep."""
        if self.num_nodes <= num_nodes and self.num_nodes <= max_depth:
            return self
        depths = self.depths
        return self.keep([node for node in range(self.num_nodes) if depths[node] <= max_depth][:num_nodes])

    def in_runs(self) -> DraftTree:
        """The same tree in as few runs as can be: each node is followed by its first child."""
        if all(parent == node - 1 for node, parent in enumerate(self.parents)):
            return self
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        order, left = list[int](), children.get(-1, [])[::-1]
        while left:
            node = left.pop()
            order.append(node)
            left += children.get(node, [])[::-1]
        return self.keep(order)


NO_GUESSES = DraftTree()


class Branch(NamedTuple):
    """A run of nodes beside the first run, in a step. K and V of the nodes lie in blocks of their own; so do
    copies of what leads to them, as far as it lies in the same block."""

    nodes: range
    #: Blocks of all tokens that lead to the nodes, and of the nodes.
    block_table: list[int]
    #: Of the step's tokens, the first position whose K and V the branch has to have in a block of its own.
    first_copied: int
