"""KV memory as sequences see it: tables that grow, shrink, and share prefixes.

Here, and for what moves to and from the arena in `swapping`, block tables and the block pool change together.
It knows sequences and their keys, but neither order nor budgets: who deserves a block is decided by `slices`
and `preemption`, which ask here what there is.

Sharing has two halves. Confirmed blocks (full, every position acknowledged) are in the pool's prefix index
and are adopted by whoever needs the same prefix. Blocks that a running sequence is about to compute are
announced in `_computing`, so that one behind it in the order waits for them instead of computing them too.

References are strong while a sequence runs and weak while it does not; `loosen` and `tighten` change all at once.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block_pool import BlockPool
from kvstore.block_table import blocks_for
from pagemill.messages import NO_PLAN, NONE, BlockId, PlanId
from scheduler.sequence import Sequence, in_group


class KvMemory:
    """Owns the pool. The tables of one sequence grow and shrink in step."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_groups = num_groups
        self.num_query_tokens = 0  #: prompt tokens looked up in the prefix index
        self.num_hit_tokens = 0  #: of these, found
        #: Told of a cached block before it is overwritten (saves it), and of a leaving one before a forward overwrites it.
        self.on_evict: Callable[[BlockId], None] = lambda block: None
        self.on_overwrite: Callable[[int], None] = lambda transfer_id: None
        #: Key of a block not yet confirmed -> the running sequence that will compute it.
        self._computing: dict[bytes, Sequence] = {}

    # --- what there is ---------------------------------------------------------------------------------

    def capacity_tokens(self) -> int:
        """The longest sequence that fits into an otherwise empty pool."""
        return self.pool.num_blocks // self.num_groups * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks over all groups that hold that many positions of one sequence."""
        return blocks_for(num_tokens, self.block_size) * self.num_groups

    def num_needed_blocks(self, sequence: Sequence) -> int:
        """What holding all its known tokens would take out of what is obtainable.

        Blocks it would allocate, and cached ones it would adopt; a hit that somebody refers to costs nothing.
        """
        missing = self.blocks_for(sequence.num_tokens) - sequence.num_device_blocks
        return missing - sum(self.pool.count(block) > 0 for block in self.adoptable(sequence))

    def adoptable(self, sequence: Sequence) -> list[BlockId]:
        """Confirmed blocks that continue what the sequence has, over all groups."""
        return [block for run in self._hits(sequence) for block in run]

    def is_being_computed_ahead(self, sequence: Sequence) -> bool:
        """Whether a running sequence ahead of this one is about to compute its next block."""
        if not sequence.is_cacheable or sequence.num_computed_tokens % self.block_size:
            return False
        next_block = sequence.num_computed_tokens // self.block_size + len(self._hits(sequence)[0])
        if next_block >= self.num_sharable_blocks(sequence):
            return False
        holder = self._computing.get(sequence.block_key(next_block))
        return holder is not None and holder is not sequence and holder.order < sequence.order

    def num_sharable_blocks(self, sequence: Sequence) -> int:
        """A hit leaves at least the last token to compute: its logits are needed."""
        return (sequence.num_tokens - 1) // self.block_size

    # --- growing ---------------------------------------------------------------------------------------

    def adopt_prefix(self, sequence: Sequence) -> int:
        """Takes over confirmed blocks behind what is computed. Returns how many positions that saved."""
        runs = self._hits(sequence)
        for table, run in zip(sequence.tables, runs, strict=True):
            for block in run:
                self.refer(sequence, block)
            table.extend(run)
        num_tokens = len(runs[0]) * self.block_size
        self.num_hit_tokens += self.count_cached(sequence, num_tokens)
        return num_tokens

    def count_cached(self, sequence: Sequence, num_tokens: int) -> int:
        """The next `num_tokens` positions are computed without work. Returns how many of them are a gift to its prompt."""
        sequence.num_computed_tokens += num_tokens
        sequence.num_highest_computed = max(sequence.num_highest_computed, sequence.num_computed_tokens)
        if sequence.num_preemptions:
            return 0
        num_prompt = min(sequence.num_computed_tokens, sequence.num_prompt_tokens) - sequence.num_cached_tokens
        cached = min(num_tokens, max(0, num_prompt))
        sequence.num_cached_tokens += cached
        return cached

    def announce(self, sequence: Sequence) -> None:
        """Tells those behind which blocks the sequence, now running, is going to compute."""
        if not sequence.is_cacheable:
            return
        first = sequence.num_computed_tokens // self.block_size
        last = self.num_sharable_blocks(sequence)
        if first >= last or self._computing.get(sequence.block_key(first)) is sequence:
            return
        for block in range(first, last):
            self._computing.setdefault(sequence.block_key(block), sequence)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lets the tables of a running sequence hold `num_tokens` positions. False, and no change, if the pool cannot give that now."""
        missing = self.blocks_for(num_tokens) - sequence.num_table_blocks
        if missing > self.pool.num_obtainable:
            return False
        for table in sequence.tables:
            for _ in range(blocks_for(num_tokens, self.block_size) - len(table)):
                table.append(self.allocate(overwrites=True))
        return True

    def allocate(self, *, overwrites: bool) -> BlockId:
        """A block with one strong reference. `overwrites`: the plan being built writes to it, not a transfer."""
        pool = self.pool
        if pool.num_free == 0:
            if pool.num_leaving == 0 and (oldest := next(pool.oldest_cached(1), None)) is not None:
                self.on_evict(oldest)
            if (taken := pool.take_leaving()) is not None:
                block, transfer_id = taken
                if overwrites:
                    self.on_overwrite(transfer_id)
                return block
        return pool.allocate()

    def confirm(self, sequence: Sequence, num_computed_before: int) -> None:
        """Indexes the blocks that have become full and acknowledged since `num_computed_before`."""
        first, last = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        if first == last or not sequence.is_cacheable:
            return
        for block_index in range(first, last):
            key = sequence.block_key(block_index)
            for group, table in enumerate(sequence.tables):
                if table[block_index] != NONE:
                    self.pool.index.insert(in_group(key, group), table[block_index])
            if self._computing.get(key) is sequence:
                del self._computing[key]

    # --- references ------------------------------------------------------------------------------------

    def refer(self, sequence: Sequence, block: BlockId) -> None:
        """One more reference for the sequence, as weak or strong as its others."""
        self.pool.reference(block)
        if sequence.holds_weakly:
            self.pool.weaken(block)

    def give_back(self, sequence: Sequence, block: BlockId, fence: PlanId = NO_PLAN) -> None:
        """One reference of the sequence less."""
        if sequence.holds_weakly:
            self.pool.strengthen(block)
        self.pool.release(block, fence)

    def loosen(self, sequence: Sequence) -> None:
        """The sequence stops running: others may take what it holds. Blocks beyond what is computed or planned go back at once."""
        self.shrink(sequence, sequence.num_computed_tokens + sequence.num_planned_tokens, sequence.planned_in)
        self._withdraw(sequence)
        sequence.holds_weakly = True
        for table in sequence.tables:
            for block in table:
                self.pool.weaken(block)

    def tighten(self, sequence: Sequence) -> None:
        """The sequence runs, with all its blocks on the device."""
        sequence.holds_weakly = False
        for table in sequence.tables:
            for block in table:
                self.pool.strengthen(block)

    # --- shrinking -------------------------------------------------------------------------------------

    def release(self, sequence: Sequence, fence: PlanId) -> None:
        """Takes all blocks away, tail first, so that the head of a prefix is evicted last."""
        self.shrink(sequence, 0, fence)
        self._withdraw(sequence)

    def shrink(self, sequence: Sequence, num_tokens: int, fence: PlanId = NO_PLAN) -> None:
        """Keeps the entries of the first `num_tokens` positions."""
        for table in sequence.tables:
            for block in table.truncate(blocks_for(num_tokens, self.block_size)):
                if block == NONE:
                    sequence.num_absent -= 1
                else:
                    self.give_back(sequence, block, fence)

    # --- for invariants --------------------------------------------------------------------------------

    def announced(self) -> dict[bytes, Sequence]:
        """A copy of what is announced."""
        return dict(self._computing)

    def _withdraw(self, sequence: Sequence) -> None:
        """Those behind need not wait for it any more."""
        if sequence.is_cacheable:
            for key in sequence.keys:
                if self._computing.get(key) is sequence:
                    del self._computing[key]

    def _hits(self, sequence: Sequence) -> list[list[BlockId]]:
        """Confirmed blocks that continue what is computed: a run for each group, all equally long."""
        nothing: list[list[BlockId]] = [[] for _ in range(self.num_groups)]
        first = sequence.num_computed_tokens // self.block_size
        if not sequence.is_cacheable or sequence.num_computed_tokens % self.block_size:
            return nothing
        if sequence.num_planned_tokens or any(len(table) != first for table in sequence.tables):
            return nothing
        last = self.num_sharable_blocks(sequence)
        if first >= last:
            return nothing
        sequence.block_key(last - 1)
        keys = sequence.keys[first:last]
        runs = [self.pool.index.find_run(keys if group == 0 else [in_group(key, group) for key in keys]) for group in range(self.num_groups)]
        length = min(len(run) for run in runs)
        return [run[:length] for run in runs]
