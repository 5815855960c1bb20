"""Drafters of tests: one knows the answer, or is right for a while; one guesses at random; one hides the
answer in a tree."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List

from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.sequence import Sequence


class Oracle(Drafter):
    """Knows what follows each seed and prompt: of `length` guesses so many are right."""

    def __init__(
        self,
        answers: Mapping[tuple[int | None, ...], list[int]],
        length: int,
        num_right: int = 1000,
        vocab_size: int = 278,
    ) -> None:
        self.answers, self.vocab_size = answers, vocab_size
        self.length, self.num_right = length, num_right
        self.num_proposed = 0

    def propose(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> dict[Sequence, DraftTree]:
        found = {sequence: DraftTree.chain(self.guess(sequence)) for sequence in sequences}
        self.num_proposed += sum(tree.num_nodes for tree in found.values())
        return found

    def guess(self, sequence: Sequence) -> list[int]:
        answer = self.answers.get((sequence.params.seed, *sequence.request.prompt_token_ids), [])
        done = sequence.num_output_tokens
        right = answer[done : done + self.length]
        return [
            token if index < self.num_right else (token + 1) % self.vocab_size
            for index, token in enumerate(right)
        ]


class Dice(Drafter):
    """Random tokens, for random sequences, often more than have room; now and then what an oracle says."""

    def __init__(self, oracle: Oracle) -> None:
        self.dice, self.oracle, self.vocab_size = random.Random(0), oracle, oracle.vocab_size

    def propose(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> dict[Sequence, DraftTree]:
        asked = (sequence for sequence in sequences if self.dice.random() < 0.8)
        return {sequence: self.tree(self.guess(sequence)) for sequence in asked}

    def tree(self, guess: list[int]) -> DraftTree:
        return DraftTree.chain(guess)

    def guess(self, sequence: Sequence) -> list[int]:
        self.oracle.num_right = self.dice.randrange(9)
        some = self.oracle.guess(sequence)
        return some + [self.dice.randrange(self.vocab_size) for _ in range(self.dice.choice((0, 1, 5, 200)))]


class Forest(Dice):
    """Trees of random shape, in which the right tokens lie somewhere. No two children of a node have the same
    token."""

    #: How often the right tokens lay beside the first run of nodes.
    num_branches = 0

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        self.num_branches += bool(right) and right[-1] not in drafts.runs[0]

    def tree(self, guess: list[int]) -> DraftTree:
        token_ids, parents, right = list[int](), list[int](), [-1]
        children = set[tuple[int, int]]()
        right_ids = iter(guess[: self.dice.randrange(1, 9)])
        for _ in range(self.dice.choice((3, 12, 40))):
            parent, token = self.dice.randrange(-1, len(token_ids)), self.dice.randrange(self.vocab_size)
            if self.dice.random() < 0.5:  # mostly beside the right path
                parent = self.dice.choice(right)
            is_right = self.dice.random() < 0.4
            if is_right:
                parent, token = right[-1], next(right_ids, token)
            if (parent, token) not in children:
                children.add((parent, token))
                if is_right:
                    right.append(len(token_ids))
                token_ids.append(token)
                parents.append(parent)
        return DraftTree(tuple(token_ids), tuple(parents))
