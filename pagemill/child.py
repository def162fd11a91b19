"""The entry of every child process: who am I, what is my configuration, and what if the launcher dies.

`child = enter("worker", WorkerConfig)` stands first in each `__main__`; heavy imports come after it, so
that a child is titled, logged and watched before it does anything that takes long. Afterwards the process
holds its decoded config, its end of the control socketpair, and two independent ropes to the launcher: the
kernel kills it when the launcher's thread ends, and a thread ends it when the control socket does. All
that a child hears from the launcher and says to it passes through `Child`, faults injected for tests included.
This module must not know what a frontend, scheduler or worker does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from argparse import ArgumentParser
from collections import deque
from types import TracebackType
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec
import setproctitle

from pagemill import PROTOCOL_VERSION, injection
from pagemill.control import ControlSocket
from pagemill.errors import REFUSED_CODE
from pagemill.ids import NONE
from pagemill.messages.control import Alive, ChildToLauncher, Drain, Failed, LauncherToChild, PeerLost, PeerUp, Ready, Reload, Start
from pagemill.messages.wire import Hello, ProcessKind
from pagemill.telemetry import configure, get_logger

#: After end of file on the control socket the main thread has this long to end by itself.
ORPHAN_GRACE_S = 2.0
#: `Alive` is said at most this often, however often a main loop turns.
ALIVE_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1


class ProcessConfig(Protocol):
    """What every process's config has."""

    @property
    def log_format(self) -> str: ...
    @property
    def log_level(self) -> str: ...


Config = TypeVar("Config", bound=ProcessConfig)


class Child(Generic[Config]):
    """What a child process was given. `control` is blocking until its owner says otherwise."""

    def __init__(self, start: Start, config: Config, control: ControlSocket[ChildToLauncher, LauncherToChild]) -> None:
        self.start = start
        self.config = config  #: as of the last `apply_reload`
        self.control = control
        self._unsent: deque[ChildToLauncher] = deque()  #: found the socket full
        self._alive_at = float("-inf")  #: when the last `Alive` was said

    def receive(self) -> LauncherToChild | None:
        """The launcher's next message, None if the launcher is gone. Raises BlockingIOError as the socket's mode says."""
        message = self.control.receive()
        match message:
            case PeerUp():
                injection.reach("control.peer_up")
            case PeerLost():
                injection.reach("control.peer_lost")
            case Drain():
                injection.reach("control.drain")
            case Reload():
                injection.reach("control.reload")
            case _:
                pass
        return message

    def say(self, message: ChildToLauncher) -> None:
        """Tells the launcher, now or, where the socket is non-blocking and full, before the next `Alive`: a stopped launcher costs nothing."""
        self._unsent.append(message)
        self._send_unsent()

    def say_ready(self, detail: str, worker_incarnation: int = NONE) -> None:
        """This process can do its work; `detail` is one line for the operator. A scheduler names the workers it does it with."""
        injection.reach("control.ready")
        self.say(Ready(detail, worker_incarnation))

    def alive(self) -> None:
        """To be called from the main loop each time it turns, and at least once a second. Whoever began and then stops is replaced."""
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_INTERVAL_S:
            self._alive_at = now
            if not self._unsent:  # what was not read says no more if it is longer
                self._unsent.append(Alive())
            self._send_unsent()

    def apply_reload(self, message: Reload) -> Config:
        """The config anew, decoded; the log level follows it at once. What else may change is up to the caller."""
        self.config = msgspec.msgpack.decode(message.config, type=type(self.config))
        configure(_name(self.start), self.config.log_format, self.config.log_level)
        return self.config

    def hello(self) -> Hello:
        """This process's handshake on every channel."""
        return Hello(
            token=self.start.token,
            protocol_version=PROTOCOL_VERSION,
            kind=self.start.kind,
            index=self.start.index,
            incarnation=self.start.incarnation,
        )

    def fail(self, message: str) -> NoReturn:
        """Ends the process for a reason the operator can act on: one line, no traceback."""
        self._end_with(message, 1)

    def refuse(self, message: str) -> NoReturn:
        """Ends it because what was asked for cannot be had: nothing broke, and another try would end the same way."""
        self._end_with(message, REFUSED_CODE)

    def _end_with(self, message: str, code: int) -> NoReturn:
        self.say(Failed(message=_one_line(message)))
        raise SystemExit(code)

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                self.control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            pass


def enter(kind: ProcessKind, config_type: type[Config], argv: list[str] | None = None) -> Child[Config]:
    """Becomes a child of kind `kind`. Exits at once if the launcher is already gone."""
    faulthandler.enable()
    _leave_no_core()
    _die_with_parent()
    control: ControlSocket[ChildToLauncher, LauncherToChild] = ControlSocket(_inherited_socket(kind, argv), LauncherToChild)
    start = control.receive()
    if start is None:
        raise SystemExit(1)
    if not isinstance(start, Start) or start.kind != kind:
        raise SystemExit(f"pagemill: {kind} was started as something else; use `pagemill serve`")
    for fd in (start.arena_fd, start.directory_fd):
        if fd != NONE:
            os.set_inheritable(fd, False)
    setproctitle.setproctitle(f"pagemill: {kind} {start.index}")
    config = msgspec.msgpack.decode(start.config, type=config_type)
    configure(_name(start), config.log_format, config.log_level)
    injection.arm(start.injections, kind=kind, incarnation=start.incarnation)
    child = Child(start, config, control)
    _report_uncaught(child)
    threading.Thread(target=_end_with_launcher, args=(control.fileno(),), name="launcher watch", daemon=True).start()
    return child


def _name(start: Start) -> str:
    """As logs show it."""
    return f"{start.kind}-{start.index}"


def _one_line(message: str) -> str:
    return " ".join(message.split())[:1000]


def _inherited_socket(kind: ProcessKind, argv: list[str] | None) -> socket.socket:
    parser = ArgumentParser(prog=kind, description=f"Pagemill's {kind} process. Started by `pagemill serve`, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited end of the control socketpair")
    fd: int = parser.parse_args(argv).control_fd
    try:
        end = socket.socket(fileno=fd)
    except OSError:
        raise SystemExit(f"pagemill: {kind} is started by `pagemill serve`, not by hand") from None
    end.set_inheritable(False)
    return end


def _leave_no_core() -> None:
    """A core file would hold prompts, keys and weights. Who wants one raises the soft limit again with prlimit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the parent thread ends. Where that fails, the watch thread remains."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with_launcher(fd: int) -> None:
    """Waits for the launcher's end to close, then ends this process, whatever its main thread is doing."""
    hangup = select.poll()
    hangup.register(fd, 0)  # hang-up is always reported; without POLLIN no frame is taken from the main thread
    hangup.poll()
    time.sleep(ORPHAN_GRACE_S)
    # The main thread may sit in a kernel for minutes and cannot be interrupted from here: no clean way is left.
    os._exit(1)


def _report_uncaught(child: Child[Config]) -> None:
    """An exception nobody handled is logged with its traceback, and told to the launcher in one line."""

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        get_logger("pagemill.child").error("crashed", exc_info=(kind, error, traceback))
        child.say(Failed(message=_one_line(f"{kind.__name__}: {error}")))

    sys.excepthook = report
