"""The directory: what is found after a crash is never more than what was certain before it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.block_pool import BlockPool
from kvstore.kv_directory import KvDirectory, directory_bytes
from kvstore.swap_space import SwapSpace
from pagemill.ids import NO_PLAN, BlockId, SwapSlotId

KEYS = [bytes([number]) * 32 for number in range(1, 8)]
GEOMETRY: dict[str, Any] = {"num_blocks": 4, "num_slots": 3, "block_bytes": 4096, "block_size": 16}


def memory() -> memoryview:
    return memoryview(bytearray(directory_bytes(4, 3)))


def test_entries_are_found_by_the_next_scheduler_of_the_same_workers() -> None:
    shared = memory()
    first = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    first.blocks.write(BlockId(2), KEYS[0])
    first.blocks.write(BlockId(0), KEYS[1] + b"\x01\x00")  # of a second group
    first.slots.write(SwapSlotId(1), KEYS[2])
    second = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    assert second.blocks.entries() == [(0, KEYS[1] + b"\x01\x00"), (2, KEYS[0])]
    assert second.slots.entries() == [(1, KEYS[2])]


def test_new_workers_have_a_new_pool_and_the_same_arena() -> None:
    shared = memory()
    first = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    first.blocks.write(BlockId(2), KEYS[0])
    first.slots.write(SwapSlotId(1), KEYS[2])
    second = KvDirectory(shared, **GEOMETRY, pool_incarnation=1)
    assert second.blocks.entries() == []
    assert second.slots.entries() == [(1, KEYS[2])]
    assert KvDirectory(shared, **GEOMETRY, pool_incarnation=0).blocks.entries() == [], "what was forgotten does not come back"


@pytest.mark.parametrize("num_blocks", [1, 3, 6])
def test_a_pool_of_another_size_leaves_the_slots_what_they_are(num_blocks: int) -> None:
    shared = memoryview(bytearray(directory_bytes(6, 3)))
    first = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    for number in range(4):
        first.blocks.write(BlockId(number), KEYS[number])
    for number in range(3):
        first.slots.write(SwapSlotId(number), KEYS[number + 4])
    second = KvDirectory(shared, **(GEOMETRY | {"num_blocks": num_blocks}), pool_incarnation=1)
    assert second.blocks.entries() == []
    for number in range(num_blocks):
        second.blocks.write(BlockId(number), KEYS[0])
    third = KvDirectory(shared, **GEOMETRY, pool_incarnation=2)
    assert (third.blocks.entries(), third.slots.entries()) == ([], [(number, KEYS[number + 4]) for number in range(3)])


@pytest.mark.parametrize("changed", [{"num_slots": 2}, {"num_slots": 4}, {"block_bytes": 8192}, {"block_size": 32}])
def test_another_arena_forgets_everything(changed: dict[str, int]) -> None:
    shared = memoryview(bytearray(directory_bytes(4, 4)))
    first = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    first.blocks.write(BlockId(1), KEYS[0])
    first.slots.write(SwapSlotId(0), KEYS[1])
    second = KvDirectory(shared, **(GEOMETRY | changed), pool_incarnation=0)
    assert (second.blocks.entries(), second.slots.entries()) == ([], [])
    third = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    assert (third.blocks.entries(), third.slots.entries()) == ([], []), "what was forgotten does not come back"


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a directory of 4 blocks and 3 swap slots takes \d+ bytes, there are 10"):
        KvDirectory(memory()[:10], **GEOMETRY, pool_incarnation=0)


def test_a_writer_that_dies_half_way_leaves_an_entry_that_says_nothing() -> None:
    class KilledError(Exception):
        pass

    def die() -> None:
        if is_deadly:
            raise KilledError

    is_deadly = False
    directory = KvDirectory(memory(), **GEOMETRY, pool_incarnation=0, on_write=die)
    directory.blocks.write(BlockId(1), KEYS[0])
    assert directory.blocks.entries() == [(1, KEYS[0])]
    is_deadly = True
    with pytest.raises(KilledError):
        directory.blocks.write(BlockId(1), KEYS[1])
    assert directory.blocks.entries() == []


def test_what_is_private_to_a_sequence_is_left_out() -> None:
    directory = KvDirectory(memory(), **GEOMETRY, pool_incarnation=0)
    directory.slots.write(SwapSlotId(0), b"private" + bytes(18))
    assert directory.slots.entries() == []


def test_a_block_is_cleared_before_it_can_be_overwritten() -> None:
    directory = KvDirectory(memory(), **GEOMETRY, pool_incarnation=0)
    pool = BlockPool(1)
    pool.index.mirror = directory.blocks
    block = pool.allocate()
    pool.index.insert(KEYS[0], block)
    assert directory.blocks.entries() == [(block, KEYS[0])]
    pool.release(block, NO_PLAN)
    assert directory.blocks.entries() == [(block, KEYS[0])], "a cached block keeps its content"
    pool.allocate()
    assert directory.blocks.entries() == []


def test_what_is_expendable_is_written_down_until_somebody_refers_to_it() -> None:
    shared = memory()
    directory = KvDirectory(shared, **GEOMETRY, pool_incarnation=0)
    pool = BlockPool(4)
    pool.index.mirror = directory.blocks
    blocks = [pool.allocate() for _ in range(3)]
    for key, block in zip(KEYS, blocks, strict=False):
        pool.index.insert(key, block)
        pool.release(block, expendable=block != blocks[0])
    assert directory.blocks.expendable() == blocks[1:]
    assert len(directory.blocks.entries()) == 3
    pool.reference(blocks[1])
    assert KvDirectory(shared, **GEOMETRY, pool_incarnation=0).blocks.expendable() == blocks[2:]
    pool.release(blocks[1])
    pool.forget(blocks[2])
    assert directory.blocks.expendable() == []
    directory.blocks.mark(blocks[2], is_expendable=True)
    assert directory.blocks.entries() == [(blocks[0], KEYS[0]), (blocks[1], KEYS[1])], "what says nothing is not marked"


def test_a_slot_is_written_down_when_its_copy_is_done_and_not_before() -> None:
    directory = KvDirectory(memory(), **GEOMETRY, pool_incarnation=0)
    swap = SwapSpace(3)
    swap.index.mirror = directory.slots
    slot = swap.allocate()
    swap.index.insert(KEYS[0], slot)
    swap.fill(slot, 7)
    assert directory.slots.entries() == []
    swap.filled(slot)
    assert directory.slots.entries() == [(slot, KEYS[0])]
    swap.release(slot)
    for _ in range(3):
        swap.allocate()
    assert directory.slots.entries() == []


def test_a_slot_whose_copy_failed_is_not_written_down() -> None:
    directory = KvDirectory(memory(), **GEOMETRY, pool_incarnation=0)
    swap = SwapSpace(3)
    swap.index.mirror = directory.slots
    slot = swap.allocate()
    swap.index.insert(KEYS[0], slot)
    swap.fill(slot, 7)
    swap.index.remove(slot)
    swap.filled(slot)
    assert directory.slots.entries() == []


def test_a_new_pool_adopts_what_lies_in_it_as_cached() -> None:
    pool = BlockPool(4)
    assert pool.adopt([(BlockId(2), KEYS[0]), (BlockId(3), KEYS[1]), (BlockId(1), KEYS[0]), (BlockId(9), KEYS[2])]) == 2
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.index.find(KEYS[0]) == 2
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3], "free ones go first"
    assert pool.index.find(KEYS[0]) is None
