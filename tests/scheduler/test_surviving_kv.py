"""What outlives a core: the next one adopts what the former one wrote down, as far as it is true of its workers."""

from __future__ import annotations

import pytest

from kvstore.kv_directory import directory_bytes
from pagemill.ids import BlockId, SwapSlotId
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.events import Adopt
from scheduler.surviving_kv import SurvivingKv

CONFIG = CoreConfig(num_blocks=6, block_size=4, num_swap_slots=3)
BLOCK, SLOT = (BlockId(4), b"b" * 32), (SwapSlotId(2), b"s" * 32)


def memory(num_bytes: int = directory_bytes(6, 3)) -> memoryview:
    return memoryview(bytearray(num_bytes))


def written(kv: SurvivingKv) -> SchedulerCore:
    """A core has noted one block and one slot."""
    core = SchedulerCore(CONFIG)
    kv.follow(core)
    blocks, slots = core.memory.pool.index.mirror, core.swapping.swap.index.mirror
    assert blocks is not None
    assert slots is not None
    blocks.write(*BLOCK)
    blocks.mark(BLOCK[0], True)
    slots.write(*SLOT)
    return core


def test_the_next_core_of_the_same_workers_adopts_all_and_one_of_new_workers_what_is_in_the_arena() -> None:
    shared = memory()
    kv = SurvivingKv(shared)
    assert kv.open(CONFIG, 0) == Adopt((), ())
    written(kv)
    everything = Adopt((BLOCK,), (SLOT,), expendable_blocks=(BLOCK[0],))
    assert kv.open(CONFIG, 0) == SurvivingKv(shared).open(CONFIG, 0) == everything
    assert kv.open(CONFIG, 1) == Adopt((), (SLOT,))


def test_what_is_disowned_is_adopted_by_nobody_and_what_is_written_afterwards_is() -> None:
    kv = SurvivingKv(memory())
    kv.open(CONFIG, 0)
    written(kv)
    kv.disown()
    assert kv.open(CONFIG, 0) == Adopt((), ())
    written(kv)
    kv.disown()
    written(kv)
    assert kv.open(CONFIG, 0) == Adopt((BLOCK,), (SLOT,), expendable_blocks=(BLOCK[0],))


def test_without_memory_for_it_nothing_outlives_a_core() -> None:
    without, too_small = SurvivingKv(None), SurvivingKv(memory(64))
    assert without.open(CONFIG, 0) is None
    with pytest.raises(ValueError, match="bytes"):
        too_small.open(CONFIG, 0)
    for kv in (without, too_small):
        core = SchedulerCore(CONFIG)
        kv.follow(core)
        kv.disown()
        assert (core.memory.pool.index.mirror, core.swapping.swap.index.mirror) == (None, None)


def test_workers_with_too_many_blocks_leave_no_directory_behind_of_an_arena_that_they_overwrite() -> None:
    shared = memory()
    kv = SurvivingKv(shared)
    kv.open(CONFIG, 0)
    written(kv)
    with pytest.raises(ValueError, match="bytes"):
        kv.open(CoreConfig(num_blocks=1000, block_size=4, num_swap_slots=3), 1)
    core = SchedulerCore(CONFIG)
    kv.follow(core)
    assert core.memory.pool.index.mirror is None, "it would write where the arena of others is described"
    assert SurvivingKv(shared).open(CONFIG, 0) == Adopt((), ())
