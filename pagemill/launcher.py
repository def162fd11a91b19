"""Starts the processes of one server, watches them, and ends them. One per host.

Start: all are spawned at once, told their peers' addresses, and must say `Ready` before a deadline. Then the
launcher sleeps until a process ends, one says something, or a signal arrives. In this version the end of any
child ends the server, naming the culprit. Stop: frontends end their streams, then scheduler and workers
are told, then whoever is left is killed. Must not load zmq, torch or a tokenizer; must not know what the
processes do, which HTTP they speak, or how anything is shown (`Observer`).
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Protocol

from pagemill.messages import Drain, PeerLost, PeerUp, Progress, Ready
from pagemill.process import Process, ProcessSpec
from pagemill.run_directory import socket_address

#: Streams may run on this long after SIGTERM; at a terminal nobody wants to wait.
TERMINATE_DRAIN_S = 5.0
INTERRUPT_DRAIN_S = 1.0
#: Beyond a drain, before SIGKILL.
EXIT_GRACE_S = 2.0
#: Signals this close together are one.
SAME_SIGNAL_S = 0.3


class ChildDied(Exception):
    """A child ended, or did not become ready; the message is one line for the operator."""


class Observer(Protocol):
    """Who is told what happens."""

    def on_progress(self, process: str, progress: Progress) -> None: ...
    def on_process_ready(self, process: str, detail: str) -> None: ...
    def on_ready(self) -> None: ...
    def on_stopping(self, reason: str) -> None: ...
    def on_killed(self, process: str) -> None: ...


class SignalInbox:
    """Receives the signals that end a server, without interrupting what the launcher is doing; deaf afterwards."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._received_at = 0.0  #: when the last of them arrived
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
        # A server started by nohup ignores SIGHUP and must go on doing so.
        hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        self._numbers = [signal.SIGINT, signal.SIGTERM, *hangup]
        for number in self._numbers:
            signal.signal(number, self._note)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number in self._numbers:  # everything has ended, and with the exit code that was asked for
            signal.signal(number, signal.SIG_IGN)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal has arrived."""
        return self._reader.fileno()

    def drain(self) -> None:
        try:
            while self._reader.recv(64):
                pass
        except BlockingIOError:
            pass

    def _note(self, number: int, _: FrameType | None) -> None:
        # `timeout`, a shell and a process manager may each pass on one and the same signal.
        now = time.monotonic()
        if not self.received or now - self._received_at > SAME_SIGNAL_S:
            self.received.append(signal.Signals(number))
            self._received_at = now


class Launcher:
    """The processes of one server. `run` is called once, from the main thread."""

    def __init__(self, specs: Sequence[ProcessSpec], *, directory: str, token: bytes, ready_timeout_s: float, observer: Observer) -> None:
        self._specs = specs
        self._directory = directory
        self._token = token
        self._ready_timeout_s = ready_timeout_s
        self._observer = observer
        self._processes: list[Process] = []  #: started ones, dead ones included
        self._selector = selectors.DefaultSelector()
        self._deaths: list[str] = []  #: how children ended, in order

    def run(self, listener: socket.socket | None = None) -> None:
        """Serves until a signal asks for the end. `listener` is closed when stopping begins. Raises ChildDied."""
        with SignalInbox() as signals, self._selector:
            self._selector.register(signals, selectors.EVENT_READ, signals)
            drain_s = 0.0
            try:
                self._start()
                request = self._supervise(signals)
                self._observer.on_stopping(request.name)
                drain_s = INTERRUPT_DRAIN_S if request == signal.SIGINT else TERMINATE_DRAIN_S
            finally:
                if listener is not None:
                    listener.close()
                self._stop(signals, drain_s)

    def _start(self) -> None:
        for spec in self._specs:
            process = Process(spec, incarnation=0, epoch=1, token=self._token)
            self._processes.append(process)
            self._selector.register(process.control, selectors.EVENT_READ, process)
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        for scheduler in self._of_kind("scheduler"):
            for peer in self._of_kind("worker", "frontend"):
                address = socket_address(self._directory, peer.kind, peer.index, peer.incarnation)
                scheduler.send(PeerUp(kind=peer.kind, index=peer.index, incarnation=peer.incarnation, address=address))
                peer.send(PeerUp(kind="scheduler", index=scheduler.index, incarnation=scheduler.incarnation, address=address))

    def _supervise(self, signals: SignalInbox) -> signal.Signals:
        """Returns the signal that asks for the end. Raises ChildDied."""
        deadline = time.monotonic() + self._ready_timeout_s
        announced = False
        while not signals.received:
            self._handle_events(None if announced else deadline - time.monotonic())
            if self._deaths:
                raise ChildDied(self._deaths[0])
            late = [process for process in self._processes if not process.ready]
            if late and time.monotonic() >= deadline:
                raise ChildDied(f"{late[0]} was not ready after {self._ready_timeout_s:.0f} s")
            if not late and not announced:
                announced = True
                self._observer.on_ready()
        return signals.received[0]

    def _stop(self, signals: SignalInbox, drain_s: float) -> None:
        """Ends all children: asked first, killed if they do not listen, at once if another signal arrives."""
        patience = len(signals.received)
        for kinds, time_s in (("frontend",), drain_s), (("scheduler", "worker"), 0.0):
            for process in self._of_kind(*kinds):
                process.send(Drain(timeout_s=time_s))
            deadline = time.monotonic() + time_s + EXIT_GRACE_S
            while self._of_kind(*kinds) and time.monotonic() < deadline and len(signals.received) <= patience:
                self._handle_events(deadline - time.monotonic())
        for process in self._of_kind("frontend", "scheduler", "worker"):
            self._forget(process)
            process.kill()
            self._observer.on_killed(str(process))

    def _of_kind(self, *kinds: str) -> list[Process]:
        """The living ones, in the order in which they were started."""
        return [process for process in self._processes if process.kind in kinds and process.alive]

    def _handle_events(self, timeout_s: float | None) -> None:
        """Waits for something to happen, at most `timeout_s`, and takes note of it."""
        ready = self._selector.select(None if timeout_s is None else max(timeout_s, 0.0))
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
        messages = process.receive()
        if not messages:  # end of file: the process is about to end
            self._selector.unregister(process.control)
        for message in messages:
            if isinstance(message, Progress):
                self._observer.on_progress(str(process), message)
                for frontend in self._of_kind("frontend"):
                    if frontend is not process:
                        frontend.send(message)
            elif isinstance(message, Ready) and not process.ready:
                process.ready = True
                self._observer.on_process_ready(str(process), message.detail)

    def _bury(self, process: Process) -> None:
        self._forget(process)
        how = process.reap()
        self._deaths.append(f"{process}: {process.failure}" if process.failure else f"{process} {how}")
        for scheduler in self._of_kind("scheduler"):  # or it would go on sending to nobody
            scheduler.send(PeerLost(kind=process.kind, index=process.index, incarnation=process.incarnation))

    def _forget(self, process: Process) -> None:
        for descriptor in (process.control.fileno(), process.pidfd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
