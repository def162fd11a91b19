"""A child process without any work, for tests of the launcher: `python -m tests.helpers.fake_child KIND HABIT`.

Habits: `good` says Ready (a scheduler at each new worker), then Alive, and obeys Drain; `slow` never says Ready;
`lying` is a scheduler that says it once more for workers who have ended; `waiting` is one that never has what it waits for;
`deaf` ignores Drain; `late` ends some time after it; `fail` fails with one line, and `refuse` because it cannot do what is
asked of it; `crash` raises; `quit` ends with code 0; `stuck` sits in native code and reads nothing; `slow_again` is good
until it is restarted. On SIGUSR1 `nonsense` says what is no message, and any other that worker 0 is stuck, in the
incarnation it last heard of.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from types import FrameType

from pagemill.arena_file import ARENA_NAME, DIRECTORY_NAME
from pagemill.child import Child, enter
from pagemill.config import SchedulerConfig
from pagemill.messages.control import Drain, LauncherToChild, PeerLost, PeerReady, PeerUp, Progress, Reload, Stuck
from pagemill.telemetry import get_logger

#: More than a launcher grants those it has killed, and less than those it has asked to end.
LATE_S = 2.5
log = get_logger("fake_child")


def main() -> None:
    kind, habit = sys.argv[1], sys.argv[2]
    child = enter(kind, SchedulerConfig, sys.argv[3:])  # type: ignore[arg-type]  # the test names a kind
    if habit == "slow_again":
        habit = "slow" if child.start.incarnation else "good"
    memory = [*open_memory(ARENA_NAME), *open_memory(DIRECTORY_NAME)]
    log.info(
        "started",
        incarnation=child.start.incarnation,
        epoch=child.start.epoch,
        rendezvous=child.start.rendezvous,
        max_num_seqs=child.config.max_num_seqs,
        given={"arena": child.start.arena_fd, "directory": child.start.directory_fd},
        open={"arena": open_memory(ARENA_NAME), "directory": open_memory(DIRECTORY_NAME)},
        inheritable=[fd for fd in memory if os.get_inheritable(fd)],
    )
    match habit:
        case "fail":
            child.fail("the model is\nmade of cheese")
        case "refuse":
            child.refuse("the model is\nmade of cheese")
        case "crash":
            raise RuntimeError("something broke")
        case "quit":
            return
    if child.start.rendezvous:
        Path(child.start.rendezvous).touch()  # as ranks do that meet there
    FakeChild(child, habit).run()


def open_memory(name: str) -> list[int]:
    """Descriptors of this process that are memory of this name."""
    links = {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return [int(fd) for fd, target in links.items() if name in target]


class FakeChild:
    """A main loop that tells the log what it hears."""

    def __init__(self, child: Child[SchedulerConfig], habit: str) -> None:
        self._child = child
        self._habit = habit
        self._worker_incarnation = 0

    def run(self) -> None:
        signal.signal(signal.SIGUSR1, self._misbehave)
        self._child.say(Progress(phase="weights", fraction=0.5, detail=f"half of {self._child.start.kind}"))
        if self._habit != "slow" and self._child.start.kind != "scheduler":
            self._child.say_ready("fake")
        if self._habit == "stuck":
            ctypes.CDLL(None).sleep(600)
        self._child.control.socket.setblocking(False)
        while self._listen():
            self._child.alive()
            select.select([self._child.control], [], [], 0.2)

    def _listen(self) -> bool:
        """False when it is to end."""
        try:
            while (message := self._child.receive()) is not None:
                self._note(message)
                if isinstance(message, Drain) and self._habit != "deaf":
                    select.select([], [], [], LATE_S if self._habit == "late" else 0.0)
                    return False
        except BlockingIOError:
            return True
        return False

    def _note(self, message: LauncherToChild) -> None:
        match message:
            case PeerUp():
                log.info("peer_up", kind=message.kind, incarnation=message.incarnation, address=message.address)
                if message.kind == "worker":
                    self._worker_incarnation = message.incarnation
                    if self._habit not in ("lying", "waiting"):
                        self._child.say_ready("fake", message.incarnation)
            case PeerReady():
                log.info("peer_ready", kind=message.kind, index=message.index, incarnation=message.incarnation)
                if self._habit == "lying":
                    self._child.say_ready("fake", 0)
                    log.info("lied")
            case PeerLost():
                log.info("peer_lost", kind=message.kind, index=message.index, incarnation=message.incarnation, reason=message.reason)
            case Progress():
                log.info("progress_passed_on", phase=message.phase, detail=message.detail)
            case Drain():
                log.info("drain", timeout_s=message.timeout_s)
            case Reload():
                log.info("reload", max_num_seqs=self._child.apply_reload(message).max_num_seqs)
                log.debug("debugging")
            case _:
                log.info("other", message=repr(message))

    def _misbehave(self, _: int, __: FrameType | None) -> None:
        if self._habit == "nonsense":
            self._child.control.socket.send(b"\xc1")
            return
        reason = f"did not finish its step, says {self._child.start.kind}"
        self._child.say(Stuck("worker", 0, self._worker_incarnation + 1, "is accused too early"))
        self._child.say(Stuck("worker", 0, self._worker_incarnation, reason))


if __name__ == "__main__":
    main()
