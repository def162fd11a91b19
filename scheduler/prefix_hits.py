"""The longest prefix that is at hand in all KV groups: what a sequence may take over instead of computing it.

    full groups      every block of it
    window groups    the blocks that the position after it looks back to; whatever lies before those is behind the window

So a longer prefix may be at hand where a shorter one is not, and the search goes from the longest down. It asks
`Places` where a block is, and takes nothing over itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstore.prefix_index import PrefixIndex
from pagemill.ids import NONE, BlockId, SwapSlotId
from pagemill.kv_groups import first_live_block
from pagemill.messages.sequences import KvGroup
from scheduler.sequence import Sequence, in_group

Place = TypeVar("Place")


class Places(Protocol[Place]):
    """Where the blocks of one prefix are, by block index and group."""

    def find(self, index: int, group: int) -> Place | None: ...

    def find_run(self, first: int, last: int, group: int) -> list[Place]:
        """From `first` on, up to `last` or the first block that is nowhere."""
        ...


class Hit(NamedTuple, Generic[Place]):
    """`num_blocks` more blocks in every group. A run has the last ones of them; those that it lacks are behind the window."""

    num_blocks: int
    runs: list[list[Place]]


def longest_hit(groups: Sequences[KvGroup], places: Places[Place], first: int, last: int, block_size: int) -> Hit[Place]:
    """The most blocks from index `first` on, `last` excluded, with which a sequence that has all before them can go on."""
    runs: list[list[Place]] = [[] for _ in groups]
    windows: list[int] = []
    for number, group in enumerate(groups):
        if group.window:
            windows.append(number)
        elif first < last:
            runs[number] = places.find_run(first, last, number)
            last = first + len(runs[number])
    found: dict[int, dict[int, Place]] = {number: {} for number in windows}
    while windows and first < last:
        miss = _find_windows(groups, places, windows, found, first, last, block_size)
        if miss is None:
            break
        last = miss
    for number, group in enumerate(groups):
        if group.window:
            start = max(first, first_live_block(group, last * block_size, block_size))
            runs[number] = [found[number][index] for index in range(start, last)]
        elif len(runs[number]) > last - first:
            del runs[number][last - first :]
    return Hit(last - first, runs)


def _find_windows(
    groups: Sequences[KvGroup], places: Places[Place], windows: list[int], found: dict[int, dict[int, Place]], first: int, last: int, block_size: int
) -> int | None:
    """Adds what the windows that end with block `last` need to `found`, or returns the index of a block that is nowhere.

    No window across that one will do. So the farthest is asked for first, and the group that lacked one is the first to be
    asked the next time: where nothing is at hand, each question rules out a whole window.
    """
    for turn, number in enumerate(windows):
        known = found[number]
        start = max(first, first_live_block(groups[number], last * block_size, block_size))
        for index in range(start, last):
            if index in known:
                continue
            place = places.find(index, number)
            if place is None:
                windows.insert(0, windows.pop(turn))
                return index
            known[index] = place
    return None


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Blocks of a prefix that are in the pool; `keys` names the first ones."""

    index: PrefixIndex[BlockId]
    keys: list[bytes]

    def find(self, index: int, group: int) -> BlockId | None:
        return self.index.find(in_group(self.keys[index], group))

    def find_run(self, first: int, last: int, group: int) -> list[BlockId]:
        keys = self.keys[first:last]
        return self.index.find_run(keys if group == 0 else [in_group(key, group) for key in keys])


@dataclass(frozen=True, slots=True)
class OnBothTiers:
    """Blocks of a sequence's prefix in the pool or the arena: each a block, or else NONE and the slot that has a copy."""

    blocks: PrefixIndex[BlockId]
    slots: PrefixIndex[SwapSlotId]
    sequence: Sequence

    def find(self, index: int, group: int) -> tuple[BlockId, SwapSlotId] | None:
        key = self.sequence.copy_key(index, group)
        block = self.blocks.find(key)
        if block is not None:
            return block, SwapSlotId(NONE)
        slot = self.slots.find(key)
        return None if slot is None else (BlockId(NONE), slot)

    def find_run(self, first: int, last: int, group: int) -> list[tuple[BlockId, SwapSlotId]]:
        run: list[tuple[BlockId, SwapSlotId]] = []
        for index in range(first, last):
            place = self.find(index, group)
            if place is None:
                break
            run.append(place)
        return run
