"""How far the server is: loading, ready, stalled, draining or lost. One object per process, read by probes and every route.

It holds what the launcher passes on of the others' progress, what the scheduler said when it became ready, and whether
it still gets on: ready means that steps complete while there is work. It must not know who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

from frontend.errors import ApiError, unavailable
from pagemill.messages import Progress, SchedulerReady, StatsSnapshot

State = Literal["loading", "ready", "stalled", "draining", "lost"]

#: Work without a completed step, or a scheduler that has sent numbers and then falls silent, for so long is a stall.
STALL_S = 30.0


class StatusReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the health routes."""

    status: str
    phase: str = ""
    progress: float = -1.0
    detail: str = ""


class Readiness:
    """`geometry` is the scheduler's word on lengths and blocks; None until it is ready or once it is lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.geometry: SchedulerReady | None = None
        self.tokenizer_loaded = False
        self._draining = False
        self._lost = False
        self._progress = Progress(phase="start", fraction=0.0, detail="")
        self._clock = clock
        self._steps = -1
        self._last_progress: float | None = None  #: when the scheduler last got on or had nothing to do; None: not heard of yet

    @property
    def state(self) -> State:
        if self._draining:
            return "draining"
        if self._lost:
            return "lost"
        if self.geometry is None or not self.tokenizer_loaded:
            return "loading"
        stalled = self._last_progress is not None and self._clock() - self._last_progress > STALL_S
        return "stalled" if stalled else "ready"

    def note_progress(self, progress: Progress) -> None:
        self._progress = progress

    def note_snapshot(self, snapshot: StatsSnapshot) -> None:
        has_work = snapshot.num_waiting + snapshot.num_running + snapshot.num_preempted > 0
        if snapshot.steps != self._steps or not has_work:
            self._last_progress = self._clock()
        self._steps = snapshot.steps

    def scheduler_ready(self, geometry: SchedulerReady) -> None:
        self.geometry, self._lost = geometry, False
        self._steps, self._last_progress = -1, None

    def scheduler_lost(self) -> None:
        self.geometry, self._lost = None, True

    def drain(self) -> None:
        self._draining = True

    def report(self) -> StatusReport:
        if self.state == "loading":
            progress = self._progress
            return StatusReport("loading", progress.phase, round(min(max(progress.fraction, 0.0), 1.0), 4), progress.detail)
        return StatusReport({"ready": "ok", "stalled": "stalled", "draining": "draining", "lost": "unavailable"}[self.state])

    def require(self) -> SchedulerReady:
        """The geometry to validate with. Raises ApiError (503) unless requests can be taken; a stall may pass, so they are."""
        if self.state in ("ready", "stalled") and self.geometry is not None:
            return self.geometry
        raise self.refusal()

    def refusal(self) -> ApiError:
        match self.state:
            case "draining":
                return unavailable("The server is shutting down.")
            case "lost":
                return unavailable("The scheduler is gone.")
            case _:
                report = self.report()
                return unavailable(f"The model is loading: {report.phase}, {max(report.progress, 0.0):.0%} done.")
