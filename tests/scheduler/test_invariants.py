"""The invariants themselves: whatever is broken in a core's books is found, and told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.ids import BEHIND, NONE, BlockId, PlanId, RowId
from pagemill.messages.sequences import KvGroup
from scheduler.core import SchedulerCore
from scheduler.debug_state import debug_state
from scheduler.events import Preempt
from scheduler.invariants import InvariantError, check
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import CoreDriver


def core_at_work() -> SchedulerCore:
    """One sequence runs with a plan in flight, one waits, and the prefix of a finished one is cached."""
    driver = CoreDriver(num_blocks=12, block_size=4, max_num_seqs=1)
    driver.add([1] * 9, max_tokens=1)
    driver.run()
    driver.add([2] * 9, max_tokens=5)
    driver.step()
    driver.add([3] * 9, max_tokens=5)
    driver.turn()
    check(driver.core)
    return driver.core


def running(core: SchedulerCore) -> Sequence:
    return core.queues.running[0]


def _break_status(core: SchedulerCore) -> None:
    running(core).status = Status.PREEMPTED


def _break_planned_tokens(core: SchedulerCore) -> None:
    running(core).num_planned_tokens += 1


def _break_prompt(core: SchedulerCore) -> None:
    del running(core).token_ids[8:]


BREAKAGES: dict[str, tuple[Callable[[SchedulerCore], object], str]] = {
    "two queues": (lambda core: core.queues.preempted.append(running(core)), "two queues"),
    "unknown to the queues": (lambda core: core.queues.waiting.clear(), "disagree about who is alive"),
    "status": (_break_status, "is in the queue of running"),
    "order": (lambda core: core.queues.waiting.append(core.queues.running.pop()), "is in the queue of waiting"),
    "planned tokens": (_break_planned_tokens, r"plans in flight say \[1, 1\]"),
    "lost tokens": (_break_prompt, "lost prompt tokens"),
    "a block too many": (lambda core: running(core).tables[0].append(core.memory.pool.allocate()), "holds 4 blocks for 10 positions"),
    "a block too few": (lambda core: running(core).tables[0].truncate(2), "holds 2 blocks for 10 positions"),
    "a waiting one holds": (lambda core: core.queues.waiting[0].tables[0].append(BlockId(11)), "holds 1 blocks for 0 positions"),
    "references": (lambda core: core.memory.pool.reference(running(core).tables[0][0]), "counts 2 references, there are 1"),
    "leak": (lambda core: core.memory.pool.allocate(), "counts 1 references, there are 0"),
    "another prefix": (lambda core: running(core).keys.__setitem__(0, b"other"), "holds another prefix"),
    "cached without a key": (lambda core: core.memory.pool.index.remove(core.memory.pool.allocate()), "there are 0"),
    "key lost": (lambda core: core.memory.pool.index.remove(next(iter(core.memory.pool.index.entries().values()))), "without a key"),
    "waits in vain": (lambda core: core.memory._computing.update({running(core).keys[0]: running(core)}), "others wait for what .* has"),
    "waits for nobody": (lambda core: core.memory.announce(core.queues.waiting[0]), "others wait for its blocks"),
    "plan forgotten": (lambda core: core.plans.clear(), r"plans in flight say \[0, 0\]"),
    "two plans": (lambda core: core.plans.append(core.plans[0]), r"plans in flight say \[2, 2\]"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_what_is_broken_is_found_and_told(name: str) -> None:
    breakage, story = BREAKAGES[name]
    core = core_at_work()
    breakage(core)
    with pytest.raises(InvariantError, match=story):
        check(core)
    report = debug_state(core).invariants
    assert not report.ok
    assert report.error is not None


def core_that_swaps() -> SchedulerCore:
    """One sequence is on its way back from the arena, one runs, and copies are in flight both ways."""
    driver = CoreDriver(None, num_blocks=12, block_size=4, num_swap_slots=8, max_num_seqs=2, prefill_tok_s=1.0, prefix_caching=False, swap_in_bytes_s=5e7)
    driver.auto_transfers = False
    victim = driver.add([1] * 9, max_tokens=5)
    driver.step()
    driver.handle(Preempt(victim, "swap", 2))
    driver.turn()
    while driver.worker.transfers:
        driver.worker.carry_out(driver.worker.transfers[0], 1)
    driver.tell_transfers()
    driver.answer()
    other = driver.add([2] * 9, max_tokens=5)
    driver.turn()
    driver.answer()
    driver.handle(Preempt(other, "swap", 1))
    driver.turn()
    check(driver.core)
    assert {transfer.direction for transfer in driver.core.swapping.transfers.in_flight()} == {"in", "out"}
    return driver.core


def _returning(core: SchedulerCore) -> Sequence:
    return next(sequence for sequence in core.queues if sequence.arriving)


def _forget_a_transfer(core: SchedulerCore) -> None:
    core.swapping.transfers._in_flight.popitem()


SWAP_BREAKAGES: dict[str, tuple[Callable[[SchedulerCore], object], str]] = {
    "a strong reference too many": (lambda core: core.memory.pool.strengthen(_returning(core).tables[0][0]), "weak references are counted wrongly"),
    "an absent entry too many": (lambda core: setattr(_returning(core), "num_absent", 5), "counts 5 absent entries"),
    "a slot without a block": (lambda core: _returning(core).slots[0].popitem(), "slots are held for"),
    "an entry away without a slot": (lambda core: _returning(core).tables[0].__setitem__(0, NONE), "slots are held for"),
    "a leaked slot": (lambda core: core.swapping.swap.allocate(), "counts 1 references, there are 0"),
    "a slot let go too early": (lambda core: core.swapping.swap.release(next(iter(_returning(core).slots[0].values()))), "there are 2"),
    "a transfer forgotten": (_forget_a_transfer, "references, there are"),
    "an arrival of no transfer": (lambda core: _returning(core).arriving.update({(0, 0): 999}), "slots are held for|nobody carries out"),
    "the background": (lambda core: core.swapping.transfers._num_background.update({"in": 9}), "counted wrongly"),
    "the backlog": (lambda core: core.swapping.transfers._num_in_flight.update({"out": 9}), "queued on the link is counted wrongly"),
    "who holds": (lambda core: core.memory._loose.clear(), "not those that hold blocks"),
    "runs weakly": (lambda core: core.queues.move(_returning(core), Status.RUNNING), "runs without all its KV"),
    "reclaimable": (lambda core: setattr(core.memory.pool, "_num_reclaimable", 99), "99 blocks are said to be reclaimable"),
}


@pytest.mark.parametrize("name", SWAP_BREAKAGES)
def test_what_is_broken_in_the_books_of_swapping_is_found_and_told(name: str) -> None:
    breakage, story = SWAP_BREAKAGES[name]
    core = core_that_swaps()
    breakage(core)
    with pytest.raises(InvariantError, match=story):
        check(core)


def core_with_a_window() -> SchedulerCore:
    """One sequence runs, and half of its blocks in the second group are behind the window."""
    driver = CoreDriver(num_blocks=32, block_size=4, groups=(KvGroup(), KvGroup(6)), prefix_caching=False)
    driver.add([1] * 17, max_tokens=5)
    driver.step()
    check(driver.core)
    assert running(driver.core).tables[1].num_behind == 2
    return driver.core


def _take_too_much(core: SchedulerCore) -> None:
    core.memory.leave_behind(running(core), 24)


def _take_too_little(core: SchedulerCore) -> None:
    table = running(core).tables[1]
    table[1], table.num_behind = core.memory.pool.allocate(), 1


WINDOW_BREAKAGES: dict[str, tuple[Callable[[SchedulerCore], object], str]] = {
    "too much": (_take_too_much, "lacks 2 blocks that a window reaches"),
    "too little": (_take_too_little, "keeps 1 blocks behind a window"),
    "behind a full group": (lambda core: running(core).tables[0].leave_behind(1), "lacks 1 blocks that a window reaches"),
    "a hole": (lambda core: running(core).tables[1].__setitem__(3, BEHIND), "not the first 2 entries are behind"),
    "the sum": (lambda core: setattr(running(core), "num_behind", 5), "counts 5 entries behind windows, there are 2"),
    "given up and held": (lambda core: core.memory.pool.allocate(), "counts 1 references, there are 0"),
}


@pytest.mark.parametrize("name", WINDOW_BREAKAGES)
def test_what_is_broken_behind_windows_is_found_and_told(name: str) -> None:
    breakage, story = WINDOW_BREAKAGES[name]
    core = core_with_a_window()
    breakage(core)
    with pytest.raises(InvariantError, match=story):
        check(core)


def test_blocks_do_not_stay_behind_a_fence_when_no_plan_is_in_flight() -> None:
    core = SchedulerCore()
    core.memory.pool.release(core.memory.pool.allocate(), PlanId(9))
    with pytest.raises(InvariantError, match="though nothing is in flight"):
        check(core)


def test_every_row_is_free_fenced_or_held() -> None:
    driver = CoreDriver()
    driver.add([1] * 9)
    driver.step()
    running(driver.core).row = RowId(7)
    with pytest.raises(InvariantError, match="of 1 rows"):
        check(driver.core)
