"""The block pool: device blocks, counted, with two refinements of `IdPool` that preemption needs.

*Weak references* are those of sequences that do not run. They count like any other, so that nobody overwrites
the block, but a block to which only weak ones are left is *reclaimable*: its holders can be made to give it up.

*Copies out*: what is given up may have to be copied to the arena first, by a transfer that a plan carries. Until that is
done, where the block is depends on whether anybody else refers to it, and whether that plan is still being built:

                     being built                                     sent
    nobody does      leaving: may be handed out, because the         left: behind the fence of the copy,
                     forward that overwrites it waits for the copy   then cached or free
    somebody does    staying: the copy has a reference of its        stayed: the copy keeps its reference
                     own, which goes with the last of the others     until it is done

    leave: referenced -> leaving or staying          reference: leaving -> staying, left -> stayed
    release of the last other: staying -> leaving    close_plan: leaving -> left, staying -> stayed
    take_leaving: leaving -> referenced              departed: left -> cached or free, stayed -> one reference less
"""

from __future__ import annotations

from kvstore.id_pool import IdPool
from pagemill.ids import NO_PLAN, BlockId, PlanId


class BlockPool(IdPool[BlockId]):
    """Owns the ids of all device blocks."""

    NOUN = "block"

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self._weak = [0] * num_blocks
        self._num_reclaimable = 0
        # By block its transfer; what stayed may be copied twice, if the first copy was disowned: by transfer its block.
        self._leaving: dict[BlockId, int] = {}
        self._left: dict[BlockId, int] = {}
        self._staying: dict[BlockId, int] = {}
        self._stayed: dict[int, BlockId] = {}
        self._copied_in_vain: dict[BlockId, None] = {}  #: an early copy of what is there has failed

    def allocate(self) -> BlockId:
        block = super().allocate()
        self._copied_in_vain.pop(block, None)
        return block

    # --- weak references -------------------------------------------------------------------------------

    @property
    def num_reclaimable(self) -> int:
        """Blocks to which only weak references are left."""
        return self._num_reclaimable

    def num_to_free(self, block: BlockId) -> int:
        """References that have to be given back to make it obtainable for the plan being built: all but that of a copy which goes with the last of them."""
        return self._counts[block] - (block in self._staying)

    def num_strong_to_free(self, block: BlockId) -> int:
        """Of these, strong ones."""
        return self.num_to_free(block) - self._weak[block]

    def weaken(self, block: BlockId) -> None:
        """One of the references becomes weak."""
        self._weak[block] += 1
        if self._counts[block] == self._weak[block]:
            self._num_reclaimable += 1

    def strengthen(self, block: BlockId) -> None:
        """One of the weak references becomes a strong one."""
        if self._weak[block] == 0:
            raise ValueError(f"block {block} has no weak reference")
        if self._counts[block] == self._weak[block]:
            self._num_reclaimable -= 1
        self._weak[block] -= 1

    def reference(self, block: BlockId) -> None:
        if self._counts[block] and self._counts[block] == self._weak[block]:
            self._num_reclaimable -= 1
        super().reference(block)

    def release(self, block: BlockId, fence: PlanId = NO_PLAN, *, oldest: bool = False, expendable: bool = False) -> None:
        """Gives back a strong reference."""
        if self._counts[block] == self._weak[block]:
            raise ValueError(f"block {block} released twice")
        super().release(block, fence, oldest=oldest, expendable=expendable)
        if self._counts[block] and self._counts[block] == self._weak[block]:
            self._num_reclaimable += 1
        elif self._counts[block] == 1 and fence == NO_PLAN and block in self._staying:
            self._counts[block] = 0
            self._leaving[block] = self._staying.pop(block)

    # --- copies out ------------------------------------------------------------------------------------

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced) + len(self._left)

    @property
    def num_obtainable(self) -> int:
        return len(self._free) + len(self._cached) + len(self._leaving)

    @property
    def num_used(self) -> int:
        """Neither free nor cached."""
        return self.total - self.num_free - self.num_cached

    def leave(self, block: BlockId, transfer_id: int) -> bool:
        """Gives back a strong reference whose block is being copied out. True if it was the last: the block is leaving."""
        if self._counts[block] == self._weak[block]:
            raise ValueError(f"block {block} released twice")
        if self._counts[block] > 1:
            self._staying[block] = transfer_id  # the reference passes to the transfer
            return False
        self._counts[block] = 0
        self._leaving[block] = transfer_id
        return True

    def leave_cached(self, block: BlockId, transfer_id: int) -> None:
        """A cached block is being copied out before it is overwritten."""
        del self._cached[block]
        self._leaving[block] = transfer_id

    def take_leaving(self) -> tuple[BlockId, int] | None:
        """A leaving block with one reference and no key, and the transfer its next user must not overtake."""
        if not self._leaving:
            return None
        block, transfer_id = self._leaving.popitem()
        self._copied_in_vain.pop(block, None)
        self.index.remove(block)
        self._counts[block] = 1
        return block, transfer_id

    def close_plan(self) -> None:
        """The plan is complete: blocks wait for the copies that it carries."""
        self._left |= self._leaving
        self._leaving.clear()
        if self._staying:
            self._stayed |= {transfer_id: block for block, transfer_id in self._staying.items()}
            self._staying.clear()

    def departed(self, block: BlockId, transfer_id: int) -> None:
        """The transfer is done. No effect if the block was overwritten meanwhile."""
        if self._left.get(block) == transfer_id:
            del self._left[block]
            self._settle(block)
        elif self._stayed.pop(transfer_id, None) is not None:
            self.release(block)

    def copied_in_vain(self, block: BlockId) -> None:
        """A copy that nobody needed yet has failed. Another would fail as well, and be tried for ever by an engine that has nothing else to do."""
        self._copied_in_vain[block] = None

    def was_copied_in_vain(self, block: BlockId) -> bool:
        """Of what is there now."""
        return block in self._copied_in_vain

    def _unplace(self, block: BlockId) -> bool:
        if block in self._leaving:
            self._staying[block] = self._leaving.pop(block)
        elif block in self._left:
            self._stayed[self._left.pop(block)] = block
        else:
            return super()._unplace(block)
        self._counts[block] = 1  # the transfer's
        return True

    def copied(self) -> list[tuple[int, BlockId]]:
        """Transfers that have a reference of their own, and to which block, for invariants."""
        return [*((transfer_id, block) for block, transfer_id in self._staying.items()), *self._stayed.items()]

    def _containers(self) -> list[tuple[str, list[BlockId]]]:
        return [*super()._containers(), ("leaving", list(self._leaving)), ("fenced", list(self._left))]

    def weak_counts(self) -> list[int]:
        """A copy, for invariants."""
        return list(self._weak)
