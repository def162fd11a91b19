"""How much host memory becomes swap space: what `--swap-memory` says, or a share of what weights and KV pool leave. Pure.

All of it is resident from the start, unlike the KV pool, whose pages come with its use. So `auto` stays
modest: twice the KV pool is as much as a server that swaps in earnest has use for, half of what is left
free is the most that neighbours and file cache can spare, and a start must not last much longer for it.
Must not know how memory is measured (`machine`), made (`arena_file`) or populated (`kvstore.arena`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.arena_file import slot_bytes_for
from pagemill.config import Device
from pagemill.errors import UsageError

GIB = 1024**3
#: What `auto` takes at most. First touch was measured at 0.6 GB/s in a small virtual machine; bare metal, as hosts of GPUs are,
#: does several and loads larger weights meanwhile, and there the arena must hold long contexts of several GiB each.
AUTO_AT_MOST: dict[Device, int] = {"cpu": GIB, "cuda": 32 * GIB}


@dataclass(frozen=True)
class SwapPlan:
    """The arena: a region for each distinct shard of the KV, of as many whole slots as blocks can lie there."""

    num_slots: int  #: of every region; a block that is swapped takes the same one in all
    slot_bytes: int  #: of one region
    num_regions: int = 1
    notes: tuple[str, ...] = ()

    @property
    def region_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole arena."""
        return self.num_regions * self.region_bytes


def plan_swap(asked: int | None, device: Device, *, block_bytes: int, num_regions: int, num_blocks: int, free_bytes: int) -> SwapPlan:
    """`asked` is in bytes of the whole arena, None is automatic; `block_bytes` are those of one region; `num_blocks` has the pool, 0 if unknown.

    `free_bytes` are left beside all else. Raises UsageError.
    """
    slot_bytes = slot_bytes_for(block_bytes)
    everywhere = num_regions * slot_bytes  # what one swapped block takes in all regions
    free_bytes = max(free_bytes, 0)
    if asked is None:
        share = min(free_bytes // 2, AUTO_AT_MOST[device], 2 * num_blocks * num_regions * block_bytes or AUTO_AT_MOST[device])
        note = f"no swap space: {free_bytes} bytes of memory are left beside weights and KV pool; preempted requests are computed again"
        return SwapPlan(share // everywhere, slot_bytes, num_regions, () if share >= everywhere else (note,))
    if 0 < asked < everywhere:
        raise UsageError(f"--swap-memory {asked} holds no block: one takes {everywhere} bytes; raise it, or take 0 for none")
    if asked > free_bytes:
        raise UsageError(
            f"--swap-memory asks for {asked / GIB:.1f} GiB, but {free_bytes / GIB:.1f} GiB of memory are left beside weights and KV pool;"
            f" lower it to {free_bytes} or less, or take 0 for none"
        )
    return SwapPlan(asked // everywhere, slot_bytes, num_regions)
