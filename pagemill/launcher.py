"""Starts the processes of one server, watches them, replaces those that fail, and ends them. One per host.

Start: all are spawned at once and must say `Ready` before a deadline; until they all have once, any death ends the
server, for what does not start will not start again. From then on a process that ends, hangs or talks nonsense is
replaced, workers only all together, as often as the restart limit allows. Stop: frontends end their streams, then
scheduler and workers are told, then whoever is left is killed. Must not load zmq, torch or a tokenizer; must not know
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
from pagemill.messages import Alive, ChildToLauncher, Drain, Explained, Failed, ProcessKind, Progress, Ready, Stuck
from pagemill.process import Process, ProcessSpec
from pagemill.roster import Place, Roster
from pagemill.signal_inbox import SignalInbox
from pagemill.supervision import TICK_S, Patience, RestartLimit

#: At a terminal nobody wants to wait for streams.
INTERRUPT_DRAIN_S = 1.0
#: Beyond a drain, before SIGKILL.
EXIT_GRACE_S = 2.0
#: A main loop that has once said that it is alive says so every second.
SILENCE_LIMIT_S = 10.0
#: After SIGKILL. The kernel may still have to free a lot of memory; a broken driver never lets go.
KILL_LIMIT_S = 30.0
#: In this order processes wait for each other to become ready: the first that is late is the culprit.
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
    ) -> None:
        """`reload` is called on SIGHUP and may raise UsageError."""
        self._roster = Roster(specs, directory=directory, token=token, injections=injections)
        self._limit = RestartLimit(restart_limit)
        self._drain_timeout_s = drain_timeout_s
        self._observer = observer
        self._reload = reload
        self._selector = selectors.DefaultSelector()
        self._loading: Patience[Process] = Patience(ready_timeout_s)
        self._working: Patience[Process] = Patience(silence_limit_s)
        self._dying: Patience[Process] = Patience(KILL_LIMIT_S)
        self._was_ready = False  #: all at once, at some time
        self._stopping = False
        self._lost_at: dict[Place, float] = {}  #: places whose next process is not ready yet
        self._impaired_since: float | None = None  #: when the first of them was lost

    def run(self, listener: socket.socket | None = None) -> None:
        """Serves until a signal asks for the end. `listener` is closed when stopping begins. Raises ChildDied."""
        with SignalInbox() as signals, self._selector:
            self._selector.register(signals, selectors.EVENT_READ, signals)
            drain_s = 0.0
            try:
                ending = self._supervise(signals)
                self._observer.on_stopping(ending.name)
                drain_s = min(INTERRUPT_DRAIN_S, self._drain_timeout_s) if ending == signal.SIGINT else self._drain_timeout_s
            finally:
                if listener is not None:
                    listener.close()
                self._stop(signals, drain_s)

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

    def _fill_places(self) -> None:
        """Starts what is missing. New workers have to wait until the last of the old ones has let go of its memory."""
        workers_remain = bool(self._roster.living("worker"))
        for place in self._roster.missing():
            if place[0] == "worker" and workers_remain:
                continue
            try:
                process = self._roster.spawn(place)
            except OSError as error:
                raise ChildDied(f"{place[0]} {place[1]} could not be started: {error.strerror}") from None
            self._selector.register(process.control, selectors.EVENT_READ, process)
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)
            self._loading.renew_all()  # the others may have to wait for this one
            self._loading.begin(process)

    def _judge(self) -> None:
        """Ends those that have kept us waiting for too long. Raises ChildDied if that does not help."""
        for process in self._dying.exhausted():
            raise ChildDied(f"{process} {process.condemned_for}, and does not even end when killed")
        for process in self._working.exhausted():
            self._condemn(process, f"did not respond for {self._working.limit_s:.0f} s")
        late = self._loading.exhausted()
        if late:
            culprit = min(late, key=lambda process: _WAITED_FOR.index(process.kind))
            self._condemn(culprit, f"was not ready after {self._loading.limit_s:.0f} s")

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

    def _hear(self, process: Process, message: ChildToLauncher) -> None:  # noqa: C901 - one arm for each message
        match message:
            case Progress():
                self._observer.on_progress(str(process), message)
                for frontend in self._roster.living("frontend"):
                    if frontend is not process:
                        frontend.send(message)
            case Ready():
                self._note_ready(process, message.detail)
            case Alive():
                self._working.begin(process)
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

    def _note_ready(self, process: Process, detail: str) -> None:
        if process.ready:
            return
        process.ready = True
        self._loading.end(process)
        lost_at = self._lost_at.pop((process.kind, process.index), None)
        if lost_at is None:
            self._observer.on_process_ready(str(process), detail)
        else:
            self._observer.on_process_back(str(process), time.monotonic() - lost_at)

    # --- death -----------------------------------------------------------------------------------------

    def _condemn(self, process: Process, reason: str) -> None:
        process.condemn(reason)
        self._loading.end(process)
        self._working.end(process)
        self._dying.begin(process)

    def _bury(self, process: Process) -> None:
        """After its end. Raises ChildDied if it is not to be replaced."""
        self._forget(process)
        # A worker that goes down with another one is not a death of its own.
        is_first = process.kind != "worker" or not self._roster.missing("worker")
        reason = process.reap()
        self._roster.remove(process, reason)
        if self._stopping:
            return
        if not self._was_ready:
            raise ChildDied(reason)
        if is_first and not self._limit.allows_another():
            raise ChildDied(reason if not self._limit.limit else f"{reason}: more deaths than --restart-limit {self._limit.limit} allows in ten minutes")
        if process.kind == "worker":
            for other in self._roster.living("worker"):
                self._condemn(other, f"was ended with {process}")
            for scheduler in self._roster.living("scheduler"):  # says so again when it has met the new ones
                scheduler.ready = False
                self._loading.begin(scheduler)
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

    def _stop(self, signals: SignalInbox, drain_s: float) -> None:
        """Ends all children: asked first, killed if they do not listen, at once if another signal arrives."""
        self._stopping = True
        patience = len(signals.endings)
        self._ask_to_end(("frontend",), drain_s, lambda: len(signals.endings) > patience)
        self._ask_to_end(("scheduler", "worker"), 0.0, lambda: len(signals.endings) > patience)
        stubborn = self._roster.living()
        for process in stubborn:
            self._forget(process)
            process.condemn("did not end when asked")
        for process in stubborn:
            self._observer.on_killed(str(process))
            try:
                process.reap(timeout_s=EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # it has to end as soon as the kernel lets it

    def _ask_to_end(self, kinds: tuple[ProcessKind, ...], time_s: float, in_a_hurry: Callable[[], bool]) -> None:
        """Waits until they have ended, though not much longer than `time_s`."""
        self._roster.tell(Drain(timeout_s=time_s), *kinds)
        deadline = time.monotonic() + time_s + EXIT_GRACE_S
        while self._roster.living(*kinds) and time.monotonic() < deadline and not in_a_hurry():
            if time_s and self._roster.missing("scheduler", "worker"):  # nobody replaces them any more: no stream can go on
                time_s = 0.0
                self._roster.tell(Drain(timeout_s=time_s), *kinds)
                deadline = min(deadline, time.monotonic() + EXIT_GRACE_S)
            self._handle_events(deadline - time.monotonic())
