"""Groups with windows where memory is short: what is counted on is there, nobody yields in vain, and a long context costs no more than a short one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pagemill.ids import NO_PLAN, BlockId
from pagemill.messages.sequences import KvGroup, SamplingParams, SequenceKey
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32
FULL = KvGroup()
#: Blocks of four: a window of six reaches two blocks back from a border.
SIXES = (FULL, KvGroup(6))


def prompt(num_tokens: int, stem: int = 0) -> list[int]:
    return [(stem * 7 + i * 3 + i // 5) % VOCAB for i in range(num_tokens)]


def driver_of(groups: tuple[KvGroup, ...] = SIXES, **numbers: object) -> CoreDriver:
    return CoreDriver(None, **({"num_blocks": 64, "block_size": 4, "groups": groups, "max_model_len": 4096} | numbers))


def run_to(driver: CoreDriver, key: SequenceKey, num_computed: int) -> Sequence:
    """Steps until so many positions of the sequence are computed."""
    sequence = driver.core.sequences[key]
    while sequence.num_computed_tokens < num_computed:
        assert driver.step()
    return sequence


def take_what_is_left(driver: CoreDriver, but: BlockId | None = None) -> None:
    """Nothing is obtainable any more, `but` one cached block if there is one."""
    pool = driver.core.memory.pool
    if but is not None:
        pool.reference(but)
    while pool.num_obtainable:
        pool.allocate()
    if but is not None:
        pool.release(but)


# --- what is counted on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_what_the_needy_one_takes_over_from_a_victim_is_not_counted_as_room_for_it(kind: str) -> None:
    """Four of the victim's nine blocks are its own. To compute them again it gives up all, and the needy one refers to the other five."""
    driver = driver_of(preemption=kind, num_swap_slots=64, scheduling_policy="priority")
    other = driver.add(prompt(30, 3), max_tokens=9, priority=5)
    victim = driver.add(prompt(22), max_tokens=9, priority=5)
    driver.step()
    needy = driver.core.sequences[driver.add(prompt(16) + prompt(20, 5), max_tokens=9, priority=0)]
    core, pool = driver.core, driver.core.memory.pool
    hits = core.memory.adoptable(needy)
    assert [pool.count(block) for block in hits] == [1, 1, 1, 1, 0, 1], "four, and of the window the one that the victim has left behind"
    take_what_is_left(driver, but=hits[4])
    core.preemption.head = needy
    assert core.preemption.make_room(needy, num_first_blocks=6)
    assert core.memory.adopt_prefix(needy) == 16
    assert pool.num_obtainable >= 6
    assert [core.sequences[key].status for key in (victim, other)] == [Status.PREEMPTED] * 2


def test_cached_blocks_that_the_needy_one_takes_over_are_no_room_for_its_first_step() -> None:
    driver = driver_of((FULL,), num_blocks=12, max_num_batched_tokens=8, scheduling_policy="priority")
    driver.add(prompt(16), max_tokens=1)
    driver.run()
    driver.add(prompt(19, 4), max_tokens=20, priority=5)
    run_to(driver, next(iter(driver.core.sequences)), 19)
    needy = driver.core.sequences[driver.add(prompt(16) + prompt(16, 5), max_tokens=3, priority=0)]
    core = driver.core
    core.preemption.head = needy
    assert core.memory.num_cached_hits(needy) == 4
    assert core.preemption.make_room(needy, num_first_blocks=4)
    core.memory.adopt_prefix(needy)
    assert core.memory.pool.num_obtainable >= 4
    assert len(core.queues.preempted) == 1


