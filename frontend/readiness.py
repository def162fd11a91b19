"""How far the server is: loading, ready, stalled, restarting or draining. One object per process, read by probes and every route.

It holds what the launcher passes on of the others' progress and deaths, what the scheduler said when it became ready, and
whether it still gets on: ready means that steps complete while there is work. Whoever was ready once takes requests while
a process restarts, for they only have to wait. What is said to clients stands here and nowhere else: no reason that a
process ended for, no path. It must not know who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

from frontend.errors import ApiError, shutting_down, unavailable
from pagemill.ids import NONE
from pagemill.messages.control import Progress
from pagemill.messages.frontend import SchedulerReady, StatsSnapshot
from pagemill.messages.wire import ProcessKind

State = Literal["loading", "ready", "stalled", "restarting", "draining"]

#: If there is work and no step has been completed for so long, the server has stalled.
STALL_S = 30.0
#: A scheduler sends its numbers at least every second; one that has done so and then falls silent for so long stands still.
SILENCE_S = 5.0

#: Processes without which nothing is computed. Another frontend's end is no business of ours.
_RESTARTING: dict[ProcessKind, str] = {"worker": "A worker is restarting.", "scheduler": "The scheduler is restarting."}
_NO_STEP = "There is work, but no step is completed."
_SILENT = "The scheduler does not answer."
_START = Progress(phase="start", fraction=0.0, detail="")


class StatusReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the health routes."""

    status: str
    phase: str = ""
    progress: float = -1.0
    detail: str = ""


class Readiness:
    """`geometry` is the scheduler's last word on lengths and blocks; None until it was ready for the first time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.geometry: SchedulerReady | None = None
        self.tokenizer_loaded = False
        self._draining = False
        self._lost: ProcessKind | None = None  #: what is missing since the scheduler was last ready
        self._lost_workers = NONE  #: the newest incarnation of workers of which one has ended
        self._progress = _START
        self._clock = clock
        self._steps = -1
        self._last_progress: float | None = None  #: when the scheduler last got on or had nothing to do; None: not heard of yet
        self._last_snapshot: float | None = None  #: None: not heard of since it became ready

    @property
    def state(self) -> State:
        if self._draining:
            return "draining"
        if self.geometry is None or not self.tokenizer_loaded:
            return "loading"
        if self._lost is not None:
            return "restarting"
        return "stalled" if self._stall() else "ready"

    @property
    def may_begin(self) -> bool:
        """Everything that is needed has been there; whether steps complete just now is not asked."""
        return self.state in ("ready", "stalled")

    def note_progress(self, progress: Progress) -> None:
        self._progress = progress

    def note_snapshot(self, snapshot: StatsSnapshot) -> None:
        has_work = snapshot.num_waiting + snapshot.num_running + snapshot.num_preempted > 0
        self._last_snapshot = self._clock()
        if snapshot.steps != self._steps or not has_work:
            self._last_progress = self._last_snapshot
        self._steps = snapshot.steps

    def scheduler_ready(self, geometry: SchedulerReady) -> None:
        """Said when all workers are there: whatever was lost before is back. Unless it was said before one of these workers ended, and heard later."""
        self.geometry = geometry
        if geometry.worker_incarnation > self._lost_workers:
            self._lost = None
        self._steps, self._last_progress, self._last_snapshot = -1, None, None

    def peer_lost(self, kind: ProcessKind, incarnation: int) -> None:
        if kind == "worker" and self.geometry is not None and incarnation < self.geometry.worker_incarnation:
            return  # the scheduler, which speaks another way, has said already that others are in its place
        if kind in _RESTARTING:
            self._lost, self._progress = kind, _START
        if kind == "worker":
            self._lost_workers = max(self._lost_workers, incarnation)

    def scheduler_forgotten(self) -> None:
        """Nothing is heard of it any more, whether it has ended or not."""
        self._lost, self._progress = "scheduler", _START

    def drain(self) -> None:
        self._draining = True

    def report(self) -> StatusReport:
        match self.state:
            case "loading":
                progress = self._progress
                return StatusReport("loading", progress.phase, round(min(max(progress.fraction, 0.0), 1.0), 4), progress.detail)
            case "restarting":
                return StatusReport("restarting", detail=_RESTARTING[self._lost or "scheduler"])
            case "stalled":
                return StatusReport("stalled", detail=self._stall())
            case "draining":
                return StatusReport("draining")
            case "ready":
                return StatusReport("ok")

    def require(self) -> SchedulerReady:
        """The geometry to validate with. Raises ApiError (503) unless requests can be taken; a stall or a restart passes, so they are."""
        if self._draining:
            raise shutting_down()
        if self.geometry is None or not self.tokenizer_loaded:
            raise self._still_loading()
        return self.geometry

    def _still_loading(self) -> ApiError:
        report = self.report()
        return unavailable(f"The model is loading: {report.phase}, {max(report.progress, 0.0):.0%} done.")

    def _stall(self) -> str:
        """Why it counts as stalled, "" if it does not."""
        now = self._clock()
        if self._last_snapshot is not None and now - self._last_snapshot > SILENCE_S:
            return _SILENT
        return _NO_STEP if self._last_progress is not None and now - self._last_progress > STALL_S else ""
