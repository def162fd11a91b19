"""The arena's bytes: whose they are, when they are there, and how it ends when they cannot be had."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import arena
from kvstore.arena import ArenaError, Region, map_region
from pagemill.arena_file import SLOT_ALIGNMENT_BYTES as SLOT
from pagemill.arena_file import create_arena
from tests.helpers.server import ROOT

#: Two pieces and a bit.
NUM_SLOTS = 2 * arena._PIECE_BYTES // SLOT + 3
REGION = NUM_SLOTS * SLOT


@pytest.fixture
def fd() -> Iterator[int]:
    """An arena of two regions."""
    made = create_arena(2 * REGION)
    yield made
    os.close(made)


def populated(fd: int, rank: int = 0) -> Region:
    region = map_region(fd, rank, REGION, SLOT)
    with region.populating():
        region.wait_until_populated()
    return region


def taken_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def mapping_of(region: Region) -> dict[str, list[str]]:
    """What the kernel says of the mapping in /proc/self/smaps."""
    start = f"{arena._address(region.memory):08x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    facts: dict[str, list[str]] = {}
    for line in lines:
        name, colon, values = line.partition(":")
        if not colon or " " in name:  # the next mapping
            break
        facts[name] = values.split()
    return facts


def test_what_was_asked_for_is_resident_and_nothing_else(fd: int) -> None:
    assert taken_bytes(fd) == 0, "making an arena takes no memory"
    region = populated(fd)
    assert (region.num_slots, region.fraction) == (NUM_SLOTS, 1.0)
    facts = mapping_of(region)
    assert facts["Size"] == facts["Rss"] == [str(REGION // 1024), "kB"]
    assert taken_bytes(fd) == REGION


def test_it_is_left_out_of_core_dumps_and_shared(fd: int) -> None:
    flags = mapping_of(populated(fd))["VmFlags"]
    assert {"dd", "sh"} <= set(flags)


def test_a_region_is_a_place_of_its_own_that_outlives_its_mapping(fd: int) -> None:
    first, second = populated(fd, rank=0), populated(fd, rank=1)
    first.memory[:4], first.memory[REGION - 4 :] = b"head", b"tail"
    assert second.memory[:4] == second.memory[REGION - 4 :] == bytes(4)
    first.memory.close()
    again = populated(fd, rank=0)
    assert (again.memory[:4], again.memory[REGION - 4 :]) == (b"head", b"tail"), "populating changes nothing"


def test_another_process_that_maps_and_populates_it_finds_every_byte(fd: int) -> None:
    region = populated(fd)
    content = os.urandom(REGION)
    region.memory[:] = content
    region.memory.close()
    script = f"""
import hashlib
from kvstore.arena import map_region
region = map_region({fd}, 0, {REGION}, {SLOT})
with region.populating():
    region.wait_until_populated()
print(region.num_slots, hashlib.sha256(region.memory).hexdigest())
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, pass_fds=[fd], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [str(NUM_SLOTS), hashlib.sha256(content).hexdigest()]


def test_the_mapping_needs_the_descriptor_no_longer() -> None:
    made = create_arena(REGION)
    region = populated(made)
    os.close(made)
    region.memory[7] = 42
    assert region.memory[7] == 42


def test_what_is_left_over_behind_the_last_whole_slot_is_not_used(fd: int) -> None:
    region = map_region(fd, 0, REGION, 3 * SLOT)
    assert region.num_slots == NUM_SLOTS // 3
    assert len(region.memory) == region.num_slots * 3 * SLOT < REGION


def test_the_course_is_told_and_ends_at_the_whole(fd: int) -> None:
    told: list[float] = []
    region = map_region(fd, 0, REGION, SLOT)
    with region.populating():
        region.wait_until_populated(told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize(
    ("size", "slot", "says"),
    [
        (4 * REGION, SLOT, "--swap-memory: .* bytes of the arena cannot be mapped: mmap length is greater than file size"),
        (SLOT, 2 * SLOT, f"--swap-memory: a share of {SLOT} bytes holds no block, which takes {2 * SLOT}; raise it"),
    ],
)
def test_a_region_that_is_not_there_is_refused(fd: int, size: int, slot: int, says: str) -> None:
    with pytest.raises(ArenaError, match=says):
        map_region(fd, 0, size, slot)


def test_memory_that_runs_out_is_an_error_with_both_numbers(fd: int) -> None:
    region = map_region(fd, 0, REGION, SLOT)
    present = region._make_present

    def run_out(start: int, size: int) -> None:
        if start:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        present(start, size)

    region._make_present = run_out
    with region.populating(), pytest.raises(ArenaError, match="no memory left for swap space") as refused:
        region.wait_until_populated()
    assert f"--swap-memory: after {arena._PIECE_BYTES} of {REGION} bytes" in str(refused.value)
    assert "Cannot allocate memory" in str(refused.value)
    assert taken_bytes(fd) == arena._PIECE_BYTES


def test_the_kernels_refusal_is_an_error_and_no_signal(fd: int) -> None:
    """Under a page that no file stands behind any more, a plain access would be SIGBUS."""
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, REGION)
    region = map_region(unsealed, 0, REGION, SLOT)
    os.ftruncate(unsealed, SLOT)
    with region.populating(), pytest.raises(ArenaError, match="the system has no memory left for swap space"):
        region.wait_until_populated()
    os.close(unsealed)


def test_leaving_early_stops_it_before_the_next_piece(fd: int) -> None:
    region = map_region(fd, 0, REGION, SLOT)
    begun = threading.Event()
    pieces: list[int] = []

    def dawdle(start: int, size: int) -> None:
        pieces.append(start)
        begun.set()
        assert region._abandoned.wait(10)

    region._make_present = dawdle
    with region.populating():
        assert begun.wait(10)
    assert pieces == [0]
    assert not region._thread.is_alive()


def test_an_older_kernel_is_asked_in_another_way(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)
    os.pwrite(fd, b"kept", 2 * REGION - 4)
    region = populated(fd, rank=1)
    assert taken_bytes(fd) == REGION
    assert region.memory[REGION - 4 :] == b"kept"
    assert os.pread(fd, 1, 0) == b"\0", "the other region is there to be read"
    region.memory[0] = 1
    assert os.pread(fd, 1, REGION) == b"\x01"
    assert taken_bytes(fd) == REGION, "the right one was allocated"


def test_a_mapping_starts_and_ends_on_pages(fd: int) -> None:
    assert SLOT % mmap.PAGESIZE == 0
    assert arena._PIECE_BYTES % mmap.PAGESIZE == 0
    with pytest.raises(ArenaError, match="cannot be mapped"):
        map_region(fd, 1, SLOT + 1, SLOT)
