"""The invariants themselves: whatever is broken in a core's books is found, and told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.messages import BlockId, PlanId, RowId
from scheduler.core import SchedulerCore
from scheduler.debug_state import debug_state
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
    "planned tokens": (_break_planned_tokens, "plans in flight say 1"),
    "lost tokens": (_break_prompt, "lost prompt tokens"),
    "a block too many": (lambda core: running(core).tables[0].append(core.memory.pool.allocate()), "holds 4 blocks for 10 positions"),
    "a block too few": (lambda core: running(core).tables[0].truncate(2), "holds 2 blocks for 10 positions"),
    "a waiting one holds": (lambda core: core.queues.waiting[0].tables[0].append(BlockId(11)), "does not run and holds something"),
    "references": (lambda core: core.memory.pool.reference(running(core).tables[0][0]), "counts 2 references, tables hold 1"),
    "leak": (lambda core: core.memory.pool.allocate(), "counts 1 references, tables hold 0"),
    "another prefix": (lambda core: running(core).keys.__setitem__(0, b"other"), "holds another prefix"),
    "cached without a key": (lambda core: core.memory.pool.index.remove(core.memory.pool.allocate()), "tables hold 0"),
    "key lost": (lambda core: core.memory.pool.index.remove(next(iter(core.memory.pool.index.entries().values()))), "without a key"),
    "waits for nobody": (lambda core: core.memory.announce(core.queues.waiting[0]), "others wait for its blocks"),
    "plan forgotten": (lambda core: core.plans.clear(), "plans in flight say 0"),
    "two plans": (lambda core: core.plans.append(core.plans[0]), "plans in flight say 2"),
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


def test_blocks_do_not_stay_behind_a_fence_when_no_plan_is_in_flight() -> None:
    core = SchedulerCore()
    core.memory.pool.release(core.memory.pool.allocate(), PlanId(9))
    with pytest.raises(InvariantError, match="no plan is in flight"):
        check(core)


def test_every_row_is_free_fenced_or_held() -> None:
    driver = CoreDriver()
    driver.add([1] * 9)
    driver.step()
    running(driver.core).row = RowId(7)
    with pytest.raises(InvariantError, match="of 1 rows"):
        check(driver.core)
