"""Memory that outlives the processes that use it, as files without a name: the swap arena and the KV directory.

    arena[shard][slot][slot_bytes]       one region of whole slots for each distinct KV shard, one slot for each block
    directory[...]                       which KV lies where, as the scheduler wrote it down (`kvstore.kv_directory`)

The launcher makes them and keeps them, the arena for workers, the directory for schedulers; children get them by
inheritance, as they get the listening socket. A memfd is on no file system: no limit of /dev/shm applies, nobody else
can open it, and it is gone with the last process that holds it, however that ends. Making one takes no memory: pages
come when they are touched, those of the arena when a worker populates its region (`kvstore.arena`). Must not map them
or know what lies in them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pagemill.errors import UsageError
from pagemill.ids import NONE

#: Slots start on pages, so that whole ones can be pinned, and a slot is never smaller than what it takes.
SLOT_ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)
#: What /proc shows as `/memfd:NAME`.
ARENA_NAME = "pagemill-arena"
DIRECTORY_NAME = "pagemill-directory"
#: Room for the entries of more than a million blocks and slots: on a card only the worker knows how many there are.
DIRECTORY_BYTES = 64 * 2**20


def slot_bytes_for(block_bytes: int) -> int:
    """What one block takes in the arena."""
    return -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def create_arena(size_bytes: int) -> int:
    """A descriptor that children do not inherit by themselves, of a size that nobody can change. Raises OSError."""
    return _create_sealed(ARENA_NAME, size_bytes)


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


@contextmanager
def kept_directory(size_bytes: int = DIRECTORY_BYTES) -> Iterator[int]:
    """A directory for as long as the context lasts, all zeros. Raises UsageError."""
    try:
        fd = _create_sealed(DIRECTORY_NAME, size_bytes)
    except OSError as error:
        raise UsageError(f"the system gives no shared memory of {size_bytes} bytes: {error.strerror}; raise its limit on the size of files") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _create_sealed(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Shrinking it under a mapping would kill its user with SIGBUS; growing it would evade the memory plan.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
