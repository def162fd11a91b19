"""The step watch: only the oldest plan is on the clock, and its tokens count."""

from __future__ import annotations

from pagemill.messages import NO_PLAN, Plan, PlanId, RowId, Slice
from scheduler.step_watch import StepWatch


def plan(number: int, *num_tokens: int) -> Plan:
    slices = tuple(Slice(RowId(row), 1, 0, tokens, False, b"", NO_PLAN, ()) for row, tokens in enumerate(num_tokens))
    return Plan(1, PlanId(number), slices, (), ())


def test_a_plan_is_late_after_its_timeout_and_what_its_tokens_take() -> None:
    watch = StepWatch(30.0, 0.1, 1)
    watch.sent(plan(1, 100, 1), 5.0)
    assert watch.late(45.0)[0] == []
    ranks, seconds = watch.late(45.2)
    assert (ranks, round(seconds, 1)) == ([0], 40.2)


def test_a_plan_that_waits_for_another_is_not_on_the_clock() -> None:
    watch = StepWatch(10.0, 0.0, 1)
    watch.sent(plan(1, 1), 0.0)
    watch.sent(plan(2, 1), 1.0)
    watch.answered(PlanId(1), 0, 9.0)
    assert watch.late(18.9)[0] == []
    assert watch.late(19.1)[0] == [0]


def test_only_ranks_that_have_not_answered_are_late() -> None:
    watch = StepWatch(10.0, 0.0, 3)
    watch.sent(plan(1, 1), 0.0)
    watch.answered(PlanId(1), 1, 1.0)
    assert watch.late(10.5)[0] == [0, 2]


def test_an_idle_server_is_never_late() -> None:
    watch = StepWatch(10.0, 0.0, 1)
    watch.sent(plan(1, 1), 0.0)
    watch.answered(PlanId(1), 0, 1.0)
    watch.answered(PlanId(7), 0, 1.0)
    assert watch.late(1000.0)[0] == []


def test_after_a_restart_nothing_is_on_the_clock() -> None:
    watch = StepWatch(10.0, 0.0, 1)
    watch.sent(plan(1, 1), 0.0)
    watch.clear()
    assert watch.late(1000.0)[0] == []