# --- who waits instead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_plans", [1, 2])
def test_nobody_yields_for_a_block_that_comes_back_with_the_plan_in_flight(num_plans: int) -> None:
    """Each has two blocks of its window, and needs a third only until what is in flight has left the first behind."""
    driver = driver_of((KvGroup(4),), num_blocks=7, max_plans_in_flight=num_plans, prefix_caching=False)
    keys = [driver.add(prompt(5, stem), max_tokens=40) for stem in range(3)]
    num_steps = driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected_tokens(prompt(5, stem), SamplingParams(), 0, 4096, 40, VOCAB)
        assert driver.finished[key].num_preemptions == 0
    assert num_steps < 60, "a step is lost at a border of blocks, no more"


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_one_with_a_slice_in_flight_waits_for_blocks_behind_the_fence_of_a_plan_and_any_other_takes_them(is_in_flight: bool) -> None:
    driver = driver_of((FULL,), num_blocks=7, max_plans_in_flight=2, prefix_caching=False)
    first, ending, last = (driver.add(prompt(length, stem), max_tokens=20) for stem, length in enumerate((5, 7, 7)))
    needy = run_to(driver, first, 6)
    driver.turn()
    driver.abort(ending)
    take_what_is_left(driver)
    core = driver.core
    assert core.memory.pool.num_behind_plans == 3
    if not is_in_flight:
        needy.planned_in = NO_PLAN
    assert core.preemption.extend(needy, 4 * len(needy.tables[0]) + 1) is not is_in_flight
    assert core.sequences[last].status is (Status.RUNNING if is_in_flight else Status.PREEMPTED)


def test_nobody_waits_for_plans_that_do_not_give_back_enough() -> None:
    driver = driver_of((FULL,), num_blocks=9, max_plans_in_flight=2, prefix_caching=False)
    first, ending, last = (driver.add(prompt(length, stem), max_tokens=20) for stem, length in enumerate((5, 3, 7)))
    needy = run_to(driver, first, 6)
    driver.turn()
    driver.abort(ending)
    take_what_is_left(driver)
    num_coming = driver.core.memory.pool.num_behind_plans
    assert driver.core.preemption.extend(needy, 4 * (len(needy.tables[0]) + num_coming) + 1)
    assert driver.core.sequences[last].status is Status.PREEMPTED


# --- what has passed -------------------------------------------------------------------------------------


def test_what_was_left_behind_is_the_first_to_be_overwritten_after_a_scheduler_was_replaced_too() -> None:
    driver = driver_of(max_num_batched_tokens=8)
    driver.add(prompt(17, 3), max_tokens=1)
    driver.run()
    driver.add(prompt(17, 3) + prompt(30), max_tokens=1)
    driver.run()

    def expendable() -> set[bytes | None]:
        pool = driver.core.memory.pool
        return {pool.index.key_of(block) for block in pool.oldest_cached(64) if pool.is_expendable(block)}

    before = expendable()
    assert len(before) == 2 + 5
    driver.restart_scheduler()
    assert expendable() == before
    pool = driver.core.memory.pool
    assert [pool.is_expendable(block) for block in pool.oldest_cached(8)] == [True] * 7 + [False]


def test_the_last_entries_of_a_sequence_come_first_and_none_that_is_behind() -> None:
    driver = driver_of((KvGroup(6), FULL, KvGroup(3)))
    sequence = run_to(driver, driver.add(prompt(22), max_tokens=9), 22)
    assert [table.num_behind for table in sequence.tables] == [3, 0, 4]
    entries = list(sequence.entries_from_end(5))
    assert [(index, group) for index, group, _ in entries] == [(4, 0), (4, 1), (4, 2), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1)]
    assert all(block == sequence.tables[group][index] for index, group, block in entries)
    assert list(sequence.entries_from_end(0)) == []


def lines_run(function: Any, *args: object) -> int:
    """How many lines of Python that took."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


def test_asking_for_the_end_of_a_sequence_costs_no_more_the_more_it_has_left_behind() -> None:
    driver = driver_of((KvGroup(6), KvGroup(9)), num_swap_slots=64, max_num_batched_tokens=16)
    sequence = run_to(driver, driver.add(prompt(3000), max_tokens=99), 100)
    core = driver.core

    def costs() -> list[int]:
        sequence.slots[0].clear()
        return [lines_run(core.swapping.tail, sequence, 100, {}), lines_run(core.early_copies._copy_end_of, sequence, 0, 100)]

    short = costs()
    run_to(driver, sequence.key, 2900)
    assert all(now <= 2 * before for now, before in zip(costs(), short, strict=True))
