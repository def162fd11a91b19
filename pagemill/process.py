"""One child process as the launcher holds it: its pid, its control socket, how it started and how it ended.

A child is started by exec from a command, never by fork, in a process group of its own: Ctrl-C reaches
only the launcher. Only this recorded process is ever signalled, by its pidfd, so it cannot have become
somebody else's. Must not know what the child does, nor when to stop it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pagemill.control import ControlSocket, control_pair
from pagemill.errors import REFUSED_CODE
from pagemill.ids import NONE
from pagemill.messages.control import ChildToLauncher, Failed, LauncherToChild, Start
from pagemill.messages.wire import ProcessKind

#: The first epoch of a scheduler leaves room for as many rebuilds of the core and restarts of workers by the one before.
_EPOCHS_PER_INCARNATION = 1 << 20


@dataclass(frozen=True)
class ProcessSpec:
    """What to start."""

    kind: ProcessKind
    index: int
    command: tuple[str, ...]  #: `--control-fd N` is appended
    environment: Mapping[str, str]
    config: msgspec.Struct
    listen_fd: int = NONE
    arena_fd: int = NONE
    directory_fd: int = NONE


def encode_config(config: msgspec.Struct) -> msgspec.Raw:
    """As it travels to a child."""
    return msgspec.Raw(msgspec.msgpack.encode(config))


class Process:
    """A started child. The caller's thread must be the main one: the child dies with the thread that started it."""

    def __init__(self, spec: ProcessSpec, *, incarnation: int, token: bytes, injections: tuple[str, ...] = (), rendezvous: str = "") -> None:
        """Raises OSError."""
        self.kind = spec.kind
        self.index = spec.index
        self.incarnation = incarnation
        self.ready = False
        self.failure = ""  #: what the child itself said before it ended
        self.has_refused = False  #: it has ended because what was asked of it cannot be
        self.condemned_for = ""  #: why it was killed
        ours, theirs = control_pair()
        ours.setblocking(False)
        inherited = [theirs.fileno(), *(fd for fd in (spec.listen_fd, spec.arena_fd, spec.directory_fd) if fd != NONE)]
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    [*spec.command, "--control-fd", str(theirs.fileno())],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    env=dict(spec.environment),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        try:
            self.pidfd = os.pidfd_open(self._popen.pid)
        except OSError:  # out of descriptors: what cannot be watched must not live
            ours.close()
            self._popen.kill()
            self._popen.wait()
            raise
        self.control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        self.send(
            Start(
                kind=spec.kind,
                index=spec.index,
                incarnation=incarnation,
                epoch=(incarnation + 1) * _EPOCHS_PER_INCARNATION if spec.kind == "scheduler" else 0,
                token=token,
                config=encode_config(spec.config),
                listen_fd=spec.listen_fd,
                arena_fd=spec.arena_fd,
                directory_fd=spec.directory_fd,
                injections=injections,
                rendezvous=rendezvous,
            )
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Not reaped yet."""
        return self._popen.returncode is None

    def send(self, message: LauncherToChild) -> None:
        """Sends if the child is there and reads; a child that does neither is found by other means."""
        try:
            self.control.send(message)
        except BlockingIOError:
            pass

    def receive(self) -> list[ChildToLauncher] | None:
        """Everything the child has said so far, None if it hung up. Raises MsgspecError for what is no message. Keeps `failure`."""
        messages: list[ChildToLauncher] = []
        try:
            while (message := self.control.receive()) is not None:
                if isinstance(message, Failed):
                    self.failure = message.message
                messages.append(message)
        except BlockingIOError:
            return messages
        return messages or None

    def condemn(self, reason: str) -> None:
        """SIGKILL. `reason` is how it will be said to have ended, if that is what ends it; the first one counts."""
        self.condemned_for = self.condemned_for or reason
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self, timeout_s: float | None = None) -> str:
        """Collects a child that has ended (`pidfd` is readable), and says how: `worker 0 was killed by SIGKILL`. Raises TimeoutExpired."""
        try:
            self.receive()  # its last words
        except msgspec.MsgspecError:
            pass  # it has ended already, and how is known better from its exit code
        code = self._popen.wait(timeout_s)
        self.has_refused = code == REFUSED_CODE and bool(self.failure)
        os.close(self.pidfd)
        self.control.close()
        if self.failure:
            return f"{self}: {self.failure}"
        # Whatever it was condemned for: who fell before the blow did so for a reason of its own.
        return f"{self} {self.condemned_for if self.condemned_for and code == -signal.SIGKILL else _describe(code)}"


def _describe(code: int) -> str:
    """An exit code as Popen has it."""
    if code >= 0:
        return f"exited with code {code}" if code else "ended unasked"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
