"""One child process as the launcher holds it: its pid, its control socket, how it started and how it ended.

A child is started by exec from a command, never by fork, in a process group of its own: Ctrl-C reaches
only the launcher. Only this recorded pid is ever signalled, and only before it was reaped, so it cannot
have become somebody else's. Must not know what the child does, nor when to stop it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pagemill.control import ControlSocket, control_pair
from pagemill.messages import NONE, ChildToLauncher, Failed, LauncherToChild, ProcessKind, Start


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


class Process:
    """A started child. The caller's thread must be the main one: the child dies with the thread that started it."""

    def __init__(self, spec: ProcessSpec, *, incarnation: int, epoch: int, token: bytes) -> None:
        self.kind = spec.kind
        self.index = spec.index
        self.incarnation = incarnation
        self.ready = False
        self.failure = ""  #: what the child itself said before it ended
        ours, theirs = control_pair()
        ours.setblocking(False)
        inherited = [theirs.fileno(), *(fd for fd in (spec.listen_fd, spec.arena_fd) if fd != NONE)]
        with theirs:
            self._popen = subprocess.Popen(
                [*spec.command, "--control-fd", str(theirs.fileno())],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=dict(spec.environment),
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self._popen.pid)
        self.control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        config = msgspec.Raw(msgspec.msgpack.encode(spec.config))
        self.send(
            Start(
                kind=spec.kind,
                index=spec.index,
                incarnation=incarnation,
                epoch=epoch,
                token=token,
                config=config,
                listen_fd=spec.listen_fd,
                arena_fd=spec.arena_fd,
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

    def receive(self) -> list[ChildToLauncher]:
        """Everything the child has said so far. `Failed` is kept in `failure` as well."""
        messages: list[ChildToLauncher] = []
        try:
            while (message := self.control.receive()) is not None:
                messages.append(message)
        except BlockingIOError:
            pass
        except msgspec.MsgspecError as error:
            self.failure = f"spoke nonsense on its control socket: {error}"
        for message in messages:
            if isinstance(message, Failed):
                self.failure = message.message
        return messages

    def reap(self) -> str:
        """Collects a child that has ended (`pidfd` is readable) and says how, for example `was killed by SIGKILL`."""
        self.receive()
        code = self._popen.wait()
        os.close(self.pidfd)
        self.control.close()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}" if code else "ended unasked"

    def kill(self) -> None:
        """SIGKILL, then reap."""
        self._popen.kill()
        self.reap()
