"""The swap arena as a file without a name: how it is made, and how large a place in it is.

    arena[rank][slot][slot_bytes]        one region of whole slots for each rank, one slot for each block

The launcher makes it and keeps it, so that it outlives any worker; children get it by inheritance, as they
get the listening socket. A memfd is on no file system: no limit of /dev/shm applies, nobody else can open
it, and it is gone with the last process that holds it, however that ends. Making it takes no memory: the
pages come when a worker populates its region (`kvstore.arena`). Must not map it or know what lies in it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pagemill.errors import UsageError
from pagemill.messages import NONE

#: Slots start on pages, so that whole ones can be pinned, and a slot is never smaller than what it takes.
SLOT_ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)
#: What /proc shows as `/memfd:NAME`.
ARENA_NAME = "pagemill-arena"


def slot_bytes_for(block_bytes: int) -> int:
    """What one block takes in the arena."""
    return -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def create_arena(size_bytes: int) -> int:
    """A descriptor that children do not inherit by themselves, of a size that nobody can change. Raises OSError."""
    fd = os.memfd_create(ARENA_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Shrinking it under a mapping would kill its user with SIGBUS; growing it would evade the memory plan.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def kept_arena(size_bytes: int) -> Iterator[int]:
    """An arena for as long as the context lasts, NONE if it is to have no bytes. Raises UsageError."""
    if not size_bytes:
        yield NONE
        return
    try:
        fd = create_arena(size_bytes)
    except OSError as error:
        raise UsageError(f"--swap-memory: the system gives no shared memory of {size_bytes} bytes: {error.strerror}; lower it, or take 0 for none") from None
    try:
        yield fd
    finally:
        os.close(fd)
