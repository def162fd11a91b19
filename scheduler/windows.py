"""Windows of KV groups, as arithmetic over the tables of one sequence: what they have passed, and which way leads back.

In groups with a window the entries that no position can read any more are behind it, all but those that the end of the
last full block looks back to: that is where a hit on this prefix continues, and where a sequence that gives up its last
blocks goes back to. Groups with equal windows are equally far. This file looks at tables and changes none; `kv_memory`
does, together with the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequences

from kvstore.block_table import blocks_for
from pagemill.ids import BlockId
from pagemill.kv_groups import first_live_block
from pagemill.messages.sequences import KvGroup
from scheduler.sequence import Sequence

#: More positions than any sequence has.
ENDLESS = 1 << 62


class Windows:
    """Of all groups, of which some or none may have one."""

    def __init__(self, groups: Sequences[KvGroup], block_size: int) -> None:
        self._block_size = block_size
        #: The groups that have the same window.
        self._numbers: dict[KvGroup, list[int]] = {}
        for number, group in enumerate(groups):
            if group.window:
                self._numbers.setdefault(group, []).append(number)
        #: How far windows reach back from a border of blocks, in blocks, and how many groups do.
        self._reaches = [(blocks_for(group.window - 1, block_size), len(numbers)) for group, numbers in self._numbers.items()]

    def num_held(self, num_blocks: int, chunk: int) -> int:
        """Blocks over these groups that a sequence of `num_blocks` entries holds at most, if the last `chunk` positions are computed at once."""
        just_computed = blocks_for(self._block_size - 1 + chunk, self._block_size)
        return sum(num_groups * min(num_blocks, reach + just_computed) for reach, num_groups in self._reaches)

    def passed(self, sequence: Sequence, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Groups in which entries have come to lie behind the window when `num_tokens` positions are computed, and how many lie there then."""
        border = num_tokens // self._block_size * self._block_size
        for group, numbers in self._numbers.items():
            num_behind = first_live_block(group, border, self._block_size)
            for number in numbers:
                if num_behind > sequence.tables[number].num_behind:
                    yield number, num_behind

    def passes_next_at(self, num_tokens: int) -> int:
        """How many positions must be computed before further entries can lie behind a window.

        Every further block leaves one behind, once the window does not reach back to the first any more.
        """
        size = self._block_size
        return min(((max(num_tokens // size, reach) + 1) * size for reach, _ in self._reaches), default=ENDLESS)

    def way_back(self, sequence: Sequence, num_tokens: int) -> int:
        """How many positions the sequence can go back to, at most `num_tokens`: where the windows are gone, none is left."""
        for group, numbers in self._numbers.items():
            if sequence.tables[numbers[0]].num_behind > first_live_block(group, num_tokens, self._block_size):
                return 0
        return num_tokens

    def read_by_plans_only(self, sequence: Sequence) -> Iterator[BlockId]:
        """Blocks that what is in flight reads, and nothing that comes after it."""
        border = (sequence.num_computed_tokens + sequence.num_planned_tokens) // self._block_size * self._block_size
        for group, numbers in self._numbers.items():
            first_live = first_live_block(group, border, self._block_size)
            for table in (sequence.tables[number] for number in numbers):
                yield from (BlockId(block) for block in table.ids[table.num_behind : first_live])

    def num_dead_blocks(self, sequence: Sequence) -> int:
        """Blocks it holds on the device that none of its positions to come reads."""
        num_dead = 0
        for group, numbers in self._numbers.items():
            first_live = first_live_block(group, sequence.num_computed_tokens, self._block_size)
            for table in (sequence.tables[number] for number in numbers):
                if first_live > table.num_behind:
                    num_dead += sum(block >= 0 for block in table.ids[table.num_behind : first_live])
        return num_dead
