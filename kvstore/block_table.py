"""A block table: the ordered physical blocks of one sequence in one KV group; NONE where one is not on the device.

A packed int32 array, because a worker is sent slices of it as bytes. It holds ids only; who refers to what
is counted by the `BlockPool`, and the two are changed together by the scheduler's `KvMemory`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from pagemill.messages import NONE, BlockId


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold that many positions."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Position p of the sequence lives in block `table[p // block_size]`."""

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids = array("i")

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

    def truncate(self, num_blocks: int) -> list[BlockId]:
        """Keeps the first `num_blocks` and returns the rest, last first: the order in which they should be reused."""
        removed = [BlockId(block) for block in reversed(self.ids[num_blocks:])]
        del self.ids[num_blocks:]
        return removed
