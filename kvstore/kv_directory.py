"""The KV directory: what lies in which block and swap slot, written down where it outlives the scheduler.

The prefix indices die with the scheduler, but the bytes they name do not: blocks are the workers', slots the
arena's. So every entry is mirrored into shared memory that the launcher keeps, and the next scheduler adopts it.

    header 64 bytes      magic, geometry of the arena             swap slots     one entry each: flag, length, key
    header 64 bytes      magic, pool incarnation, its geometry    blocks         the same

Slots come first, so that a pool of another size, as new workers may have it, leaves them where they are.
An entry is written when its content is certain (all ranks have acknowledged it) and cleared before the plan that
overwrites it is sent, so a directory found after a crash never promises too much. The flag is cleared first and set
last: a writer killed half-way leaves an entry that says nothing. It also says what is expendable, so that the next
scheduler overwrites that first. Knows keys and ids, and neither sequences nor how the memory is shared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from pagemill.ids import BlockId, SwapSlotId

Id = TypeVar("Id", bound=int)

_SLOTS_MAGIC = b"pmkvslt2"
_BLOCKS_MAGIC = b"pmkvblk2"
_HEADER = struct.Struct("<8sqqqq")
_HEADER_BYTES = 64
_ENTRY_BYTES = 40
#: The flag: nothing, a key, or the key of what is hardly worth keeping.
_NOTHING, _NAMED, _EXPENDABLE = 0, 1, 2
#: Flag and length precede the key.
MAX_KEY_BYTES = _ENTRY_BYTES - 2


class DirectoryTable(Generic[Id]):
    """The entries of one kind of place; the mirror of one prefix index (`PrefixIndex.mirror`)."""

    def __init__(self, memory: memoryview, num_entries: int, on_write: Callable[[], object]) -> None:
        self._memory = memory
        self._num_entries = num_entries
        self._on_write = on_write

    def write(self, number: Id, key: bytes) -> None:
        """The content of `number` is what `key` stands for. A key that is too long, or private to one sequence, is left out."""
        if not 32 <= len(key) <= MAX_KEY_BYTES:
            return
        start = number * _ENTRY_BYTES
        self._memory[start] = _NOTHING
        self._on_write()
        self._memory[start + 1] = len(key)
        self._memory[start + 2 : start + 2 + len(key)] = key
        self._memory[start] = _NAMED

    def mark(self, number: Id, is_expendable: bool) -> None:
        """Whether anybody is expected to want it again. No effect on an entry that says nothing."""
        if self._memory[number * _ENTRY_BYTES] != _NOTHING:
            self._memory[number * _ENTRY_BYTES] = _EXPENDABLE if is_expendable else _NAMED

    def clear(self, number: Id) -> None:
        """What lies there is going to be overwritten."""
        self._memory[number * _ENTRY_BYTES] = _NOTHING

    def clear_all(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def entries(self) -> list[tuple[int, bytes]]:
        """(id, key) of every entry that says something, in order of ids."""
        found: list[tuple[int, bytes]] = []
        for number in range(self._num_entries):
            start = number * _ENTRY_BYTES
            length = self._memory[start + 1]
            if self._memory[start] in (_NAMED, _EXPENDABLE) and 32 <= length <= MAX_KEY_BYTES:
                found.append((number, bytes(self._memory[start + 2 : start + 2 + length])))
        return found

    def expendable(self) -> list[int]:
        """Ids of the entries that say so, in order."""
        return [number for number in range(self._num_entries) if self._memory[number * _ENTRY_BYTES] == _EXPENDABLE]


class KvDirectory:
    """A directory over `memory`, which must be writable and zero at first.

    Slots that were written for another geometry of the arena are forgotten, and so are blocks that were written for
    another pool: one of another geometry, or of another incarnation of the workers, whose pool is gone. `on_write` is
    called when an entry has been cleared and not yet written. Raises ValueError if the memory is too small; then
    everything is forgotten, for who gets no directory overwrites what one would describe.
    """

    def __init__(
        self,
        memory: memoryview,
        *,
        num_blocks: int,
        num_slots: int,
        block_bytes: int,
        block_size: int,
        pool_incarnation: int,
        on_write: Callable[[], object] = lambda: None,
    ) -> None:
        needed = directory_bytes(num_blocks, num_slots)
        if len(memory) < needed:
            memory[:_HEADER_BYTES] = bytes(min(_HEADER_BYTES, len(memory)))
            raise ValueError(f"a directory of {num_blocks} blocks and {num_slots} swap slots takes {needed} bytes, there are {len(memory)}")
        middle = _HEADER_BYTES + num_slots * _ENTRY_BYTES
        self.slots: DirectoryTable[SwapSlotId] = DirectoryTable(memory[_HEADER_BYTES:middle], num_slots, on_write)
        self.blocks: DirectoryTable[BlockId] = DirectoryTable(memory[middle + _HEADER_BYTES : needed], num_blocks, on_write)
        slots_header, blocks_header = memory[:_HEADER_BYTES], memory[middle : middle + _HEADER_BYTES]
        arena = (_SLOTS_MAGIC, num_slots, block_bytes, block_size, 0)
        if _HEADER.unpack_from(slots_header) != arena:
            # Blocks lie elsewhere in an arena of another geometry; what stands here is not theirs.
            blocks_header[:] = bytes(_HEADER_BYTES)
            _renew(slots_header, self.slots, arena)
        pool = (_BLOCKS_MAGIC, num_blocks, block_bytes, block_size, pool_incarnation)
        if _HEADER.unpack_from(blocks_header) != pool:
            _renew(blocks_header, self.blocks, pool)


def _renew(header: memoryview, table: DirectoryTable[Id], geometry: tuple[bytes, int, int, int, int]) -> None:
    """Without a valid header nothing is adopted, so a writer killed between these lines does no harm."""
    header[:] = bytes(_HEADER_BYTES)
    table.clear_all()
    _HEADER.pack_into(header, 0, *geometry)


def directory_bytes(num_blocks: int, num_slots: int) -> int:
    """What a directory of that many places takes."""
    return 2 * _HEADER_BYTES + (num_blocks + num_slots) * _ENTRY_BYTES
