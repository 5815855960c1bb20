"""DraftBlocks: where K and V of drafts lie during a step, and which of them stay. Numbers only.

The first run of a sequence's drafts lies after the sequence's tokens. Each other run goes on from a token in
the middle of what is there, so it has blocks of its own from the block of its first node on, with copies of
what that block holds of the tokens before. So the tokens that lead to a draft lie where they would lie
without any other draft: attention reads the same numbers in the same order, and no kernel knows of trees.
"""

from __future__ import annotations

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.drafting.draft_tree import Branch, DraftTree
from penstock.generation.scheduling.batch import ScheduledSequence
from penstock.generation.sequence import Sequence


class DraftBlocks:
    """Takes no block from any sequence: drafts have what is free."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._manager = block_manager
        self._pool = block_manager.pool
        self._guesses = block_manager.states.guesses
        self._block_size = block_manager.block_size
        #: Blocks of the step's branches.
        self._own: set[int] = set()

    def place(self, item: ScheduledSequence, drafts: DraftTree) -> ScheduledSequence:
        """Add drafts, which are in runs, to what a step computes of a sequence: the first run, and the others
        as long as blocks are free."""
        runs = drafts.runs
        if not runs:
            return item
        sequence, branches = item.sequence, list[Branch]()
        num_nodes = self._extend(sequence, len(runs[0])) if self._guesses.begin_path() else 0
        if num_nodes == len(runs[0]) and sequence.encoder is None:
            for run in runs[1:]:
                has_path = self._guesses.begin_path()
                branch = self._branch(sequence, drafts, run, branches) if has_path else None
                if branch is None:
                    break
                branches.append(branch)
                num_nodes = run.stop
        return item._replace(
            drafts=drafts.keep(range(num_nodes)),
            branches=tuple(branches),
            guess_rows=self._guesses.take(num_nodes),
        )

    def accept(self, item: ScheduledSequence, accepted: list[int]) -> None:
        """These nodes were right, which are a path. The sequence keeps their blocks. What the first run's
        other nodes had becomes free again, but for the block of the next token."""
        sequence = item.sequence
        for branch in item.branches:
            if accepted and accepted[-1] in branch.nodes:
                self._take_over(sequence, branch)
        if item.guess_rows:
            self._guesses.accept(sequence, tuple(item.guess_rows[node] for node in accepted))
        token_ids = tuple(item.drafts.token_ids[node] for node in accepted)
        self._manager.prefix_cache.register_accepted(sequence, token_ids)
        num_blocks = self._manager.blocks_for(sequence.num_tokens + len(accepted) + 1)
        while len(sequence.block_table) > num_blocks:
            self._pool.disown(sequence.block_table.pop())

    def end_step(self) -> None:
        """The blocks of all branches that were not right become free again, and the rows of guesses."""
        self._guesses.end_step()
        for block in sorted(self._own):
            self._pool.disown(block)
        self._own.clear()

    def _extend(self, sequence: Sequence, num_drafts: int) -> int:
        """Blocks for drafts that follow the sequence's tokens, which have blocks. Returns how many drafts
        have room, `num_drafts` at most. A draft overwrites nothing that others see."""
        table, end = sequence.block_table, sequence.num_tokens
        if end % self._block_size and self._pool.num_owners[table[end // self._block_size]] > 1:
            return 0
        num_drafts = min(num_drafts, (len(table) + self._pool.num_free) * self._block_size - end)
        num_blocks = self._manager.blocks_for(end + num_drafts)
        table.extend(self._pool.take() for _ in range(num_blocks - len(table)))
        return num_drafts

    def _branch(
        self, sequence: Sequence, drafts: DraftTree, nodes: range, earlier: list[Branch]
    ) -> Branch | None:
        """Blocks for a run after the first one. Runs between them are `earlier` branches. None if too few
        blocks are free."""
        end = sequence.num_tokens + len(drafts.path(nodes[-1]))
        num_kept = (end - len(nodes)) // self._block_size
        num_new = self._manager.blocks_for(end) - num_kept
        if num_new > self._pool.num_free:
            return None
        parents = (branch.block_table for branch in earlier if drafts.parents[nodes[0]] in branch.nodes)
        table = next(parents, sequence.block_table)[:num_kept]
        first_own = num_kept * self._block_size
        if first_own < sequence.num_computed_tokens:
            table.append(self._manager.copy(sequence.block_table[num_kept]))
        while len(table) < num_kept + num_new:
            table.append(self._pool.take())
        self._own.update(table[num_kept:])
        return Branch(nodes, table, max(first_own, sequence.num_computed_tokens))

    def _take_over(self, sequence: Sequence, branch: Branch) -> None:
        """The sequence goes on in a branch."""
        table = sequence.block_table
        for index, block in enumerate(branch.block_table):
            if index >= len(table):
                table.append(block)
            elif table[index] != block:
                self._pool.disown(table[index])
                table[index] = block
        self._own.difference_update(branch.block_table)
