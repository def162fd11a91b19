"""Swapping: how the KV of one sequence gets to the arena and back, block by block.

    give_up     a sequence that does not run frees blocks, last ones first: copied out, or dropped to be computed again
    bring_in    its blocks come back: at once if that takes little of a step, else beside the forwards, first ones first
    adopt       a prefix that the arena still has is taken over, if fetching it is cheaper than computing it

Full confirmed blocks have a name in the arena (`Sequence.copy_key`), so equal content lies there once, a copy
made early (`early_copies`) serves the preemption that comes later, and what was brought back stays behind as a clean
copy that may be dropped. A partly filled last block has no name and belongs to its sequence alone. Who gives up how
much, and which way, is decided in `preemption`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from kvstore.swap_space import SwapSpace
from pagemill.ids import NO_PLAN, NONE, BlockId, PlanId, SwapSlotId
from pagemill.messages.worker import TransferDone
from scheduler.core_config import CoreConfig
from scheduler.kv_memory import KvMemory
from scheduler.prefix_hits import OnBothTiers, longest_hit
from scheduler.rates import PrefillRate
from scheduler.sequence import Sequence
from scheduler.transfers import TransferInFlight, Transfers

#: Sequences whose copies together take no more than this share of a step run in the very next one, whose forward waits for them.
_HURRY_SHARE = 0.2


@dataclass(slots=True)
class Tail:
    """What a sequence could give up for a purpose: entries from the end of its tables."""

    entries: list[tuple[int, int]] = field(default_factory=list)  #: (block index, group), last first
    num_freed: int = 0  #: blocks that nobody refers to afterwards

    @property
    def first_index(self) -> int:
        return self.entries[-1][0]


class Swapping:
    """Owns the swap space and the transfers."""

    def __init__(self, config: CoreConfig, memory: KvMemory, prefill: PrefillRate, on_lost: Callable[[Sequence], None]) -> None:
        """`on_lost` is told of a running sequence that computes on what has not come; it must have stopped afterwards."""
        self.memory = memory
        self.swap = SwapSpace(0 if config.preemption == "recompute" else config.num_swap_slots)
        self.transfers = Transfers(config, memory.pool, self.swap)
        self.plan_id: PlanId = NO_PLAN  #: of the plan being built
        self.coming_step_s = 0.0  #: what that plan takes at least, as far as known: the longest chunk of a prompt in it
        self.num_moved_tokens = 0
        self.num_arena_hit_tokens = 0
        self._prefill, self._on_lost = prefill, on_lost
        self._always_fetch = config.preemption == "swap"
        self._block_bytes, self._block_size, self._max_step_tokens = config.block_bytes, config.block_size, config.max_num_batched_tokens
        #: Positions that are moved are counted by the blocks of this group.
        self._counted_group = next((number for number, group in enumerate(config.groups) if not group.window), 0)
        memory.on_behind = self._release_behind
        memory.on_overwrite = lambda transfer_id: self.transfers.make_urgent(transfer_id, self.plan_id)

    # --- giving up -------------------------------------------------------------------------------------

    def tail(self, sequence: Sequence, num_blocks: int, keep: dict[BlockId, None], *, shared: bool = False) -> Tail:
        """The last entries of the sequence that free `num_blocks` blocks, or as many as it can.

        Blocks that running sequences or transfers use are no help, nor are those in `keep`. With `shared`, entries
        are included that free nothing yet, because another sequence that does not run has them too: as many as are wanted.
        """
        pool, own = self.memory.pool, 0 if sequence.holds_weakly else 1
        tail = Tail()
        for index, group, block in sequence.entries_from_end(len(sequence.tables[0])):
            if tail.num_freed >= num_blocks or (shared and len(tail.entries) >= num_blocks):
                break
            if block == NONE or block in keep or pool.num_strong_to_free(block) > own:
                continue
            if pool.num_to_free(block) == 1:
                tail.num_freed += 1
            elif not shared:
                continue
            tail.entries.append((index, group))
        return tail

    def num_without_copy(self, sequence: Sequence, tail: Tail) -> int:
        """Blocks of the tail that would have to be copied out."""
        return sum(self.copy_of(sequence, index, group) is None for index, group in tail.entries)

    def give_up(self, sequence: Sequence, tail: Tail, *, swap: bool) -> int:
        """Carries it out for a sequence that does not run. Returns how many blocks became obtainable; what was counted on in vain stays."""
        before = self.memory.pool.num_obtainable
        if swap:
            self._swap_out(sequence, tail)
        else:
            self.truncate(sequence, tail.first_index * self._block_size)
        return self.memory.pool.num_obtainable - before

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Forgets the KV after the first `num_tokens` positions of a sequence that does not run, all of it if no way leads back there.

        If positions in flight are among them, all in flight are given up.
        """
        if sequence.num_computed_tokens + sequence.num_planned_tokens > num_tokens:
            sequence.kv_version += 1
            sequence.num_planned_tokens = sequence.num_pending_tokens = 0
            num_tokens = sequence.num_computed_tokens = self.memory.windows.way_back(sequence, min(sequence.num_computed_tokens, num_tokens))
        # No fence: plans are carried out in order, and the next use of these blocks is in a later one.
        self.memory.shrink(sequence, num_tokens)
        num_kept = len(sequence.tables[0])
        for group, slots in enumerate(sequence.slots):
            for index in [index for index in slots if index >= num_kept]:
                self.swap.release(slots.pop(index))
                sequence.arriving.pop((group, index), None)

    def _release_behind(self, sequence: Sequence, group: int, num_behind: int) -> None:
        """What a window has left behind needs no slots either."""
        slots = sequence.slots[group]
        for index in [index for index in slots if index < num_behind]:
            self.swap.release(slots.pop(index))
            sequence.arriving.pop((group, index), None)

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended. Transfers under way keep what they need until they are done."""
        for slots in sequence.slots:
            for slot in slots.values():
                self.swap.release(slot)
            slots.clear()
        sequence.arriving.clear()
        if not sequence.is_cacheable:
            self.forget_copies(sequence)

    def forget_copies(self, sequence: Sequence) -> None:
        """What lies in the arena of its full blocks is of no use to anybody: only it could find that, or it is not to be trusted."""
        for index in range(sequence.num_highest_computed // self._block_size if self.swap.total else 0):
            for group in range(self.memory.num_groups):
                slot = self.swap.index.find(sequence.copy_key(index, group))
                if slot is not None:
                    self.swap.forget(slot)

    def _swap_out(self, sequence: Sequence, tail: Tail) -> None:
        pool = self.memory.pool
        missing: list[tuple[int, int]] = []
        for index, group in tail.entries:  # first hold on to the copies that exist, or making room for the others may drop them
            slot = self.copy_of(sequence, index, group)
            if slot is None:
                missing.append((index, group))
                continue
            self._hold(sequence, index, group, slot)
            self._leave_device(sequence, index, group)
        for index, group in missing:
            slot = self.swap.allocate()
            sequence.slots[group][index] = slot
            if self._is_confirmed(sequence, index):
                self.swap.index.insert(sequence.copy_key(index, group), slot)
            block = sequence.tables[group][index]
            transfer = self.transfers.order_out(block, slot, holds_block=False)
            pool.strengthen(block)
            pool.leave(block, transfer.transfer_id)
            self._mark_absent(sequence, index, group)
            self.num_moved_tokens += self._num_positions(sequence, index, group)

    def _hold(self, sequence: Sequence, index: int, group: int, slot: SwapSlotId) -> None:
        if index not in sequence.slots[group]:
            self.swap.reference(slot)
            sequence.slots[group][index] = slot

    def _leave_device(self, sequence: Sequence, index: int, group: int) -> None:
        self.memory.give_back(sequence, sequence.tables[group][index])
        self._mark_absent(sequence, index, group)

    @staticmethod
    def _mark_absent(sequence: Sequence, index: int, group: int) -> None:
        sequence.tables[group][index] = NONE
        sequence.num_absent += 1

    # --- coming back -----------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence) -> int:
        """Takes over blocks that follow what the sequence has and are in the arena, or on the device beside those, if fetching is cheaper.

        Returns how many positions that saved.
        """
        first, last = len(sequence.tables[0]), self.memory.num_sharable_blocks(sequence)
        if first >= last or not len(self.swap.index) or not self.memory.may_take_over(sequence):
            return 0
        hit = longest_hit(self.memory.groups, OnBothTiers(self.memory.pool.index, self.swap.index, sequence), first, last, self._block_size)
        num_absent = sum(block == NONE for run in hit.runs for block, _ in run)
        num_tokens = hit.num_blocks * self._block_size
        if not hit.num_blocks or not self._pays(num_absent, first * self._block_size, num_tokens):
            return 0
        self.memory.make_way(sequence, hit)
        for group, run in enumerate(hit.runs):
            for block, slot in run:
                self._take_over(sequence, group, block, slot)
        self.num_arena_hit_tokens += self.memory.count_cached(sequence, num_tokens)
        return num_tokens

    def _take_over(self, sequence: Sequence, group: int, block: BlockId, slot: SwapSlotId) -> None:
        """Appends a block that is on the device or, NONE, in this slot."""
        table = sequence.tables[group]
        if block == NONE:
            self.swap.reference(slot)
            sequence.slots[group][len(table)] = slot
            sequence.num_absent += 1
        else:
            self.memory.refer(sequence, block)
        table.append(block)

    def num_first_blocks(self, sequence: Sequence) -> int:
        """How many of its absent blocks would be ordered in one plan."""
        return sequence.num_absent if self._may_hurry(sequence) else max(1, self.transfers.budget("in"))

    def bring_in(self, sequence: Sequence) -> bool:
        """Orders what may be ordered now. True if the sequence can run in the plan being built."""
        hurry = self._may_hurry(sequence) and sequence.num_absent <= self.memory.pool.num_obtainable
        for group, table in enumerate(sequence.tables):
            index = table.first_absent(table.num_behind)
            while index < len(table):
                if not self._bring_in_block(sequence, index, group, hurry):
                    break
                index = table.first_absent(index + 1)
        return not sequence.num_absent and (hurry or not sequence.arriving)

    def _may_hurry(self, sequence: Sequence) -> bool:
        """Whether a forward may wait for all that the sequence lacks, besides what it waits for already."""
        if sequence.arriving or any(self.swap.is_filling(slot) for slots in sequence.slots for slot in slots.values()):
            return False
        num_blocks = sequence.num_absent + self.transfers.num_awaited("in")
        seconds = self.transfers.rates["in"].seconds(num_blocks * self._block_bytes)
        return seconds <= _HURRY_SHARE * max(self.transfers.step_s, self.coming_step_s, self.chunk_s(sequence))

    def chunk_s(self, sequence: Sequence) -> float:
        """What the next chunk of the sequence's prompt takes, which may be far from a step's mean; 0 if it decodes."""
        if sequence.num_uncomputed_tokens <= 1:
            return 0.0
        first = sequence.num_computed_tokens
        return self._prefill.seconds(first, min(sequence.num_tokens, first + self._max_step_tokens))

    def _bring_in_block(self, sequence: Sequence, index: int, group: int, hurry: bool) -> bool:
        """False if no more can be ordered now."""
        memory, slot = self.memory, sequence.slots[group][index]
        if sequence.is_cacheable and self._is_confirmed(sequence, index):
            on_device = memory.pool.index.find(sequence.copy_key(index, group))
            if on_device is not None:
                memory.refer(sequence, on_device)
                self._mark_present(sequence, index, group, on_device)
                self.swap.release(sequence.slots[group].pop(index))
                return True
        if self.swap.is_filling(slot):
            return True  # others may be ready
        if (self.transfers.budget("in") <= 0 and not hurry) or memory.pool.num_obtainable == 0:
            return False
        block = memory.allocate_arriving(sequence)
        self._mark_present(sequence, index, group, block)
        transfer = self.transfers.order_in(slot, block, sequence, group, index)
        if hurry:
            self.transfers.make_urgent(transfer.transfer_id, self.plan_id)
        sequence.arriving[(group, index)] = transfer.transfer_id
        self.num_moved_tokens += self._num_positions(sequence, index, group)
        return True

    @staticmethod
    def _mark_present(sequence: Sequence, index: int, group: int, block: BlockId) -> None:
        sequence.tables[group][index] = block
        sequence.num_absent -= 1

    def _pays(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        """Whether fetching so many blocks is cheaper than computing these positions."""
        if self._always_fetch:
            return True
        fetch_s = self.transfers.rates["in"].seconds(num_blocks * self._block_bytes + self.transfers.backlog_bytes("in"))
        return fetch_s < self._prefill.seconds(start, start + num_tokens)

    # --- transfers that are done -----------------------------------------------------------------------

    def done(self, event: TransferDone, not_running: Iterable[Sequence]) -> int:
        """Takes an acknowledgement. Returns how many of its ids are unknown."""
        complete, num_unknown = self.transfers.done(event)
        for transfer in complete:
            if transfer.direction == "in":
                self._arrived(transfer)
        if lost := {transfer.slot for transfer in complete if not transfer.ok}:
            self._lost(lost, not_running)
        return num_unknown

    def _arrived(self, transfer: TransferInFlight) -> None:
        sequence, group, index = transfer.sequence, transfer.group, transfer.index
        if sequence is None or sequence.arriving.get((group, index)) != transfer.transfer_id:
            return  # it ended, or gave the block up, while the copy was under way
        del sequence.arriving[(group, index)]
        if not transfer.ok:
            if not sequence.holds_weakly:
                self._on_lost(sequence)
            self.truncate(sequence, index * self._block_size)
            return
        self.swap.release(sequence.slots[group].pop(index))
        if sequence.is_cacheable and self._is_confirmed(sequence, index):
            self.memory.pool.index.insert(sequence.copy_key(index, group), transfer.block)

    def _lost(self, lost: Set[SwapSlotId], not_running: Iterable[Sequence]) -> None:
        """These slots could not be written, or not be read: whoever counts on one computes again from there."""
        for sequence in not_running:
            indices = [index for slots in sequence.slots for index, slot in slots.items() if slot in lost]
            if indices:
                self.truncate(sequence, min(indices) * self._block_size)

    # --- small -----------------------------------------------------------------------------------------

    def copy_of(self, sequence: Sequence, index: int, group: int) -> SwapSlotId | None:
        """The slot that has this block's content, or will have it when a transfer under way is done."""
        held = sequence.slots[group].get(index)
        if held is not None or not self._is_confirmed(sequence, index):
            return held
        return self.swap.index.find(sequence.copy_key(index, group))

    def _is_confirmed(self, sequence: Sequence, index: int) -> bool:
        return (index + 1) * self._block_size <= sequence.num_computed_tokens

    def _num_positions(self, sequence: Sequence, index: int, group: int) -> int:
        """Positions in a block, counted once over the groups."""
        reached = sequence.num_computed_tokens + sequence.num_planned_tokens
        return 0 if group != self._counted_group else min(self._block_size, reached - index * self._block_size)
