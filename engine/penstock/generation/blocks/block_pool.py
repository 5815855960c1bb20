"""BlockPool: which KV blocks are free, how many sequences own each, and by which key each is found. Numbers
only; the pool knows no sequences and no tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Has the blocks 0 .. num_blocks - 1. A free block keeps its key until it is taken for other tokens; the
    least recently used free block is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        #: Block -> how many sequences have it in their block_table.
        self.num_owners = [0] * num_blocks
        #: The block to be taken next comes first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        #: Key -> block.
        self._found: dict[bytes, int] = {}
        #: Block -> how often it has lost its key or was taken.
        self._versions = [0] * num_blocks
        #: Block -> its key, and how many tokens the key stands for.
        self._keys: dict[int, tuple[bytes, int]] = {}
        #: Is told of each block that loses its key.
        self.on_drop: Callable[[int], None] = lambda block: None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block for new tokens. The block loses its key."""
        block, _ = self._free.popitem(last=False)
        self.drop_key(block)
        self.num_owners[block] = 1
        return block

    def own(self, block: int) -> None:
        """Add an owner to a block that was found, or that another sequence has."""
        self._free.pop(block, None)
        self.num_owners[block] += 1

    def disown(self, block: int) -> None:
        """Remove an owner. A block that nobody can find is taken before all others."""
        self.num_owners[block] -= 1
        if not self.num_owners[block]:
            self._free[block] = None
            if block not in self._keys:
                self._free.move_to_end(block, last=False)

    def find(self, key: bytes) -> int | None:
        return self._found.get(key)

    def num_keyed_tokens(self, block: int) -> int:
        """Tokens at the block's beginning that its key stands for; 0 if the block has no key. A block without
        a key has several owners only where a sequence went on as several others."""
        return self._keys[block][1] if block in self._keys else 0

    def key_of(self, block: int) -> bytes:
        """The key of a block that has one."""
        return self._keys[block][0]

    def watch(self, block: int) -> Callable[[], bool]:
        """A function that says, on any thread, whether the block still has its key, and was not taken since
        now."""
        version, versions = self._versions[block], self._versions
        return lambda: versions[block] == version

    def set_key(self, block: int, key: bytes, num_tokens: int) -> bool:
        """Let a block be found. False, and nothing is done, if another block has the same key, or if the
        block has several owners: they share what its present key stands for."""
        if key in self._found or self.num_owners[block] != 1:
            return False
        self.drop_key(block)
        self._found[key], self._keys[block] = block, (key, num_tokens)
        return True

    def drop_key(self, block: int) -> None:
        """Nobody finds the block any more."""
        self._versions[block] += 1
        if block in self._keys:
            key, _ = self._keys.pop(block)
            del self._found[key]
            self.on_drop(block)
