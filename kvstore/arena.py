"""One region of the swap arena, mapped and made resident. The only file of this package that touches bytes.

    region = map_region(arena_fd, index, region_bytes, slot_bytes)
    with region.populating():
        ...                                     # whatever takes long anyway
        region.wait_until_populated(report)
    slots = torch.frombuffer(region.memory, dtype=torch.uint8).view(region.num_slots, region.slot_bytes)

Whose slot is whose is the scheduler's to know (`kvstore.swap_space`), and it never maps the arena; this
file knows no block, no sequence and no tensor. Slots are not initialised: they hold what was last written.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Since Linux 5.14: makes pages present and writable, and returns an error where a plain access would end in SIGBUS.
_MADV_POPULATE_WRITE = 23
#: For so long at a time the kernel holds the lock on this process's mappings, which loading weights needs as well: with
#: 16 MiB it got a quarter of the mappings done that it did with 1 MiB, which in turn populates a fifth slower.
_PIECE_BYTES = 4 * 2**20
_REPORT_INTERVAL_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: Makes bytes [start, start + size) of the region present. Raises OSError.
MakePresent = Callable[[int, int], None]


class ArenaError(Exception):
    """The arena cannot be used; the message is one sentence for the operator."""


class Region:
    """Slots [0, num_slots) of one rank, or of several that hold the same KV. Owner of the mapping, which lasts as long as somebody views `memory`."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int, make_present: MakePresent) -> None:
        self.memory = memory  #: num_slots * slot_bytes bytes, writable and shared
        self.slot_bytes = slot_bytes
        self.num_slots = len(memory) // slot_bytes
        self._make_present = make_present
        self._present_bytes = 0  #: written by the populating thread only
        self._error: OSError | None = None
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._populate, name="arena populating")

    @property
    def fraction(self) -> float:
        """The share that is resident, from 0 to 1."""
        return self._present_bytes / len(self.memory)

    @contextmanager
    def populating(self) -> Iterator[None]:
        """Makes every page resident, in a thread of its own; leaving the context before that stops it. Used once."""
        self._thread.start()
        try:
            yield
        finally:
            self._abandoned.set()
            self._thread.join()

    def wait_until_populated(self, report: Callable[[float], object] = lambda fraction: None) -> None:
        """Within `populating`: returns when all of it is resident, and tells `report` how far it is meanwhile. Raises ArenaError."""
        while self._thread.is_alive():
            report(self.fraction)
            self._thread.join(_REPORT_INTERVAL_S)
        if self._error is not None:
            reason = self._error.strerror or errno.errorcode.get(self._error.errno or 0, "unknown")
            raise ArenaError(
                f"--swap-memory: after {self._present_bytes} of {len(self.memory)} bytes the system has no memory left for swap space"
                f" ({reason}); lower it, or take 0 for none"
            )
        report(self.fraction)

    def _populate(self) -> None:
        try:
            for start in range(0, len(self.memory), _PIECE_BYTES):
                if self._abandoned.is_set():
                    return
                size = min(_PIECE_BYTES, len(self.memory) - start)
                self._make_present(start, size)
                self._present_bytes = start + size
        except OSError as error:
            self._error = error


def map_region(fd: int, index: int, region_bytes: int, slot_bytes: int) -> Region:
    """Maps the region number `index`, of as many whole slots as it holds. `fd` may be closed once it is populated. Raises ArenaError."""
    size_bytes = region_bytes // slot_bytes * slot_bytes
    offset = index * region_bytes
    if not size_bytes:
        raise ArenaError(f"--swap-memory: a share of {region_bytes} bytes holds no block, which takes {slot_bytes}; raise it, or take 0 for none")
    try:
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    except (OSError, ValueError) as error:  # ValueError: beyond the end of the file, or not on a page
        raise ArenaError(f"--swap-memory: {size_bytes} bytes of the arena cannot be mapped: {error}") from None
    memory.madvise(mmap.MADV_DONTDUMP)  # it holds conversations
    return Region(memory, slot_bytes, _populating(memory, fd, offset))


def _populating(memory: mmap.mmap, fd: int, offset: int) -> MakePresent:
    """How this kernel is asked for memory that is there: without a signal if it is not, and without holding Python's lock."""

    def by_advice(start: int, size: int) -> None:
        if _libc.madvise(_address(memory) + start, size, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def by_allocation(start: int, size: int) -> None:
        os.posix_fallocate(fd, offset + start, size)

    try:
        by_advice(0, mmap.PAGESIZE)
    except OSError as error:
        if error.errno == errno.EINVAL:  # an older kernel
            return by_allocation
    return by_advice


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
