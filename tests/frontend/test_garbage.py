"""Full looks for garbage: not by the interpreter's count, but while nobody waits, or after a long time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from frontend.garbage import IDLE_INTERVAL_S, LONGEST_INTERVAL_S, GarbageWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Ring:
    """Garbage that refers to itself."""

    def __init__(self) -> None:
        self.me = self


class Watched:
    """A settled watch, and whether a ring that was dropped is still there."""

    def __init__(self) -> None:
        self.is_idle = False
        self.clock = Clock()
        self.watch = GarbageWatch(lambda: self.is_idle, self.clock)
        self.watch.settle()
        self._ring = weakref.ref(Ring())
        assert self._is_left

    def looks_after(self, seconds: float) -> bool:
        """Whether the ring is gone then."""
        self.clock.now += seconds
        self.watch.look()
        return not self._is_left

    @property
    def _is_left(self) -> bool:
        return self._ring() is not None


@pytest.fixture
def watched() -> Iterator[Watched]:
    thresholds = gc.get_threshold()
    gc.disable()  # the young generation's looks, which go on as ever, would find the ring
    try:
        yield Watched()
    finally:
        gc.enable()
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_while_nobody_waits_a_look_is_taken_every_minute(watched: Watched) -> None:
    watched.is_idle = True
    assert not watched.looks_after(IDLE_INTERVAL_S - 1)
    assert watched.looks_after(1)


def test_while_somebody_waits_it_is_put_off_but_not_for_ever(watched: Watched) -> None:
    assert not watched.looks_after(LONGEST_INTERVAL_S - 1)
    assert watched.looks_after(1)


def test_the_time_begins_anew_with_each_look(watched: Watched) -> None:
    watched.is_idle = True
    assert watched.looks_after(IDLE_INTERVAL_S)
    another = weakref.ref(Ring())
    watched.looks_after(IDLE_INTERVAL_S - 1)
    assert another() is not None
    watched.looks_after(1)
    assert another() is None


def test_the_interpreter_looks_at_young_objects_only_and_at_nothing_that_was_loaded(watched: Watched) -> None:
    young, middle, old = gc.get_threshold()
    assert (young, middle) == (700, 10)
    assert old > 1_000_000
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1000


def test_before_it_is_settled_nothing_is_changed() -> None:
    thresholds = gc.get_threshold()
    GarbageWatch(lambda: True, Clock()).look()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)
