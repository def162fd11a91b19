"""A block table: the ordered physical blocks of one sequence in one KV group; NONE where one is not on the device.

In a group whose layers look back no further than a window, the first entries are BEHIND it once nobody can read them
any more: the rest keep their places, so that an index always stands for the same positions.

A packed int32 array, because a worker is sent slices of it as bytes. It holds ids only; who refers to what
is counted by the `BlockPool`, and the two are changed together by the scheduler's `KvMemory`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from pagemill.ids import BEHIND, NONE, BlockId


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold that many positions."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Position p of the sequence lives in block `table[p // block_size]`. Exactly the first `num_behind` entries are BEHIND."""

    __slots__ = ("ids", "num_behind")

    def __init__(self) -> None:
        self.ids = array("i")
        self.num_behind = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> BlockId:
        return BlockId(self.ids[index])

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(block) for block in self.ids)

    def __setitem__(self, index: int, block: int) -> None:
        self.ids[index] = block

    def first_absent(self, start: int = 0) -> int:
        """The index of the first NONE from `start` on, or the length of the table."""
        try:
            return self.ids.index(NONE, start)
        except ValueError:
            return len(self.ids)

    def append(self, block: BlockId) -> None:
        self.ids.append(block)

    def extend(self, blocks: Iterable[BlockId]) -> None:
        self.ids.extend(blocks)

    def packed(self, start: int = 0) -> bytes:
        """The ids from index `start` on, as packed int32."""
        return self.ids[start:].tobytes() if start else self.ids.tobytes()

    def live(self) -> array[int]:
        """A copy of the entries that are not behind."""
        return self.ids[self.num_behind :] if self.num_behind else self.ids[:]

    def leave_behind(self, num_blocks: int) -> list[BlockId]:
        """The first `num_blocks` entries are BEHIND from here on. Returns those that were not, first first."""
        left = self.ids[self.num_behind : num_blocks]
        self.ids[self.num_behind : num_blocks] = array("i", [BEHIND]) * len(left)
        self.num_behind += len(left)
        return [BlockId(block) for block in left]

    def extend_behind(self, num_blocks: int) -> None:
        """Appends so many entries that are behind. Everything before them must be."""
        if self.num_behind != len(self.ids):
            raise ValueError("what follows a live entry cannot be behind")
        self.ids.extend(array("i", [BEHIND]) * num_blocks)
        self.num_behind += num_blocks

    def truncate(self, num_blocks: int) -> list[BlockId]:
        """Keeps the first `num_blocks` and returns the rest but those behind, last first: the order in which they should be reused."""
        removed = [BlockId(block) for block in reversed(self.ids[max(num_blocks, self.num_behind) :])]
        del self.ids[num_blocks:]
        self.num_behind = min(self.num_behind, num_blocks)
        return removed
