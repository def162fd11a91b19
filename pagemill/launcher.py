"""Starts the processes of one server, watches them, replaces those that fail, and ends them. One per host.

Start: all are spawned at once and must say `Ready` before a deadline; until they all have once, any death ends the
server, for what does not start will not start again. From then on a process that ends, hangs or talks nonsense is
replaced, workers only all together, as often as the restart limit allows. Stop: frontends end their streams, for which
the others are still repaired, then scheduler and workers are told, then whoever is left is killed. Must not load zmq, torch or a tokenizer; must not know
what the processes do, which HTTP they speak, or how anything is shown (`Observer`).
"""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec

from pagemill.errors import UsageError
from pagemill.group_progress import GroupProgress, group_name
from pagemill.ids import NONE
from pagemill.messages.control import Alive, ChildToLauncher, Drain, Explained, Failed, Progress, Ready, Stuck
from pagemill.messages.wire import ProcessKind
from pagemill.process import Process, ProcessSpec
from pagemill.roster import Place, Roster
from pagemill.signal_inbox import SignalInbox
from pagemill.supervision import TICK_S, Attempts, Patience, RestartLimit

#: At a terminal nobody wants to wait for streams.
INTERRUPT_DRAIN_S = 1.0
#: From the word to end until SIGKILL. To take down an interpreter with torch, and an arena, costs a quarter of a second of a
#: processor, or seconds for a large arena, and workers are the last to get one on a busy machine: they are not hung for that.
EXIT_GRACE_S = 10.0
#: After SIGKILL, for those that did not listen. Whoever the kernel keeps for longer ends without us.
REAP_LIMIT_S = 2.0
#: A main loop that has once said that it is alive says so every second.
SILENCE_LIMIT_S = 10.0
#: After SIGKILL. The kernel may still have to free a lot of memory; a broken driver never lets go.
KILL_LIMIT_S = 30.0
#: A process that the system does not let us start, for want of memory or descriptors, is tried again after a pause, and
#: given up after a while.
START_PAUSE_S = 1.0
START_LIMIT_S = 60.0
#: In this order processes wait for each other to become ready: whoever waits for another is not late.
_WAITED_FOR: tuple[ProcessKind, ...] = ("worker", "scheduler", "frontend")


class ChildDied(Exception):
    """A child ended, or did not become ready, and is not replaced; the message is one line for the operator."""


@dataclass(frozen=True)
class Reloaded:
    """What a reload came to."""

    specs: Sequence[ProcessSpec]  #: of all processes, with their new configs
    restart_limit: int
    drain_timeout_s: float
    changed: tuple[str, ...]  #: names of settings, without values: some are secret
    needs_restart: tuple[str, ...]  #: settings that were changed in vain


class Observer(Protocol):
    """Who is told what happens."""

    def on_progress(self, process: str, progress: Progress) -> None: ...
    def on_process_ready(self, process: str, detail: str) -> None: ...
    def on_ready(self) -> None: ...
    def on_process_lost(self, process: str, reason: str, num_deaths: int, limit: int) -> None: ...
    def on_process_back(self, process: str, seconds: float) -> None: ...
    def on_start_failed(self, process: str, reason: str) -> None: ...
    def on_recovered(self, seconds: float) -> None: ...
    def on_reloaded(self, changed: tuple[str, ...], needs_restart: tuple[str, ...]) -> None: ...
    def on_reload_refused(self, reason: str) -> None: ...
    def on_stopping(self, reason: str) -> None: ...
    def on_killed(self, process: str) -> None: ...


