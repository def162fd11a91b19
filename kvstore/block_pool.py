"""The block pool: device blocks, counted, with two refinements of `IdPool` that preemption needs.

*Weak references* are those of sequences that do not run. They count like any other, so that nobody overwrites
the block, but a block to which only weak ones are left is *reclaimable*: its holders can be made to give it up.

*Leaving* blocks were just given up, and a copy to the arena was ordered with the plan being built. They may
be handed out again at once, because that plan's forward waits for the copy if it is going to overwrite the
block; those nobody took stay behind the fence of their transfer. If somebody refers to such a block again, for
reading, or still does, its transfer becomes one of its references, so that it is not overwritten before the copy is
done. When that is the last one left, and the plan still being built, the block is leaving again.
"""

from __future__ import annotations

from kvstore.id_pool import IdPool
from pagemill.messages import NO_PLAN, BlockId, PlanId


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
        self._leaving: dict[BlockId, int] = {}  #: block -> transfer ordered with the plan being built
        self._departing: dict[BlockId, int] = {}  #: block -> transfer in flight
        self._copied: dict[BlockId, int] = {}  #: block -> transfer in flight that has a strong reference of its own
        self._copied_now: dict[BlockId, None] = {}  #: of these, ordered with the plan being built

    # --- weak references -------------------------------------------------------------------------------

    @property
    def num_reclaimable(self) -> int:
        """Blocks to which only weak references are left."""
        return self._num_reclaimable

    def num_strong(self, block: BlockId) -> int:
        """References of running sequences and of transfers."""
        return self._counts[block] - self._weak[block]

    def num_leaving_with(self, block: BlockId) -> int:
        """References that go with the last of the others: that of a copy ordered with the plan being built."""
        return block in self._copied_now

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
        elif self._counts[block] == 1 and fence == NO_PLAN and block in self._copied_now:
            del self._copied_now[block]
            self._counts[block] = 0
            self._leaving[block] = self._copied.pop(block)

    # --- leaving ---------------------------------------------------------------------------------------

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced) + len(self._departing)

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
            self._refer(block, transfer_id)  # the reference passes to the transfer
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
        self.index.remove(block)
        self._counts[block] = 1
        return block, transfer_id

    def close_plan(self) -> None:
        """The plan is complete: leaving blocks that nobody took wait for their transfers."""
        self._departing |= self._leaving
        self._leaving.clear()
        self._copied_now.clear()

    def departed(self, block: BlockId, transfer_id: int) -> None:
        """The transfer is done. No effect if the block was overwritten meanwhile."""
        if self._departing.get(block) == transfer_id:
            del self._departing[block]
            self._settle(block)
        elif self._copied.get(block) == transfer_id:
            del self._copied[block]
            self.release(block)

    def _unplace(self, block: BlockId) -> bool:
        if block in self._leaving:
            self._refer(block, self._leaving.pop(block))
        elif block in self._departing:
            self._copied[block] = self._departing.pop(block)
        else:
            return super()._unplace(block)
        self._counts[block] = 1
        return True

    def _refer(self, block: BlockId, transfer_id: int) -> None:
        """A transfer ordered with the plan being built has a reference."""
        self._copied[block] = transfer_id
        self._copied_now[block] = None

    def copied(self) -> dict[BlockId, int]:
        """Blocks to which a transfer of this number refers, for invariants."""
        return dict(self._copied)

    def _containers(self) -> list[tuple[str, list[BlockId]]]:
        return [*super()._containers(), ("leaving", list(self._leaving)), ("fenced", list(self._departing))]

    def weak_counts(self) -> list[int]:
        """A copy, for invariants."""
        return list(self._weak)
