"""Readiness is progress: loading, ready, stalled, restarting or draining, and what clients are told of each."""

from __future__ import annotations

import msgspec
import pytest

from frontend.errors import ApiError
from frontend.readiness import SILENCE_S, STALL_S, Readiness
from pagemill.messages.control import Progress
from pagemill.messages.frontend import SchedulerReady
from pagemill.messages.wire import ProcessKind
from tests.helpers.fake_scheduler import snapshot

GEOMETRY = SchedulerReady(1, 512, 16, 100, 0, 8, False)
SMALLER = SchedulerReady(2, 256, 16, 50, 0, 8, False, worker_incarnation=1)


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
    with pytest.raises(ApiError, match="loading"):
        readiness.require()
    readiness.tokenizer_loaded = True
    assert status(readiness) == "ok"
    assert readiness.require() is GEOMETRY


def test_progress_is_reported_within_its_range() -> None:
    readiness = Readiness()
    readiness.note_progress(Progress("weights", 7.0, "x"))
    assert msgspec.to_builtins(readiness.report()) == {"status": "loading", "phase": "weights", "progress": 1.0, "detail": "x"}


@pytest.mark.parametrize(("kind", "said"), [("worker", "A worker is restarting."), ("scheduler", "The scheduler is restarting.")])
def test_a_lost_process_makes_it_unready_until_the_scheduler_is_ready_again(kind: ProcessKind, said: str, readiness: Readiness) -> None:
    readiness.peer_lost(kind, 0)
    assert readiness.state == "restarting"
    assert msgspec.to_builtins(readiness.report()) == {"status": "restarting", "detail": said}
    assert readiness.require() is GEOMETRY  # what comes meanwhile waits
    readiness.note_snapshot(snapshot())
    assert readiness.state == "restarting"
    readiness.scheduler_ready(SMALLER)
    assert status(readiness) == "ok"
    assert readiness.require() is SMALLER


def test_what_a_scheduler_said_before_a_worker_ended_is_not_believed_afterwards(readiness: Readiness) -> None:
    def after(message: SchedulerReady) -> str:
        readiness.scheduler_ready(message)
        return readiness.state

    readiness.peer_lost("worker", 0)
    assert after(msgspec.structs.replace(GEOMETRY, epoch=5)) == "restarting"
    assert readiness.require().epoch == 5, "its geometry counts all the same"
    assert after(SMALLER) == "ready"
    readiness.peer_lost("scheduler", 0)
    assert after(SMALLER) == "ready", "a new scheduler of workers who live"


def test_the_end_of_workers_that_is_heard_when_others_are_there_is_no_news(readiness: Readiness) -> None:
    readiness.scheduler_ready(SMALLER)
    readiness.peer_lost("worker", SMALLER.worker_incarnation - 1)
    assert status(readiness) == "ok"
    readiness.peer_lost("worker", SMALLER.worker_incarnation)
    assert status(readiness) == "restarting"


def test_a_scheduler_that_is_silent_while_the_tokenizer_loads_does_not_keep_a_frontend_from_beginning(clock: Clock) -> None:
    readiness = Readiness(clock)
    readiness.scheduler_ready(GEOMETRY)
    readiness.note_snapshot(snapshot())
    may_begin = [readiness.may_begin]
    clock.now += SILENCE_S + 1
    readiness.tokenizer_loaded = True
    assert status(readiness) == "stalled"
    may_begin.append(readiness.may_begin)
    readiness.peer_lost("worker", 0)
    may_begin.append(readiness.may_begin)
    assert may_begin == [False, True, False]


def test_the_end_of_another_frontend_is_no_trouble(readiness: Readiness) -> None:
    readiness.peer_lost("frontend", 0)
    assert status(readiness) == "ok"


def test_a_process_that_is_lost_before_the_first_readiness_changes_nothing() -> None:
    readiness = Readiness()
    readiness.tokenizer_loaded = True
    readiness.peer_lost("worker", 0)
    assert status(readiness) == "loading"
    with pytest.raises(ApiError, match="loading"):
        readiness.require()


def test_work_without_steps_is_a_stall_that_ends_with_the_next_step(readiness: Readiness, clock: Clock) -> None:
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    clock.now += STALL_S + 1
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    assert status(readiness) == "stalled"
    assert "no step" in readiness.report().detail
    assert readiness.require() is GEOMETRY
    readiness.note_snapshot(snapshot(steps=6, num_running=1))
    assert status(readiness) == "ok"


def test_steps_without_end_are_no_stall_and_no_work_is_none_either(readiness: Readiness, clock: Clock) -> None:
    for step in range(100):
        readiness.note_snapshot(snapshot(steps=step, num_running=1))
        clock.now += SILENCE_S - 1
        assert status(readiness) == "ok"
    for _ in range(100):
        readiness.note_snapshot(snapshot(steps=99, num_running=0))
        clock.now += SILENCE_S - 1
        assert status(readiness) == "ok"


def test_a_scheduler_that_falls_silent_is_a_stall_until_it_speaks(readiness: Readiness, clock: Clock) -> None:
    clock.now += 1000
    assert status(readiness) == "ok"  # it has not begun to speak
    readiness.note_snapshot(snapshot())
    clock.now += SILENCE_S + 0.1
    assert msgspec.to_builtins(readiness.report()) == {"status": "stalled", "detail": "The scheduler does not answer."}
    readiness.note_snapshot(snapshot())
    assert status(readiness) == "ok"


def test_a_new_scheduler_starts_afresh(readiness: Readiness, clock: Clock) -> None:
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    clock.now += STALL_S + 1
    readiness.peer_lost("scheduler", 0)
    readiness.scheduler_ready(GEOMETRY)
    assert status(readiness) == "ok"
    readiness.note_snapshot(snapshot(steps=5, num_running=1))
    assert status(readiness) == "ok"


def test_a_draining_server_says_so_whatever_else_is_true(readiness: Readiness) -> None:
    readiness.peer_lost("scheduler", 0)
    readiness.drain()
    assert msgspec.to_builtins(readiness.report()) == {"status": "draining"}
    with pytest.raises(ApiError, match="shutting down") as refusal:
        readiness.require()
    assert refusal.value.headers == {"Retry-After": "1", "Connection": "close"}
