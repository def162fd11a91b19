"""Copies ahead of need: what nobody has given up yet, and what nobody holds, while it can still be copied at leisure.

    make          while blocks run short, clean copies are made of what will have to go next
    save          a cached block is about to be overwritten: its content goes to the arena, if anybody may want it again

A copy made here belongs to nobody: its slot is cached, so that whoever needs the slot more takes it. It serves the
preemption that comes later, or the request that asks for the same prefix again. What sequences give up and get back is
the business of `swapping`; whose turn it would be to yield is decided by those who ask.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.ids import BlockId, SwapSlotId
from scheduler.core_config import CoreConfig
from scheduler.kv_memory import KvMemory
from scheduler.rates import PrefillRate
from scheduler.sequence import Sequence
from scheduler.swapping import Swapping

#: How often a cached block that is copied before it is overwritten is expected to be wanted again.
_HITS_EXPECTED = 1 / 4
#: The low-water mark of free blocks: a share of the pool, within these bounds. Each plan looks at no more blocks than that.
_LOW_WATER_SHARE = 1 / 16
_LOW_WATER = (4, 64)


class EarlyCopies:
    """Decides what is copied unasked; the pool asks `save` through `memory.on_evict`."""

    def __init__(self, config: CoreConfig, memory: KvMemory, swapping: Swapping, prefill: PrefillRate) -> None:
        self._memory, self._swapping, self._prefill = memory, swapping, prefill
        self._swap, self._transfers = swapping.swap, swapping.transfers
        self._always_saves = config.preemption == "swap"
        self._block_bytes, self._block_size = config.block_bytes, config.block_size
        self._low_water = max(_LOW_WATER[0], min(_LOW_WATER[1], int(config.num_blocks * _LOW_WATER_SHARE)))
        memory.on_evict = self.save

    def make(self, likely_victims: Iterable[Sequence]) -> None:
        """Below the low-water mark of free blocks: copies of the confirmed blocks that will have to go next, within the link's budget.

        Those are the cached ones in the order in which they will be overwritten, then the ends of the sequences
        that may have to yield. Only as many are looked at as the mark asks for, and as half of the slots that are
        to spare, so that copies do not push each other out and an idle engine comes to rest.
        """
        pool = self._memory.pool
        num_looked_at = min(self._low_water - pool.num_free, self._swap.num_spare // 2)
        budget = self._transfers.budget("out")
        if num_looked_at <= 0 or budget <= 0:
            return
        cached = list(pool.oldest_cached(num_looked_at)) if self._is_worth_saving() else []
        for block in cached:
            key = None if pool.is_expendable(block) else pool.index.key_of(block)
            if key is not None and self._swap.index.find(key) is None and budget > 0:
                budget -= self._copy(block, key)
        num_left = num_looked_at - len(cached)
        for sequence in likely_victims:
            if num_left <= 0 or budget <= 0:
                return
            num_seen, num_ordered = self._copy_end_of(sequence, num_left, budget)
            num_left, budget = num_left - num_seen, budget - num_ordered

    def save(self, block: BlockId) -> None:
        """A cached block is about to be overwritten: its content goes to the second level, unless it is there already."""
        pool = self._memory.pool
        if self._swap.total == 0 or pool.is_expendable(block):
            return
        key = pool.index.key_of(block)
        if key is None or self._swap.index.find(key) is not None or not self._is_worth_saving():
            return
        slot = self._cached_slot(key)
        if slot is not None:
            transfer = self._transfers.order_out(block, slot, holds_block=False)
            self._swap.release(slot)
            pool.leave_cached(block, transfer.transfer_id)

    def _copy_end_of(self, sequence: Sequence, num_blocks: int, budget: int) -> tuple[int, int]:
        """Returns how many blocks it could give up were looked at, and how many copies were ordered."""
        num_seen, num_ordered = 0, 0
        for index, group, block in sequence.entries_from_end(sequence.num_computed_tokens // self._block_size):
            if num_seen >= num_blocks or num_ordered >= budget:
                break
            if block < 0 or self._memory.pool.count(block) > 1:
                continue  # in the arena, shared, or being copied
            num_seen += 1
            if self._swapping.copy_of(sequence, index, group) is None:
                num_ordered += self._copy(block, sequence.copy_key(index, group))
        return num_seen, num_ordered

    def _copy(self, block: BlockId, key: bytes) -> int:
        """Returns how many copies were ordered."""
        slot = None if self._memory.pool.was_copied_in_vain(block) else self._cached_slot(key)
        if slot is None:
            return 0
        self._transfers.order_out(block, slot, holds_block=True)
        self._swap.release(slot)  # only the transfer refers to it
        return 1

    def _cached_slot(self, key: bytes) -> SwapSlotId | None:
        if self._swap.num_obtainable == 0:
            return None
        slot = self._swap.allocate()
        self._swap.index.insert(key, slot)
        return slot

    def _is_worth_saving(self) -> bool:
        """Of a long prefix a hit takes a block from each full group, and from windows only the last ones."""
        num_bytes = max(1, self._memory.num_full_groups) * self._block_bytes
        copies_s = self._transfers.rates["out"].seconds(num_bytes) + self._transfers.rates["in"].seconds(num_bytes)
        return self._always_saves or copies_s < _HITS_EXPECTED * self._prefill.seconds(0, self._block_size)
