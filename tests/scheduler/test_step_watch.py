"""The step watch: only the oldest plan is on the clock, and its tokens count."""

from __future__ import annotations

from pagemill.ids import NO_PLAN, PlanId, RowId
from pagemill.messages.worker import Plan, Slice, Transfer, TransferDone
from scheduler.step_watch import StepWatch


def plan(number: int, *num_tokens: int) -> Plan:
    slices = tuple(Slice(RowId(row), 1, 0, tokens, False, b"", NO_PLAN, ()) for row, tokens in enumerate(num_tokens))
    return Plan(1, PlanId(number), slices, (), ())


def test_a_plan_is_late_after_its_timeout_and_what_its_tokens_take() -> None:
    watch = StepWatch(30.0, 0.1, 1)
    watch.sent(plan(1, 100, 1), 5.0)
    assert watch.late(45.0)[0] == []
    assert watch.late(45.2) == ([0], "did not complete a step in 40 s")


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
    ranks, reason = watch.late(10.5)
    assert ranks == [0, 2]
    assert reason.endswith("like ranks 0, 2 together, of which one may keep the others waiting")


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


def copying_plan(number: int, *transfer_ids: int, num_tokens: int = 0) -> Plan:
    transfers = tuple(Transfer(transfer_id, "device", 0, "arena", 0, NO_PLAN) for transfer_id in transfer_ids)
    return Plan(1, PlanId(number), plan(number, num_tokens).slices, transfers, ())


def test_copies_that_do_not_get_on_are_late_and_those_that_do_are_not() -> None:
    watch = StepWatch(10.0, 0.0, 2)
    watch.sent(copying_plan(1, 1, 2, 3), 0.0)
    for rank in (0, 1):
        watch.answered(PlanId(1), rank, 0.1)
    watch.copied(TransferDone(1, 0, (1,), True, 0.1), 9.0)
    assert watch.late(18.9) == ([], "")
    watch.copied(TransferDone(1, 0, (2, 3), False, 0.1), 18.0)
    assert watch.late(28.5) == ([1], "did not copy a block in 10 s")
    watch.copied(TransferDone(1, 1, (1, 2, 3, 99), True, 0.1), 28.6)
    assert watch.late(1000.0) == ([], "")


def test_copies_are_on_the_clock_from_when_they_are_ordered() -> None:
    watch = StepWatch(10.0, 0.0, 1)
    watch.sent(copying_plan(1, 1), 500.0)
    watch.answered(PlanId(1), 0, 500.1)
    assert watch.late(509.0)[0] == []
    assert watch.late(511.0)[0] == [0]
    watch.clear()
    assert watch.late(900.0)[0] == []


def test_nobody_tells_of_copies_in_the_middle_of_a_step() -> None:
    watch = StepWatch(10.0, 0.1, 1)
    watch.sent(copying_plan(1, 1, num_tokens=500), 0.0)
    for second in range(1, 60):
        assert watch.late(float(second)) == ([], "")
    watch.copied(TransferDone(1, 0, (1,), True, 0.1), 59.0)
    watch.answered(PlanId(1), 0, 59.0)
    assert watch.late(60.0) == ([], "")


def test_copies_that_were_not_made_when_a_step_has_ended_are_late_though_the_next_is_under_way() -> None:
    watch = StepWatch(10.0, 0.1, 1)
    watch.sent(copying_plan(1, 1, num_tokens=500), 0.0)
    for number in range(1, 12):
        assert watch.late(float(number)) == ([], "")
        watch.answered(PlanId(number), 0, float(number))
        watch.sent(plan(number + 1, 500), float(number))
    assert watch.late(11.5) == ([0], "did not copy a block in 11 s")


def test_copies_of_a_plan_that_waits_for_another_are_not_on_the_clock() -> None:
    watch = StepWatch(10.0, 0.1, 1)
    watch.sent(plan(1, 500), 0.0)
    watch.sent(copying_plan(2, 1, num_tokens=500), 0.5)
    for second in range(1, 46):
        assert watch.late(float(second)) == ([], "")
    watch.answered(PlanId(1), 0, 45.0)
    assert watch.late(46.0) == ([], "")
    watch.answered(PlanId(2), 0, 54.0)
    assert watch.late(54.9) == ([], "")
    assert watch.late(55.1) == ([0], "did not copy a block in 10 s")


def test_a_plan_that_comes_behind_one_of_a_former_core_has_the_time_of_both() -> None:
    watch = StepWatch(10.0, 0.1, 1)
    watch.sent(plan(1, 500), 0.0)
    watch.clear(still_computing=True)
    watch.clear(still_computing=True)  # the next core has failed as well, before its first plan
    watch.sent(plan(1, 1), 1.0)
    for second in range(1, 61):
        assert watch.late(float(second))[0] == []
    assert watch.late(61.5)[0] == [0]


def test_one_who_was_stopped_himself_gives_more_time() -> None:
    watch = StepWatch(10.0, 0.0, 1)
    watch.sent(plan(1, 1), 0.0)
    assert watch.late(1.0)[0] == []
    assert watch.late(100.0)[0] == []
    assert watch.late(109.0)[0] == []
    assert watch.late(110.5)[0] == [0]
