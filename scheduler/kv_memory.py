"""KV memory as sequences see it: tables that grow, shrink, and share prefixes.

The one place where block tables and the block pool change together. It knows sequences and their keys, but
neither order nor budgets: who deserves a block is decided by `slices` and `preemption`, which ask here what
there is.

Sharing has two halves. Confirmed blocks (full, every position acknowledged) are in the pool's prefix index
and are adopted by whoever needs the same prefix. Blocks that a running sequence is about to compute are
announced in `_computing`, so that one behind it in the order waits for them instead of computing them too.
"""

from __future__ import annotations

from kvstore.block_pool import BlockPool
from kvstore.block_table import blocks_for
from pagemill.messages import NO_PLAN, BlockId, PlanId
from scheduler.sequence import Sequence


class KvMemory:
    """Owns the pool. All tables of all sequences grow and shrink here, the tables of one sequence in step."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_groups = num_groups
        self.num_query_tokens = 0  #: prompt tokens looked up in the prefix index
        self.num_hit_tokens = 0  #: of these, found
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
        hits = [block for run in self._hits(sequence) for block in run]
        missing = self.blocks_for(sequence.num_tokens) - sequence.num_table_blocks - len(hits)
        return missing + sum(self.pool.is_cached(block) for block in hits)

    def num_blocks_gained(self, victims: list[Sequence], needy: Sequence) -> int:
        """What preempting them all would make obtainable for `needy`, at least.

        A block that others refer to frees nothing, and one that `needy` would adopt is not free for it.
        """
        adopted = {block for run in self._hits(needy) for block in run}
        held = (block for victim in victims for table in victim.tables for block in table)
        return sum(self.pool.count(block) == 1 and block not in adopted for block in held)

    def is_being_computed_ahead(self, sequence: Sequence) -> bool:
        """Whether a running sequence ahead of this one is about to compute its next block."""
        if not sequence.is_cacheable or sequence.num_computed_tokens % self.block_size:
            return False
        next_block = sequence.num_computed_tokens // self.block_size + len(self._hits(sequence)[0])
        if next_block >= self._num_sharable_blocks(sequence):
            return False
        holder = self._computing.get(sequence.block_key(next_block))
        return holder is not None and holder is not sequence and holder.order < sequence.order

    # --- growing ---------------------------------------------------------------------------------------

    def adopt_prefix(self, sequence: Sequence) -> int:
        """Takes over confirmed blocks behind what is computed. Returns how many positions that saved."""
        runs = self._hits(sequence)
        for table, run in zip(sequence.tables, runs, strict=True):
            for block in run:
                self.pool.reference(block)
            table.extend(run)
        num_tokens = len(runs[0]) * self.block_size
        sequence.num_computed_tokens += num_tokens
        sequence.num_highest_computed = max(sequence.num_highest_computed, sequence.num_computed_tokens)
        if sequence.num_preemptions == 0 and num_tokens:
            num_prompt = min(sequence.num_computed_tokens, sequence.num_prompt_tokens) - sequence.num_cached_tokens
            cached = min(num_tokens, max(0, num_prompt))
            sequence.num_cached_tokens += cached
            self.num_hit_tokens += cached
        return num_tokens

    def announce(self, sequence: Sequence) -> None:
        """Tells those behind which blocks the sequence, now running, is going to compute."""
        if not sequence.is_cacheable:
            return
        first = sequence.num_computed_tokens // self.block_size
        last = self._num_sharable_blocks(sequence)
        if first >= last or self._computing.get(sequence.block_key(first)) is sequence:
            return
        for block in range(first, last):
            self._computing.setdefault(sequence.block_key(block), sequence)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lets the tables hold `num_tokens` positions. False, and no change, if the pool cannot give that now."""
        missing = self.blocks_for(num_tokens) - sequence.num_table_blocks
        if missing > self.pool.num_obtainable:
            return False
        for table in sequence.tables:
            for _ in range(blocks_for(num_tokens, self.block_size) - len(table)):
                table.append(self.pool.allocate())
        return True

    def confirm(self, sequence: Sequence, num_computed_before: int) -> None:
        """Indexes the blocks that have become full and acknowledged since `num_computed_before`."""
        first, last = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        if first == last or not sequence.is_cacheable:
            return
        for block_index in range(first, last):
            key = sequence.block_key(block_index)
            for group, table in enumerate(sequence.tables):
                self.pool.index.insert(_in_group(key, group), table[block_index])
            if self._computing.get(key) is sequence:
                del self._computing[key]

    # --- shrinking -------------------------------------------------------------------------------------

    def release(self, sequence: Sequence, fence: PlanId) -> None:
        """Takes all blocks away, tail first, so that the head of a prefix is evicted last."""
        self.shrink(sequence, 0, fence)
        if sequence.is_cacheable:
            for block in range(len(sequence.keys)):
                if self._computing.get(sequence.keys[block]) is sequence:
                    del self._computing[sequence.keys[block]]

    def shrink(self, sequence: Sequence, num_tokens: int, fence: PlanId = NO_PLAN) -> None:
        """Keeps the blocks of the first `num_tokens` positions."""
        for table in sequence.tables:
            for block in table.truncate(blocks_for(num_tokens, self.block_size)):
                self.pool.release(block, fence)

    # --- for invariants --------------------------------------------------------------------------------

    def announced(self) -> dict[bytes, Sequence]:
        """A copy of what is announced."""
        return dict(self._computing)

    def _num_sharable_blocks(self, sequence: Sequence) -> int:
        """A hit leaves at least the last token to compute: its logits are needed."""
        return (sequence.num_tokens - 1) // self.block_size

    def _hits(self, sequence: Sequence) -> list[list[BlockId]]:
        """Confirmed blocks that continue what is computed: a run for each group, all equally long."""
        nothing: list[list[BlockId]] = [[] for _ in range(self.num_groups)]
        first = sequence.num_computed_tokens // self.block_size
        if not sequence.is_cacheable or sequence.num_computed_tokens % self.block_size:
            return nothing
        if sequence.num_planned_tokens or any(len(table) != first for table in sequence.tables):
            return nothing
        last = self._num_sharable_blocks(sequence)
        if first >= last:
            return nothing
        sequence.block_key(last - 1)
        keys = sequence.keys[first:last]
        runs = [self.pool.index.find_run(keys if group == 0 else [_in_group(key, group) for key in keys]) for group in range(self.num_groups)]
        length = min(len(run) for run in runs)
        return [run[:length] for run in runs]


def _in_group(key: bytes, group: int) -> bytes:
    """The same prefix has one block in each KV group."""
    return key if group == 0 else key + group.to_bytes(2, "little")
