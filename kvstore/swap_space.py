"""The swap space: slots of the arena, counted. One slot holds the bytes of one block.

One space, two uses. A slot is *held* (referenced) while a preempted sequence needs it, and it cannot be taken
away. When nobody needs it any more and a key names its content, it stays *cached*: a second level of the prefix
cache, and a clean copy for the next preemption, dropped the moment a sequence needs the room.

A slot that is being written is *filling*; whoever wants to read it waits until the transfer is done. One that could not be
written or read is *distrusted* until it has been written: it is handed out only when nothing else can be, for its next
user would probably lose what it puts there. Pure accounting: the bytes are mapped by workers only.
"""

from __future__ import annotations

from collections import deque

from kvstore.id_pool import IdPool
from pagemill.ids import SwapSlotId


class SwapSpace(IdPool[SwapSlotId]):
    """Owns the ids of all slots; there may be none."""

    NOUN = "swap slot"

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._filling: dict[SwapSlotId, int] = {}  #: slot -> the transfer that writes it
        self._distrusted: dict[SwapSlotId, None] = {}
        self._last_resort: deque[SwapSlotId] = deque()  #: free ones of these, the longest free first
        self.index.mirrors_inserts = False

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._last_resort)

    @property
    def num_obtainable(self) -> int:
        return super().num_obtainable + len(self._last_resort)

    @property
    def num_spare(self) -> int:
        """What may be taken for copies that nobody needs yet: without those of last resort, unless there are no others."""
        return super().num_obtainable or len(self._last_resort)

    @property
    def num_last_resort(self) -> int:
        """Free ones that are handed out after all cached ones."""
        return len(self._last_resort)

    def allocate(self) -> SwapSlotId:
        if self._last_resort and not self._free and not self._cached:
            self._free.append(self._last_resort.popleft())
        return super().allocate()

    def fill(self, slot: SwapSlotId, transfer_id: int) -> None:
        """A transfer is going to write the slot. It refers to the slot until it is done."""
        self.reference(slot)
        self._filling[slot] = transfer_id

    def is_filling(self, slot: SwapSlotId) -> bool:
        return slot in self._filling

    def distrust(self, slot: SwapSlotId) -> None:
        """It could not be written, or not be read: it holds KV no more, and nobody is to find it again."""
        self.forget(slot)
        self._distrusted[slot] = None

    def is_distrusted(self, slot: SwapSlotId) -> bool:
        return slot in self._distrusted

    def filled(self, slot: SwapSlotId, *, ok: bool = True) -> None:
        """The transfer that writes the slot is done, or has failed."""
        del self._filling[slot]
        if ok:
            self._distrusted.pop(slot, None)
        else:
            self.distrust(slot)
        key = self.index.key_of(slot)
        if key is not None and self.index.mirror is not None:
            self.index.mirror.write(slot, key)
        self.release(slot)

    def filling(self) -> dict[SwapSlotId, int]:
        """A copy, for invariants."""
        return dict(self._filling)

    def _containers(self) -> list[tuple[str, list[SwapSlotId]]]:
        return [*super()._containers(), ("free", list(self._last_resort))]

    def _settle(self, number: SwapSlotId) -> None:
        if number in self._distrusted:
            self._last_resort.append(number)
        else:
            super()._settle(number)
