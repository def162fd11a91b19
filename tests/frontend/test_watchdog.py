"""A connection's time limits: they hold to the second, whatever was armed before, and cost a timer now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from frontend.watchdog import Watchdog


class Timer:
    def __init__(self, when: float, work: Callable[[], None]) -> None:
        self._when, self.work, self.cancelled = when, work, False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop's clock and timers."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []
        self.num_timers = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, work: Callable[[], None]) -> Timer:
        self.num_timers += 1
        self.timers.append(Timer(when, work))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.when() <= end and not timer.cancelled]:
            first = min(due, key=Timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when())
            first.work()
        self.now = end


class Transport:
    def __init__(self) -> None:
        self.is_dropped = False
        self.num_unsent = 0

    def abort(self) -> None:
        self.is_dropped = True

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


class Watched:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.transport = Loop(), Transport()
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
        self.dog = Watchdog(self.transport)  # type: ignore[arg-type]  # it needs no more of one

    def is_dropped_after(self, seconds: float) -> bool:
        self.loop.advance(seconds)
        return self.transport.is_dropped


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_it_drops_when_the_time_is_over_and_not_before(watched: Watched) -> None:
    watched.dog.arm(30)
    assert not watched.is_dropped_after(29.9)
    assert watched.is_dropped_after(0.1)


def test_a_timer_that_rings_a_moment_early_is_not_set_again(watched: Watched) -> None:
    watched.dog.arm(30)
    watched.loop.now += 30 - 1e-9  # as a clock's rounding makes it
    watched.loop.timers.pop().work()
    assert watched.transport.is_dropped
    assert watched.loop.timers == []


def test_disarmed_it_drops_nothing(watched: Watched) -> None:
    watched.dog.arm(30)
    watched.dog.disarm()
    assert not watched.is_dropped_after(1000)


@pytest.mark.parametrize("disarmed", [False, True])
@pytest.mark.parametrize(("first_s", "second_s"), [(30, 30), (2, 30), (30, 2)])
def test_armed_anew_the_last_word_counts(disarmed: bool, first_s: float, second_s: float, watched: Watched) -> None:
    watched.dog.arm(first_s)
    watched.loop.advance(1)
    if disarmed:
        watched.dog.disarm()
    watched.dog.arm(second_s)
    assert not watched.is_dropped_after(second_s - 0.1)
    assert watched.is_dropped_after(0.1)


def test_armed_again_after_its_timer_rang_for_nothing_it_still_drops(watched: Watched) -> None:
    watched.dog.arm(2)
    watched.dog.disarm()
    watched.loop.advance(10)
    watched.dog.arm(5)
    assert not watched.is_dropped_after(4.9)
    assert watched.is_dropped_after(0.1)


def test_a_client_that_takes_what_was_written_is_given_as_much_time_again(watched: Watched) -> None:
    watched.transport.num_unsent = 1000
    watched.dog.arm(60)
    for left in (700, 400):
        watched.transport.num_unsent = left
        assert not watched.is_dropped_after(60)
    assert watched.is_dropped_after(60)


def test_a_thousand_requests_in_a_minute_set_a_few_timers(watched: Watched) -> None:
    for _ in range(1000):
        watched.dog.arm(30)
        watched.loop.advance(0.03)
        watched.dog.disarm()
        watched.loop.advance(0.03)
    assert not watched.transport.is_dropped
    assert watched.loop.num_timers < 10


def test_it_ends_with_its_connection(watched: Watched) -> None:
    watched.dog.arm(30)
    watched.dog.end()
    assert [timer.cancelled for timer in watched.loop.timers] == [True]
    assert not watched.is_dropped_after(100)
