"""What a turn costs does not depend on how many wait: counted in calls, so that it is the same on every machine."""

from __future__ import annotations

import sys
from array import array
from types import FrameType
from typing import Any

from pagemill.ids import pack_ids
from pagemill.keys import prefix_keys
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from scheduler.events import Effect, Event
from tests.helpers.core_driver import ROOT, CoreDriver
from tests.helpers.swapping import prompt


def one_that_waits(number: int) -> AddRequest:
    """Too long to start while any other runs."""
    tokens = prompt(90, number % 7)
    keys = prefix_keys(ROOT, array("i", tokens), 4)
    return AddRequest(SequenceKey(0, 2, number, 0), f"w{number}", pack_ids(tokens), b"", SamplingParams(), Limits(4), 0, 0, 1000.0 + number, ROOT, keys)


class CountedCalls:
    """Of Python functions, by all that the core makes of events."""

    def __init__(self, driver: CoreDriver) -> None:
        self.num_calls = 0
        self._handle, driver.core.handle = driver.core.handle, self._count  # type: ignore[method-assign]

    def _count(self, event: Event, now: float) -> list[Effect]:
        before = sys.getprofile()
        sys.setprofile(self._see)
        try:
            return self._handle(event, now)
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType, what: str, argument: Any) -> None:
        self.num_calls += what == "call"


def calls_under_pressure(num_waiting: int) -> int:
    """Four grow in a pool that holds two of them, so they take from each other and come back, with copies out and in."""
    driver = CoreDriver(num_blocks=24, block_size=4, max_num_seqs=4, max_num_queued=10_000, num_swap_slots=32, prefill_tok_s=1.0)
    for stem in range(4):
        driver.add(prompt(9, stem), max_tokens=50)
    while not driver.core.memory.loose_holders():
        driver.step()
    for number in range(num_waiting):
        driver.core.handle(one_that_waits(number), driver.now)
    num_decisions = driver.core.preemption.decisions.next_number
    counted = CountedCalls(driver)
    for _ in range(25):
        driver.step()
    assert driver.core.preemption.decisions.next_number > num_decisions, "somebody had to yield"
    assert driver.snapshots[-1].num_waiting == num_waiting
    return counted.num_calls


def test_a_turn_under_pressure_makes_no_more_calls_with_hundreds_that_wait() -> None:
    few, many = calls_under_pressure(10), calls_under_pressure(500)
    assert many < 1.05 * few
