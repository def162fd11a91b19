"""The block pool: ids, reference counts, and the order in which unreferenced blocks are reused.

Pure accounting: no bytes, no tokens, no clock. Every block is in exactly one of four places:

    free        nobody refers to it and no key names it
    cached      nobody refers to it, but the prefix index still names it; least recently released first
    fenced      nobody refers to it, but a plan in flight may still read or write it
    referenced  its count says by how many block tables

    allocate: free, else the oldest cached        release: referenced -> (fenced ->) cached or free
    reference: cached or fenced -> referenced     acknowledge: fenced -> cached or free

In the words of the metrics, free + cached + used = total, where used counts the fenced too.
"""

from __future__ import annotations

from kvstore.prefix_index import PrefixIndex
from pagemill.messages import NO_PLAN, BlockId, PlanId


class OutOfBlocks(Exception):
    """Nothing is free or cached. Callers ask `num_obtainable` first, so this is a fault of theirs."""


class BlockPool:
    """Owns the ids 0 to num_blocks - 1 and the prefix index over them. Mutated by the scheduler core only."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._counts = [0] * num_blocks
        #: Used as a stack: the block freed last is the likeliest to be warm in a cache.
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        #: Insertion order is eviction order.
        self._cached: dict[BlockId, None] = {}
        #: Unreferenced, waiting for the acknowledgement of this plan.
        self._fenced: dict[BlockId, PlanId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_obtainable(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def count(self, block: BlockId) -> int:
        """How many block tables refer to the block."""
        return self._counts[block]

    def is_cached(self, block: BlockId) -> bool:
        return block in self._cached

    def allocate(self) -> BlockId:
        """A block with one reference and no key: a free one, else the least recently released cached one."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = next(iter(self._cached))
            del self._cached[block]
            self.index.remove(block)
        else:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        self._counts[block] = 1
        return block

    def reference(self, block: BlockId) -> None:
        """One more table refers to a block that the index named: a prefix hit."""
        if self._counts[block] == 0:
            if block in self._cached:
                del self._cached[block]
            elif block in self._fenced:
                del self._fenced[block]
            else:
                raise ValueError(f"block {block} is free: nothing can refer to it")
        self._counts[block] += 1

    def release(self, block: BlockId, fence: PlanId = NO_PLAN) -> None:
        """One table less. The last one leaves the block cached or free, once plan `fence` is acknowledged."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} released twice")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if fence == NO_PLAN:
                self._settle(block)
            else:
                self._fenced[block] = fence

    def acknowledge(self, plan: PlanId) -> None:
        """Lifts the fences of this plan and of all before it."""
        if self._fenced:
            for block in [block for block, fence in self._fenced.items() if fence <= plan]:
                del self._fenced[block]
                self._settle(block)

    def places(self) -> list[str]:
        """The place of every block, re-derived from the containers. Raises ValueError if one is in none or in two."""
        places: list[str] = ["referenced" if count else "" for count in self._counts]
        for name, blocks in (("free", self._free), ("cached", list(self._cached)), ("fenced", list(self._fenced))):
            for block in blocks:
                if places[block]:
                    raise ValueError(f"block {block} is {places[block]} and {name}")
                places[block] = name
        if "" in places:
            raise ValueError(f"block {places.index('')} is nowhere")
        return places

    def _settle(self, block: BlockId) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)
