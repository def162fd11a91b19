"""Readiness is progress: loading, ready, stalled while work stands still, and what clients are told of each."""

from __future__ import annotations

import msgspec
import pytest

from frontend.errors import ApiError
from frontend.readiness import STALL_S, Readiness
from pagemill.messages import Progress, SchedulerReady
from tests.helpers.fake_scheduler import snapshot

GEOMETRY = SchedulerReady(1, 512, 16, 100, 0, 8, False)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(readiness: Readiness) -> str:
    return readiness.report().status


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def readiness(clock: Clock) -> Readiness:
    ready = Readiness(clock)
    ready.tokenizer_loaded = True
    ready.scheduler_ready(GEOMETRY)
    return ready


def test_both_the_tokenizer_and_the_scheduler_are_needed() -> None:
    readiness = Readiness()
    readiness.scheduler_ready(GEOMETRY)
    assert status(readiness) == "loading"
    readiness.tokenizer_loaded = True
    assert status(readiness) == "ok"
    assert readiness.require() is GEOMETRY


def test_progress_is_reported_within_its_range() -> None:
    readiness = Readiness()
    readiness.note_progress(Progress("weights", 7.0, "x"))
    assert msgspec.to_builtins(readiness.report()) == {"status": "loading", "phase": "weights", "progress": 1.0, "detail": "x"}


def test_work_without_steps_is_a_stall_that_ends_with_the_next_step(readiness: Readiness, clock: Clock) -> None:
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    clock.now += STALL_S + 1
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    assert status(readiness) == "stalled"
    assert readiness.require() is GEOMETRY
    readiness.note_snapshot(snapshot(steps=6, num_running=1))
    assert status(readiness) == "ok"


def test_no_work_is_no_stall_but_silence_is(readiness: Readiness, clock: Clock) -> None:
    for _ in range(5):
        readiness.note_snapshot(snapshot(steps=5, num_running=0))
        clock.now += STALL_S - 1
    assert status(readiness) == "ok"
    clock.now += 2
    assert status(readiness) == "stalled"


def test_a_new_scheduler_starts_afresh(readiness: Readiness, clock: Clock) -> None:
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    clock.now += STALL_S + 1
    readiness.scheduler_lost()
    with pytest.raises(ApiError, match="gone"):
        readiness.require()
    readiness.scheduler_ready(GEOMETRY)
    assert status(readiness) == "ok"


def test_a_draining_server_says_so_whatever_else_is_true(readiness: Readiness) -> None:
    readiness.scheduler_lost()
    readiness.drain()
    assert status(readiness) == "draining"
    with pytest.raises(ApiError, match="shutting down"):
        readiness.require()
