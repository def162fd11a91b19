"""What a worker does around what it is for: it takes its place among the processors, and sets aside what it has loaded."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection

import msgspec
import pytest
import structlog

from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import NONE
from pagemill.messages.control import LauncherToChild, Start
from scripts.lib.offline import offline_config
from workers import loader, process
from workers.__main__ import run, stay_on


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


class Ring:
    """Refers to itself: only the collector finds out that nobody else does."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_loaded_is_set_aside_without_its_garbage_and_later_garbage_is_still_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, thresholds = Ring(), gc.get_threshold()
    dropped: list[weakref.ref[Ring]] = []
    served: list[object] = []

    def load(*_: object) -> Ring:
        ring = Ring()
        gc.collect()  # now it is one of the old ones, which only a full look goes through
        dropped.append(weakref.ref(ring))
        return loaded

    def serve(_: object, given: object) -> None:
        served.append(given)
        assert dropped[0]() is None
        assert all(thing is not loaded for thing in gc.get_objects()), "the collector would go through it again and again"
        assert gc.isenabled()
        assert gc.get_threshold() == thresholds

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(process, "serve", serve)
    ours, theirs = control_pair()
    config = offline_config("a model")
    start = Start("worker", 0, 0, 0, b"t", msgspec.Raw(msgspec.msgpack.encode(config)), NONE)
    child: Child[WorkerConfig] = Child(start, config, ControlSocket(theirs, LauncherToChild))
    try:
        run(child)
    finally:
        gc.unfreeze()
        ours.close()
        theirs.close()
    assert served == [loaded]
