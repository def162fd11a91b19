"""Launcher and children, over the control socketpair (`pagemill.control`): who lives, who is ready, who is to end.

One frame is one message. They carry no epoch and need no handshake: the launcher has made both ends itself.
"""

from __future__ import annotations

import msgspec

from pagemill.ids import NONE
from pagemill.messages.wire import Message, ProcessKind

# --- launcher -> child -----------------------------------------------------------------------------------


class Start(Message):
    """First control frame to a child. Carries secrets, which therefore never stand on a command line."""

    kind: ProcessKind
    index: int
    incarnation: int
    epoch: int  #: schedulers: their first epoch, above all of earlier incarnations; others: 0, older than any
    token: bytes
    config: msgspec.Raw  #: msgpack of the child's own config struct (`pagemill.config`)
    listen_fd: int  #: frontends: the bound listening socket, else NONE
    arena_fd: int = NONE  #: workers: the memfd of the swap arena, NONE without one
    directory_fd: int = NONE  #: schedulers: the memfd of the KV directory (`kvstore.kv_directory`)
    injections: tuple[str, ...] = ()  #: faults to inject, for tests (`pagemill.injection`)
    rendezvous: str = ""  #: workers that are several: the file through which the ranks of this incarnation find each other

    def __repr__(self) -> str:
        return f"Start({self.kind} {self.index}, incarnation {self.incarnation}, epoch {self.epoch})"


class PeerUp(Message):
    """A peer exists at this address (the scheduler binds it, the others connect). Also an event of the core."""

    kind: ProcessKind
    index: int
    incarnation: int
    address: str


class PeerReady(Message):
    """Launcher to scheduler: this worker has loaded, lately or for a former scheduler, and owes its `WorkerReady` without further delay."""

    kind: ProcessKind
    index: int
    incarnation: int


class PeerLost(Message):
    """A peer is gone. Also an event of the core. Frontends hear of every process, for their 503."""

    kind: ProcessKind
    index: int
    incarnation: int
    reason: str = ""  #: how it ended, one line for the operator; not for clients


class Drain(Message):
    """Finish and exit: no new work; what still runs after `timeout_s` is ended. Also an event of the core."""

    timeout_s: float


class Reload(Message):
    """Launcher to child: its config anew, of which it takes over what may change at run time."""

    config: msgspec.Raw  #: as in `Start`

    def __repr__(self) -> str:
        return "Reload(...)"


# --- child -> launcher -----------------------------------------------------------------------------------


class Alive(Message):
    """Child to launcher, every second, from its main loop: it gets on. A worker's forwards are watched by the scheduler instead."""


class Stuck(Message):
    """Scheduler to launcher: this peer does not do its work (a step past its deadline, numbers that are none). It is to be replaced."""

    kind: ProcessKind
    index: int
    incarnation: int
    reason: str  #: one line for the operator


class Explained(Message):
    """Scheduler to launcher: this many of the last deaths had a cause that is found and ended. They say nothing of the server's own health."""

    num_deaths: int


class Progress(Message):
    """Child to launcher, which passes it on to frontends for their 503 and shows it."""

    phase: str  #: "fetch", "weights", "prepare", "warmup", ...
    fraction: float  #: 0 to 1
    detail: str


class Ready(Message):
    """Child to launcher: this process can do its work. `detail` is one line for the operator."""

    detail: str
    worker_incarnation: int = NONE  #: schedulers: of the workers it has met; without them it is not ready any more


class Failed(Message):
    """Child to launcher before a non-zero exit: the one line an operator needs."""

    message: str


LauncherToChild = Start | PeerUp | PeerReady | PeerLost | Drain | Reload | Progress
ChildToLauncher = Progress | Ready | Failed | Alive | Stuck | Explained
