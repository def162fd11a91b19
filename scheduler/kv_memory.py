"""KV memory as sequences see it: tables that grow, shrink, and share prefixes.

Here, and for what moves to and from the arena in `swapping`, block tables and the block pool change together.
It knows sequences and their keys, but neither order nor budgets: who deserves a block is decided by `slices`
and `preemption`, which ask here what there is.

All tables of a sequence are equally long. What `windows` says nobody can read any more is given back at once.

Sharing has two halves. Confirmed blocks (full, every position acknowledged) are in the pool's prefix index
and are adopted by whoever needs the same prefix. Blocks that a running sequence is about to compute are
announced in `_computing`, so that one behind it in the order waits for them instead of computing them too.

References are strong while a sequence runs and weak while it does not; `loosen` and `tighten` change all at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences

from kvstore.block_pool import BlockPool
from kvstore.block_table import blocks_for
from pagemill.ids import NO_PLAN, NONE, BlockId, PlanId, SeqId
from pagemill.messages.sequences import KvGroup
from scheduler.prefix_hits import Hit, OnDevice, Place, longest_hit
from scheduler.sequence import Sequence, in_group
from scheduler.windows import ENDLESS, Windows

#: More blocks than any pool has.
_MANY_BLOCKS = 1 << 40


class KvMemory:
    """Owns the pool. The tables of one sequence grow and shrink in step."""

    def __init__(self, num_blocks: int, block_size: int, groups: Sequences[KvGroup], max_chunk: int) -> None:
        """`max_chunk`: positions of one sequence that a step computes at most."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_groups = len(groups)
        self.num_full_groups = sum(not group.window for group in groups)
        self.windows = Windows(groups, block_size)
        self._max_chunk = max_chunk
        self._capacity_tokens = self._count_capacity()
        self._nothing: Hit[BlockId] = Hit(0, [[] for _ in groups])
        #: One turn asks for the same hit several times.
        self._last_asked: tuple[int, ...] = ()
        self._last_hit = self._nothing
        self.num_query_tokens = 0  #: prompt tokens looked up in the prefix index
        self.num_hit_tokens = 0  #: of these, found
        #: Told of a cached block before it is overwritten (saves it), and of a leaving one before a forward overwrites it.
        self.on_evict: Callable[[BlockId], None] = lambda block: None
        self.on_overwrite: Callable[[int], None] = lambda transfer_id: None
        #: Told that in this group all entries before this one are behind the window, wherever they were.
        self.on_behind: Callable[[Sequence, int, int], None] = lambda sequence, group, num_behind: None
        #: Key of a block not yet confirmed -> the running sequence that will compute it.
        self._computing: dict[bytes, Sequence] = {}
        #: Sequences that do not run and have held blocks since they do not; most of those that wait never do.
        self._loose: dict[SeqId, Sequence] = {}

    # --- what there is ---------------------------------------------------------------------------------

    def capacity_tokens(self) -> int:
        """The longest sequence that fits into an otherwise empty pool, computed in chunks as small as need be."""
        return self._capacity_tokens

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks over all groups that a sequence of that many positions holds at most, if the last `chunk` are computed at once."""
        whole = blocks_for(num_tokens, self.block_size)
        return whole * self.num_full_groups + self.windows.num_held(whole, chunk)

    def num_awaited_blocks(self, sequence: Sequence, num_more: int = 0, *, frugal: bool = False) -> int:
        """Blocks over all groups that it holds at most on its way to all its known tokens and `num_more`.

        Windows need room for what is computed at once; `frugal`: in chunks as small as need be.
        """
        num_left = max(1, sequence.num_tokens - sequence.num_computed_tokens)
        return self.blocks_for(sequence.num_tokens + num_more, 1 if frugal else min(num_left, self._max_chunk))

    def num_needed_blocks(self, sequence: Sequence, *, frugal: bool) -> int:
        """What holding all its known tokens would take out of what is obtainable.

        Blocks it would allocate, and cached ones it would adopt; a hit that somebody refers to costs nothing.
        """
        missing = self.num_awaited_blocks(sequence, frugal=frugal) - sequence.num_device_blocks
        return missing - sum(self.pool.count(block) > 0 for block in self.adoptable(sequence))

    def num_cached_hits(self, sequence: Sequence) -> int:
        """Blocks it would adopt to which nobody refers, so that they are obtainable until it does."""
        return sum(self.pool.count(block) == 0 for block in self.adoptable(sequence))

    def num_coming_back(self, running: Iterable[Sequence]) -> int:
        """Blocks that plans in flight keep from being used again: behind their fences, or read by what they compute and not by what comes after."""
        count = self.pool.count
        return self.pool.num_behind_plans + sum(count(block) == 1 for sequence in running for block in self.windows.read_by_plans_only(sequence))

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that its tables lack to hold `num_tokens` positions."""
        return (blocks_for(num_tokens, self.block_size) - len(sequence.tables[0])) * self.num_groups

    def adoptable(self, sequence: Sequence) -> list[BlockId]:
        """Confirmed blocks that continue what the sequence has, over all groups."""
        return [block for run in self._hits(sequence).runs for block in run]

    def is_being_computed_ahead(self, sequence: Sequence) -> bool:
        """Whether a running sequence ahead of this one is about to compute its next block."""
        if not sequence.is_cacheable or sequence.num_computed_tokens % self.block_size:
            return False
        next_block = sequence.num_computed_tokens // self.block_size + self._hits(sequence).num_blocks
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
        hit = self._hits(sequence)
        if not hit.num_blocks:
            return 0
        self.make_way(sequence, hit)
        for table, run in zip(sequence.tables, hit.runs, strict=True):
            for block in run:
                self.refer(sequence, block)
            table.extend(run)
        cached = self.count_cached(sequence, hit.num_blocks * self.block_size)
        self.num_hit_tokens += cached
        return hit.num_blocks * self.block_size

    def make_way(self, sequence: Sequence, hit: Hit[Place]) -> None:
        """The hit is going to continue the tables: what its windows do not reach back to is behind them, and nobody need wait for it to compute that."""
        first, end = len(sequence.tables[0]), len(sequence.tables[0]) + hit.num_blocks
        self._withdraw(sequence, first, end)
        self.leave_behind(sequence, end * self.block_size)
        for table, run in zip(sequence.tables, hit.runs, strict=True):
            if len(run) < hit.num_blocks:
                table.extend_behind(hit.num_blocks - len(run))
                sequence.num_behind += hit.num_blocks - len(run)
        sequence.num_found_blocks = end

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
        num_more = blocks_for(num_tokens, self.block_size) - len(sequence.tables[0])
        if num_more * self.num_groups > self.pool.num_obtainable:
            return False
        for table in sequence.tables:
            for _ in range(num_more):
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
                if table[block_index] >= 0:
                    self.pool.index.insert(in_group(key, group), table[block_index])
        self._withdraw(sequence, first, last)

    # --- references ------------------------------------------------------------------------------------

    def refer(self, sequence: Sequence, block: BlockId) -> None:
        """One more reference for the sequence, as weak or strong as its others."""
        self.pool.reference(block)
        if sequence.holds_weakly:
            self._weaken(sequence, block)

    def allocate_arriving(self, sequence: Sequence) -> BlockId:
        """A block for a sequence that does not run, into which its KV is going to be copied."""
        block = self.allocate(overwrites=False)
        self._weaken(sequence, block)
        return block

    def give_back(self, sequence: Sequence, block: BlockId, fence: PlanId = NO_PLAN, *, expendable: bool = False) -> None:
        """One reference of the sequence less."""
        if sequence.holds_weakly:
            self.pool.strengthen(block)
        self.pool.release(block, fence, expendable=expendable)

    def loosen(self, sequence: Sequence) -> None:
        """The sequence stops running: others may take what it holds.

        Blocks beyond what is computed or planned go back at once. They were for the plan being built: none in flight names them.
        """
        self.shrink(sequence, sequence.num_computed_tokens + sequence.num_planned_tokens)
        self._withdraw(sequence)
        sequence.holds_weakly = True
        for table in sequence.tables:
            for block in table.live():
                self._weaken(sequence, BlockId(block))

    def tighten(self, sequence: Sequence) -> None:
        """The sequence runs, with all its blocks on the device."""
        sequence.holds_weakly = False
        self._loose.pop(sequence.seq_id, None)
        for table in sequence.tables:
            for block in table.live():
                self.pool.strengthen(BlockId(block))

    def loose_holders(self) -> list[Sequence]:
        """Those that do not run and hold blocks, in no order. However many wait, nobody else is looked at."""
        return [sequence for sequence in self._loose.values() if sequence.num_device_blocks]

    def _weaken(self, sequence: Sequence, block: BlockId) -> None:
        self.pool.weaken(block)
        self._loose[sequence.seq_id] = sequence

    # --- shrinking -------------------------------------------------------------------------------------

    def release(self, sequence: Sequence, fence: PlanId) -> None:
        """Takes all blocks away, tail first, so that the head of a prefix is evicted last."""
        self.shrink(sequence, 0, fence)
        self._withdraw(sequence)
        self._loose.pop(sequence.seq_id, None)

    def shrink(self, sequence: Sequence, num_tokens: int, fence: PlanId = NO_PLAN) -> None:
        """Keeps the entries of the first `num_tokens` positions; as for windows, see `Windows.way_back`."""
        for table in sequence.tables:
            num_behind = table.num_behind
            for block in table.truncate(blocks_for(num_tokens, self.block_size)):
                if block == NONE:
                    sequence.num_absent -= 1
                else:
                    self.give_back(sequence, block, fence)
            if table.num_behind != num_behind:
                sequence.num_behind -= num_behind - table.num_behind
                sequence.leaves_behind_at = 0

    def leave_behind(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives back what no window reaches any more, once `num_tokens` positions are computed.

        No fence: plans in flight compute later positions, and the next use of these blocks is in a plan after those. What
        the sequence has computed itself is the first to be overwritten, for a hit must end just there to need it; what
        was found once may be found again.
        """
        for group, num_behind in self.windows.passed(sequence, num_tokens):
            self._leave_behind(sequence, group, num_behind)
        sequence.leaves_behind_at = self.windows.passes_next_at(num_tokens)

    def _leave_behind(self, sequence: Sequence, group: int, num_behind: int) -> None:
        table, first = sequence.tables[group], sequence.tables[group].num_behind
        for index, block in enumerate(table.leave_behind(num_behind), start=first):
            sequence.num_behind += 1
            if block == NONE:
                sequence.num_absent -= 1
            else:
                self.give_back(sequence, block, expendable=index >= sequence.num_found_blocks)
        if sequence.slots[group]:
            self.on_behind(sequence, group, num_behind)

    def forget_behind(self, sequence: Sequence) -> None:
        """What the sequence has left behind is not to be trusted: nobody else is to find it."""
        for number, table in enumerate(sequence.tables if sequence.is_cacheable else ()):
            for index in range(table.num_behind):
                block = self.pool.index.find(in_group(sequence.block_key(index), number))
                if block is not None:
                    self.pool.forget(block)

    # --- what can be taken over ------------------------------------------------------------------------

    def announced(self) -> dict[bytes, Sequence]:
        """A copy of what is announced, for invariants."""
        return dict(self._computing)

    def _withdraw(self, sequence: Sequence, first: int = 0, last: int | None = None) -> None:
        """Those behind need not wait any more for it to compute its blocks from `first` up to `last`, or to the end."""
        if sequence.is_cacheable:
            for key in sequence.keys[first:last]:
                if self._computing.get(key) is sequence:
                    del self._computing[key]

    def may_take_over(self, sequence: Sequence) -> bool:
        """Whether blocks of others could continue what it has: all of that is full, and nothing more is being computed."""
        return not sequence.num_planned_tokens and len(sequence.tables[0]) * self.block_size == sequence.num_computed_tokens

    def _hits(self, sequence: Sequence) -> Hit[BlockId]:
        """Confirmed blocks that continue what is computed."""
        first, last = len(sequence.tables[0]), self.num_sharable_blocks(sequence)
        if first >= last or not sequence.is_cacheable or not self.may_take_over(sequence):
            return self._nothing
        asked = (sequence.seq_id, self.pool.index.version, first, last)
        if asked != self._last_asked:
            sequence.block_key(last - 1)
            self._last_hit = longest_hit(self.groups, OnDevice(self.pool.index, sequence.keys), first, last, self.block_size)
            self._last_asked = asked
        return self._last_hit

    def _count_capacity(self) -> int:
        num_blocks = bisect_right(range(_MANY_BLOCKS), self.pool.num_blocks, key=lambda whole: self.blocks_for(whole * self.block_size)) - 1
        return ENDLESS if num_blocks == _MANY_BLOCKS - 1 else num_blocks * self.block_size