class Launcher:
    """The processes of one server. `run` is called once, from the main thread."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        directory: str,
        token: bytes,
        ready_timeout_s: float,
        restart_limit: int,
        drain_timeout_s: float,
        observer: Observer,
        injections: tuple[str, ...] = (),
        reload: Callable[[], Reloaded] | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
        exit_grace_s: float = EXIT_GRACE_S,
    ) -> None:
        """`reload` is called on SIGHUP and may raise UsageError."""
        self._roster = Roster(specs, directory=directory, token=token, injections=injections)
        self._num_ranks = sum(spec.kind == "worker" for spec in specs)
        self._ranks = GroupProgress(self._num_ranks)
        self._limit = RestartLimit(restart_limit)
        self._drain_timeout_s = drain_timeout_s
        self._exit_grace_s = exit_grace_s
        self._observer = observer
        self._reload = reload
        self._selector = selectors.DefaultSelector()
        self._loading: Patience[Process] = Patience(ready_timeout_s)
        self._working: Patience[Process] = Patience(silence_limit_s)
        self._dying: Patience[Process] = Patience(KILL_LIMIT_S)
        self._starts = Attempts(START_PAUSE_S, start_limit_s)
        self._was_ready = False  #: all at once, at some time
        self._draining = False  #: frontends end what runs, and nobody takes their places
        self._stopping = False  #: all are to end
        self._num_signals = 0  #: that have asked for the end before it began; one more is in a hurry
        self._group_lost = NONE  #: the incarnation of the workers that has ended last
        self._lost_at: dict[Place, float] = {}  #: places whose next process is not ready yet
        self._impaired_since: float | None = None  #: when the first of them was lost

    def run(self, listener: socket.socket | None = None) -> None:
        """Serves until a signal asks for the end. `listener` is closed when stopping begins. Raises ChildDied, and UsageError."""
        with SignalInbox() as signals, self._selector:
            self._selector.register(signals, selectors.EVENT_READ, signals)
            try:
                try:
                    ending = self._supervise(signals)
                finally:
                    if listener is not None:
                        listener.close()
                self._num_signals = len(signals.endings)
                self._observer.on_stopping(ending.name)
                self._drain(signals, min(INTERRUPT_DRAIN_S, self._drain_timeout_s) if ending == signal.SIGINT else self._drain_timeout_s)
            finally:
                self._stop(signals)

    def _supervise(self, signals: SignalInbox) -> signal.Signals:
        """Returns the signal that asks for the end. Raises ChildDied."""
        while not signals.endings:
            self._fill_places()
            self._handle_events(TICK_S)
            self._judge()
            self._note_readiness()
            if signals.take_reload():
                self._take_reload()
        return signals.endings[0]

    # --- life ------------------------------------------------------------------------------------------

    def _fill_places(self, *kinds: ProcessKind) -> None:
        """Starts what is missing of these kinds, or of all. New workers have to wait until the last of the old ones has let go of its memory."""
        if not self._starts.is_due():
            return
        workers_remain = any(worker.condemned_for for worker in self._roster.living("worker"))
        for place in self._roster.missing(*kinds):
            if place[0] == "worker" and workers_remain:
                continue
            try:
                process = self._roster.spawn(place)
            except OSError as error:
                return self._note_failed_start(place, error)
            self._starts.succeeded()
            self._selector.register(process.control, selectors.EVENT_READ, process)
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)
            self._loading.renew_all()  # the others may have to wait for this one
            self._loading.begin(process)

    def _note_failed_start(self, place: Place, error: OSError) -> None:
        """Raises ChildDied if that has gone on for too long, or from the beginning."""
        name, reason = f"{place[0]} {place[1]}", error.strerror or str(error)
        if not self._was_ready:
            raise ChildDied(f"{name} could not be started: {reason}")
        if not self._starts.failed():
            raise ChildDied(f"{name} could not be started for {self._starts.limit_s:.0f} s: {reason}")
        self._observer.on_start_failed(name, reason)

    def _judge(self) -> None:
        """Ends those that have kept us waiting for too long. Raises ChildDied if that does not help."""
        for process in self._dying.exhausted():
            raise ChildDied(f"{process} {process.condemned_for}, and does not even end when killed")
        for process in self._working.exhausted():
            self._condemn(process, f"did not respond for {self._working.limit_s:.0f} s")
        late = [process for process in self._loading.exhausted() if not self._waits(process)]
        if late:
            self._condemn(late[0], f"was not ready after {self._loading.limit_s:.0f} s")

    def _waits(self, process: Process) -> bool:
        """For others that are not ready either."""
        for kind in _WAITED_FOR[: _WAITED_FOR.index(process.kind)]:
            if self._roster.missing(kind) or not all(other.ready for other in self._roster.living(kind)):
                return True
        return False

    def _note_readiness(self) -> None:
        if not self._roster.is_ready():
            return
        if not self._was_ready:
            self._was_ready = True
            self._observer.on_ready()
        elif self._impaired_since is not None:
            self._observer.on_recovered(time.monotonic() - self._impaired_since)
            self._impaired_since = None

    def _take_reload(self) -> None:
        if self._reload is None:
            return
        try:
            reloaded = self._reload()
        except UsageError as error:
            self._observer.on_reload_refused(str(error))
            return
        self._limit.limit = reloaded.restart_limit
        self._drain_timeout_s = reloaded.drain_timeout_s
        self._roster.reconfigure(reloaded.specs)
        self._observer.on_reloaded(reloaded.changed, reloaded.needs_restart)

    # --- events ----------------------------------------------------------------------------------------

    def _handle_events(self, timeout_s: float) -> None:
        """Waits for something to happen, at most `timeout_s`, and deals with it. Raises ChildDied."""
        ready = self._selector.select(max(timeout_s, 0.0))
        ended: list[Process] = []
        for key, _ in ready:
            if isinstance(key.data, SignalInbox):
                key.data.drain()
            elif key.fd == key.data.pidfd:
                ended.append(key.data)
            else:
                self._listen(key.data)
        for process in ended:
            self._bury(process)

    def _listen(self, process: Process) -> None:
        try:
            messages = process.receive()
        except msgspec.MsgspecError as error:
            self._selector.unregister(process.control)
            self._condemn(process, f"spoke nonsense on its control socket: {error}")
            return
        if messages is None:  # end of file: the process is about to end
            self._selector.unregister(process.control)
            return
        self._working.renew(process)
        for message in messages:
            self._hear(process, message)

    def _hear(self, process: Process, message: ChildToLauncher) -> None:
        match message:
            case Progress():
                self._pass_on(process, message)
            case Ready():
                self._note_ready(process, message)
            case Alive():
                self._working.begin(process)
                if process.kind == "scheduler":  # it waits for workers, and says which of them keeps it waiting
                    self._loading.end(process)
            case Stuck():
                target = self._roster.find(message.kind, message.index, message.incarnation)
                if target is not None and process.kind == "scheduler":
                    self._condemn(target, message.reason)
            case Explained():
                if process.kind == "scheduler":
                    self._limit.forgive(message.num_deaths)
            case Failed():
                pass  # the process keeps it for its end
            case _:
                assert_never(message)

    def _pass_on(self, process: Process, progress: Progress) -> None:
        """To the observer and to frontends, for their 503. Workers load one model, and make progress together."""
        name = str(process)
        if process.kind == "worker":
            name, progress = group_name(self._num_ranks), self._ranks.add(process.index, process.incarnation, progress)
        self._observer.on_progress(name, progress)
        for frontend in self._roster.living("frontend"):
            if frontend is not process:
                frontend.send(progress)

    def _note_ready(self, process: Process, message: Ready) -> None:
        if process.ready:
            return
        if process.kind == "scheduler" and not self._roster.has_group(message.worker_incarnation):
            return  # it was so with workers who have ended since
        self._roster.note_ready(process)
        self._loading.end(process)
        for kind in _WAITED_FOR[_WAITED_FOR.index(process.kind) + 1 :]:
            for other in self._roster.living(kind):
                self._loading.renew(other)
        lost_at = self._lost_at.pop((process.kind, process.index), None)
        if lost_at is None and process.kind == "worker":
            if sum(worker.ready for worker in self._roster.living("worker")) == self._num_ranks:
                self._observer.on_process_ready(group_name(self._num_ranks), message.detail)
        elif lost_at is None:
            self._observer.on_process_ready(str(process), message.detail)
        else:
            self._observer.on_process_back(str(process), time.monotonic() - lost_at)

    # --- death -----------------------------------------------------------------------------------------

    def _condemn(self, process: Process, reason: str) -> None:
        process.condemn(reason)
        self._loading.end(process)
        self._working.end(process)
        self._dying.begin(process)

    def _bury(self, process: Process) -> None:
        """After its end. Raises ChildDied if it is not to be replaced, UsageError if it never could start as asked."""
        self._forget(process)
        # A worker that goes down with another one is not a death of its own.
        is_first = process.kind != "worker" or process.incarnation != self._group_lost
        if process.kind == "worker":
            self._group_lost = process.incarnation
        reason = process.reap()
        self._roster.remove(process, reason)
        if self._stopping or (self._draining and process.kind == "frontend"):
            return
        if not self._was_ready:
            raise UsageError(reason) if process.has_refused else ChildDied(reason)
        if is_first and not self._limit.allows_another():
            raise ChildDied(reason if not self._limit.limit else f"{reason}: more deaths than --restart-limit {self._limit.limit} allows in ten minutes")
        if process.kind == "worker":
            for other in self._roster.living("worker"):
                self._condemn(other, f"was ended with {process}")
            for scheduler in self._roster.living("scheduler"):  # says so again when it has met the new ones
                scheduler.ready = False
        now = time.monotonic()
        self._lost_at.setdefault((process.kind, process.index), now)
        self._impaired_since = now if self._impaired_since is None else self._impaired_since
        self._observer.on_process_lost(str(process), reason, self._limit.num_deaths, self._limit.limit)

    def _forget(self, process: Process) -> None:
        for patience in (self._loading, self._working, self._dying):
            patience.end(process)
        for descriptor in (process.control.fileno(), process.pidfd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    # --- end -------------------------------------------------------------------------------------------

    def _drain(self, signals: SignalInbox, time_s: float) -> None:
        """Lets frontends end what runs, and keeps the others able to compute it. Returns when they have ended, or have to. Raises ChildDied."""
        if not self._was_ready:
            return  # nothing runs
        self._draining = True
        self._roster.tell(Drain(timeout_s=time_s), "frontend")
        deadline = time.monotonic() + time_s
        while self._roster.living("frontend") and (time_left_s := deadline - time.monotonic()) > 0 and not self._is_hurried(signals):
            self._fill_places("worker", "scheduler")
            self._handle_events(min(TICK_S, time_left_s))
            self._judge()
            self._note_readiness()

    def _stop(self, signals: SignalInbox) -> None:
        """Ends all children: asked first, killed if they do not listen, at once if another signal arrives."""
        self._stopping = True
        self._num_signals = self._num_signals or len(signals.endings)
        self._ask_to_end(signals, "frontend")
        self._ask_to_end(signals, "scheduler", "worker")
        stubborn = self._roster.living()
        for process in stubborn:
            self._forget(process)
            process.condemn("did not end when asked")
        for process in stubborn:
            self._observer.on_killed(str(process))
            try:
                process.reap(timeout_s=REAP_LIMIT_S)
            except subprocess.TimeoutExpired:
                pass  # it has to end as soon as the kernel lets it

    def _ask_to_end(self, signals: SignalInbox, *kinds: ProcessKind) -> None:
        """What still runs ends here; waits for a moment until they have ended."""
        self._roster.tell(Drain(timeout_s=0.0), *kinds)
        deadline = time.monotonic() + self._exit_grace_s
        while self._roster.living(*kinds) and time.monotonic() < deadline and not self._is_hurried(signals):
            self._handle_events(deadline - time.monotonic())

    def _is_hurried(self, signals: SignalInbox) -> bool:
        """Another signal has come since the end began."""
        return len(signals.endings) > self._num_signals
