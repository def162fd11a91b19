"""What a worker does before it loads anything: it takes its place among the processors."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
import structlog

from workers.__main__ import stay_on


def test_a_worker_without_processors_of_its_own_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pytest.fail("it was tied down"))
    stay_on(())


def test_a_worker_stays_on_its_own_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    tied: list[tuple[int, Collection[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: tied.append((pid, cpus)))
    stay_on((2, 3))
    assert tied == [(0, (2, 3))]


def test_processors_that_are_there_no_more_are_told_of_and_cost_nothing_else() -> None:
    usable = os.sched_getaffinity(0)
    with structlog.testing.capture_logs() as lines:
        stay_on((100_000,))
    assert [line["event"] for line in lines] == ["not_pinned"]
    assert os.sched_getaffinity(0) == usable
