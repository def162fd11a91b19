"""Copies that share a block or a slot start in the order they were given; others may pass."""

from __future__ import annotations

from pagemill.ids import NONE
from workers.transfer_order import BOTH, Direction, Job, TransferOrder

OUT: tuple[Direction, ...] = ("out",)
IN: tuple[Direction, ...] = ("in",)


def out(block: int, slot: int, *, urgent: bool = False) -> Job:
    return Job(0, "out", block, slot, NONE, urgent, None)


def back(slot: int, block: int, *, urgent: bool = False) -> Job:
    return Job(0, "in", block, slot, NONE, urgent, None)


def order_of(*jobs: Job) -> TransferOrder:
    order = TransferOrder()
    for job in jobs:
        order.add(job)
    return order


def test_neighbours_of_one_direction_start_together_up_to_the_limit() -> None:
    jobs = [out(number, number) for number in range(5)]
    order = order_of(*jobs)
    assert order.start(BOTH, 3) == jobs[:3]
    assert order.start(BOTH, 3) == jobs[3:]
    assert order.start(BOTH, 3) == []


def test_a_batch_has_one_direction() -> None:
    first, second, third = out(0, 0), back(1, 1), out(2, 2)
    order = order_of(first, second, third)
    assert [order.start(BOTH, 9), order.start(BOTH, 9), order.start(BOTH, 9)] == [[first], [second], [third]]


def test_what_a_forward_waits_for_is_copied_in_one_go_for_each_direction() -> None:
    outs, backs = [out(number, number) for number in range(5)], [back(9 + number, number) for number in range(5)]
    jobs = [job for pair in zip(outs, backs, strict=True) for job in pair]
    order = order_of(*jobs)
    assert order.start_any_of(jobs) == outs
    order.finish(outs)
    assert order.start_any_of(jobs) == backs


def test_a_lane_takes_its_own_direction_alone() -> None:
    first, second, third = out(0, 0), back(1, 1), out(2, 2)
    order = order_of(first, second, third)
    assert order.start(IN, 9) == [second]
    assert order.start(IN, 9) == []
    assert order.start(OUT, 9) == [first, third]


def test_a_later_copy_of_the_same_block_waits_until_the_earlier_is_over() -> None:
    first, second, other = out(3, 7), back(9, 3), back(5, 5)
    order = order_of(first, second, other)
    assert order.start(BOTH, 9) == [first]
    assert order.start(BOTH, 9) == [other], "what shares nothing passes"
    order.finish([other])
    assert order.start(BOTH, 9) == []
    order.finish([first])
    assert order.start(BOTH, 9) == [second]


def test_a_later_copy_of_the_same_slot_waits_until_the_earlier_is_over() -> None:
    first, second = back(7, 1), out(2, 7)
    order = order_of(first, second)
    assert order.start(BOTH, 9) == [first]
    assert order.start(BOTH, 9) == []
    order.finish([first])
    assert order.start(BOTH, 9) == [second]


def test_background_lanes_leave_urgent_copies_alone_and_stay_behind_them() -> None:
    urgent, behind = out(1, 1, urgent=True), back(2, 1)
    order = order_of(urgent, behind)
    assert order.start(BOTH, 9) == []
    assert order.start_any_of([urgent]) == [urgent]
    order.finish([urgent])
    assert order.start(BOTH, 9) == [behind]


def test_those_ahead_are_found_through_blocks_and_slots_and_no_others() -> None:
    first, unrelated, second, urgent, later = out(1, 5), out(8, 8), back(5, 2), out(2, 6, urgent=True), out(2, 9)
    order = order_of(first, unrelated, second, urgent, later)
    assert order.with_those_ahead([urgent]) == [first, second, urgent]
    assert order.start_any_of([first, second, urgent]) == [first]
    assert order.with_those_ahead([urgent]) == [second, urgent]
    assert order.start_any_of([second, urgent]) == [], "the one ahead has started and is not over"


def test_what_waits_can_be_dropped_and_what_has_started_remains() -> None:
    started, dropped, unrelated = out(1, 1), back(1, 2), out(5, 5)
    order = order_of(started, dropped)
    order.start(BOTH, 1)
    order.add(unrelated)
    order.drop_waiting()
    assert (len(order), order.is_idle) == (0, False)
    assert (order.has_started(started), order.is_over(started), order.is_over(dropped)) == (True, False, True)
    order.finish([started])
    assert order.is_idle
    assert order.is_over(started)
    again = back(1, 2)
    order.add(again)
    assert order.start(BOTH, 9) == [again]
