"""One child process: how its end is told, and that none is left behind that cannot be watched."""

from __future__ import annotations

import errno
import os
import select

import psutil
import pytest

from pagemill.process import Process, ProcessSpec
from tests.helpers.fake_launcher import CONFIG


def spec(script: str) -> ProcessSpec:
    return ProcessSpec("worker", 0, ("/bin/sh", "-c", script), dict(os.environ), CONFIG)


def ended(process: Process) -> str:
    """How it ended, once it has."""
    assert select.select([process.pidfd], [], [], 30)[0], "it does not end"
    return process.reap()


@pytest.mark.parametrize(
    ("script", "said"),
    [("kill -SEGV $$", "worker 0 was killed by SIGSEGV"), ("exit 3", "worker 0 exited with code 3"), ("exit 0", "worker 0 ended unasked")],
)
def test_who_falls_before_the_blow_did_so_for_a_reason_of_its_own(script: str, said: str) -> None:
    process = Process(spec(script), incarnation=0, token=b"t")
    assert select.select([process.pidfd], [], [], 30)[0]
    process.condemn("did not complete a step")
    assert ended(process) == said


def test_who_is_killed_is_said_to_have_ended_for_the_first_reason() -> None:
    process = Process(spec("sleep 600"), incarnation=0, token=b"t")
    process.condemn("did not complete a step")
    process.condemn("did not end when asked")
    assert ended(process) == "worker 0 did not complete a step"


def test_who_is_killed_by_others_is_not_said_to_be_condemned() -> None:
    process = Process(spec("kill -KILL $$"), incarnation=0, token=b"t")
    assert ended(process) == "worker 0 was killed by SIGKILL"


def test_a_child_that_cannot_be_watched_does_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = psutil.Process().children()
    descriptors = psutil.Process().num_fds()
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Process(spec("sleep 600"), incarnation=0, token=b"t")
    assert psutil.Process().children() == before
    assert psutil.Process().num_fds() == descriptors
