"""What KV outlives a core: read for the next one, kept up to date by it, disowned when nobody knows what is true of it.

The bytes are the workers'; what they are stands in a KV directory over memory that outlives this process. Where there is no
such memory, nothing outlives a core. Pure: must not know how the memory is shared, nor why a core ends.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.kv_directory import KvDirectory
from pagemill.ids import BlockId, SwapSlotId
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.events import Adopt


class SurvivingKv:
    """Owns the directory of the present workers. `on_write` is called when an entry has been cleared and not yet written."""

    def __init__(self, memory: memoryview | None, on_write: Callable[[], object] = lambda: None) -> None:
        self._memory, self._on_write = memory, on_write
        self._directory: KvDirectory | None = None

    def open(self, config: CoreConfig, pool_incarnation: int) -> Adopt | None:
        """What a core for these workers adopts: the arena's KV, and the pool's if these very workers wrote it.

        Raises ValueError if the memory is too small for their directory: then nothing outlives this core.
        """
        self._directory = None  # what it says is of another geometry, or of none
        if self._memory is None:
            return None
        self._directory = KvDirectory(
            self._memory,
            num_blocks=config.num_blocks,
            num_slots=config.num_swap_slots,
            block_bytes=config.block_bytes,
            block_size=config.block_size,
            pool_incarnation=pool_incarnation,
            on_write=self._on_write,
        )
        blocks, slots = self._directory.blocks, self._directory.slots
        return Adopt(
            blocks=tuple((BlockId(number), key) for number, key in blocks.entries()),
            swap_slots=tuple((SwapSlotId(number), key) for number, key in slots.entries()),
            expendable_blocks=tuple(BlockId(number) for number in blocks.expendable()),
        )

    def follow(self, core: SchedulerCore) -> None:
        """From its first event on, what this core knows of KV is written down."""
        if self._directory is not None:
            core.memory.pool.index.mirror = self._directory.blocks
            core.swapping.swap.index.mirror = self._directory.slots

    def disown(self) -> None:
        """Nothing that was written down is to be believed."""
        if self._directory is not None:
            self._directory.blocks.clear_all()
            self._directory.slots.clear_all()
