"""A child process without any work, for tests of the launcher: `python -m tests.helpers.fake_child KIND HABIT`.

Habits: `good` says Ready and obeys Drain; `slow` never says Ready; `deaf` ignores Drain; `refuse` fails
with one line; `crash` raises; `quit` ends with code 0; `stuck` sits in native code and reads nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from pagemill.arena_file import ARENA_NAME
from pagemill.child import Child, enter
from pagemill.config import SchedulerConfig
from pagemill.messages import Drain, PeerUp, Progress, Ready
from pagemill.telemetry import get_logger


def main() -> None:
    kind, habit = sys.argv[1], sys.argv[2]
    child = enter(kind, SchedulerConfig, sys.argv[3:])  # type: ignore[arg-type]  # the test names a kind
    arenas = open_arenas()
    inheritable = [fd for fd in arenas if os.get_inheritable(fd)]
    get_logger("fake_child").info("started", arena_fd=child.start.arena_fd, open_arenas=arenas, inheritable=inheritable)
    match habit:
        case "refuse":
            child.fail("the model is\nmade of cheese")
        case "crash":
            raise RuntimeError("something broke")
        case "quit":
            return
    child.control.send(Progress(phase="weights", fraction=0.5, detail=f"half of {kind}"))
    if habit != "slow":
        child.control.send(Ready(detail="fake"))
    if habit == "stuck":
        ctypes.CDLL(None).sleep(600)
    _listen(child, obeys=habit != "deaf")


def open_arenas() -> list[int]:
    """Descriptors of this process that are arenas."""
    links = {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return [int(fd) for fd, target in links.items() if ARENA_NAME in target]


def _listen(child: Child[SchedulerConfig], *, obeys: bool) -> None:
    log = get_logger("fake_child")
    while (message := child.control.receive()) is not None:
        match message:
            case PeerUp():
                log.info("peer_up", kind=message.kind, address=message.address)
            case Progress():
                log.info("progress_passed_on", phase=message.phase, detail=message.detail)
            case Drain():
                log.info("drain", timeout_s=message.timeout_s)
                if obeys:
                    return
            case _:
                log.info("other", message=repr(message))


if __name__ == "__main__":
    main()
