"""The swap space: slots of the arena, counted. One slot holds the bytes of one block.

One space, two uses. A slot is *held* (referenced) while a preempted sequence needs it, and it cannot be taken
away. When nobody needs it any more and a key names its content, it stays *cached*: a second level of the prefix
cache, and a clean copy for the next preemption, dropped the moment a sequence needs the room.

A slot that is being written is *filling*; whoever wants to read it waits until the transfer is done.
Pure accounting: the bytes are mapped by workers only.
"""

from __future__ import annotations

from kvstore.id_pool import IdPool
from pagemill.ids import SwapSlotId


class SwapSpace(IdPool[SwapSlotId]):
    """Owns the ids of all slots; there may be none."""

    NOUN = "swap slot"

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._filling: dict[SwapSlotId, int] = {}  #: slot -> the transfer that writes it
        self.index.mirrors_inserts = False

    def fill(self, slot: SwapSlotId, transfer_id: int) -> None:
        """A transfer is going to write the slot. It refers to the slot until it is done."""
        self.reference(slot)
        self._filling[slot] = transfer_id

    def is_filling(self, slot: SwapSlotId) -> bool:
        return slot in self._filling

    def filled(self, slot: SwapSlotId) -> None:
        """The transfer that writes the slot is done."""
        del self._filling[slot]
        key = self.index.key_of(slot)
        if key is not None and self.index.mirror is not None:
            self.index.mirror.write(slot, key)
        self.release(slot)

    def filling(self) -> dict[SwapSlotId, int]:
        """A copy, for invariants."""
        return dict(self._filling)
