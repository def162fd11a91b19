"""Deadlines: named when they are over, forgotten when they do not matter any more."""

from __future__ import annotations

import random

from pagemill.messages.sequences import SequenceKey
from scheduler.deadlines import Deadlines
from tests.helpers.core_driver import CoreDriver

DAY_S = 86_400.0


def key(number: int) -> SequenceKey:
    return SequenceKey(0, 1, number, 0)


def test_those_whose_time_is_over_are_named_once_the_earliest_first() -> None:
    deadlines = Deadlines()
    for number, until in enumerate((3.0, 1.0, 2.0)):
        deadlines.add(until, key(number))
    assert deadlines.pop_due(0.9) == []
    assert deadlines.pop_due(2.0) == [key(1), key(2)]
    assert deadlines.pop_due(2.5) == []
    assert deadlines.pop_due(9.0) == [key(0)]


def test_who_waits_no_more_is_not_named_and_who_comes_again_has_its_last_deadline() -> None:
    deadlines = Deadlines()
    for number in range(2):
        deadlines.add(1.0, key(number))
        deadlines.discard(key(number))
    deadlines.discard(key(7))
    deadlines.add(5.0, key(1))
    assert deadlines.pop_due(4.0) == []
    assert deadlines.pop_due(5.0) == [key(1)]


def test_a_hundred_thousand_that_were_served_at_once_leave_nothing_behind() -> None:
    deadlines, most = Deadlines(), 0
    patient = [key(-number) for number in range(1, 51)]
    for waiting in patient:
        deadlines.add(DAY_S, waiting)
    for number in range(100_000):
        deadlines.add(number * 0.01 + DAY_S, key(number))
        deadlines.discard(key(number))
        most = max(most, len(deadlines))
    assert most <= 2 * len(patient) + 65
    assert set(deadlines.pop_due(2 * DAY_S)) == set(patient)


def test_what_is_thrown_away_makes_no_difference() -> None:
    dice = random.Random(1)
    deadlines, waiting = Deadlines(), dict[SequenceKey, float]()
    for number in range(3000):
        now = number * 0.01
        waiting[key(number)] = now + dice.choice((0.1, 2.0, 100.0))
        deadlines.add(waiting[key(number)], key(number))
        for gone in dice.sample(list(waiting), min(len(waiting), dice.choice((0, 0, 1, 4)))):
            del waiting[gone]
            deadlines.discard(gone)
        due = deadlines.pop_due(now)
        assert [waiting[each] for each in due] == sorted(waiting.pop(each) for each in list(waiting) if waiting[each] <= now)
        assert len(deadlines) <= 2 * len(waiting) + 65


def test_a_core_notes_no_deadlines_of_those_that_were_started_or_have_ended() -> None:
    driver = CoreDriver(num_blocks=64, block_size=4, max_num_seqs=4)
    for number in range(200):
        driver.add([1, 2, number % 30], max_tokens=2, max_queue_s=DAY_S)
        if number % 3:
            driver.abort(list(driver.core.sequences)[-1])
        driver.step()
    assert len(driver.core._deadlines) <= 2 * len(driver.core.sequences) + 65
