"""Arena and directory as the launcher holds them: sealed, private, and gone afterwards."""

from __future__ import annotations

import os
import resource

import pytest

from pagemill.arena_file import DIRECTORY_BYTES, SLOT_ALIGNMENT_BYTES, create_arena, kept_arena, kept_directory, slot_bytes_for
from pagemill.errors import UsageError
from pagemill.ids import NONE

SIZE = 16 * SLOT_ALIGNMENT_BYTES


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_nobody_can_change_its_size() -> None:
    with kept_arena(SIZE) as fd:
        assert os.fstat(fd).st_size == SIZE
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert os.pwrite(fd, b"x", SIZE - 1) == 1, "its content is another matter"


def test_children_do_not_get_it_by_themselves_and_it_ends_with_its_context() -> None:
    with kept_arena(SIZE) as fd:
        assert not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:pagemill-arena (deleted)"
    assert not is_open(fd)


def test_a_directory_is_sealed_and_private_and_takes_no_memory_yet() -> None:
    with kept_directory() as fd:
        assert os.fstat(fd).st_size == DIRECTORY_BYTES
        assert os.fstat(fd).st_blocks == 0
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:pagemill-directory (deleted)"
    assert not is_open(fd)


def test_it_takes_no_memory_yet() -> None:
    with kept_arena(2**40) as fd:
        assert os.fstat(fd).st_blocks == 0


def test_none_is_asked_for_and_none_is_made() -> None:
    with kept_arena(0) as fd:
        assert fd == NONE


def test_a_system_that_gives_none_is_one_line_with_the_flag() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, hard))
    try:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(UsageError, match=rf"--swap-memory: the system gives no shared memory of {SIZE} bytes: File too large; lower it"), kept_arena(SIZE):
            pass
        with pytest.raises(UsageError, match=rf"the system gives no shared memory of {SIZE} bytes: File too large"), kept_directory(SIZE):
            pass
        assert os.listdir("/proc/self/fd") == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    os.close(create_arena(SIZE))


@pytest.mark.parametrize(("block", "slots"), [(1, 1), (SLOT_ALIGNMENT_BYTES, 1), (SLOT_ALIGNMENT_BYTES + 1, 2), (737280, 737280 // SLOT_ALIGNMENT_BYTES)])
def test_a_slot_is_a_block_rounded_up_to_pages(block: int, slots: int) -> None:
    assert slot_bytes_for(block) == slots * SLOT_ALIGNMENT_BYTES
