"""The entry of a child process, driven through a control socketpair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest

from pagemill.control import ControlSocket, control_pair
from pagemill.messages import NONE, ChildToLauncher, Failed, LauncherToChild, Progress, Ready, Start
from tests.helpers.fake_launcher import CONFIG
from tests.helpers.server import ROOT, title_of, wait_for

Control = ControlSocket[LauncherToChild, ChildToLauncher]


@contextmanager
def child(habit: str, parent: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], Control]]:
    """A fake worker that has got nothing yet. `parent`: a command that starts it in turn."""
    ours, theirs = control_pair()
    ours.settimeout(30)
    command = [*parent, sys.executable, "-m", "tests.helpers.fake_child", "worker", habit, "--control-fd", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    control: Control = ControlSocket(ours, ChildToLauncher)
    try:
        yield process, control
    finally:
        control.close()
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()


def start(kind: str = "worker", config: object = CONFIG) -> Start:
    raw = msgspec.Raw(msgspec.msgpack.encode(config))
    return Start(kind=kind, index=3, incarnation=0, epoch=1, token=b"secret token", config=raw, listen_fd=NONE)  # type: ignore[arg-type]


def test_it_takes_its_title_and_its_configuration_from_the_first_frame() -> None:
    with child("good") as (process, control):
        control.send(start())
        assert isinstance(control.receive(), Progress)
        assert control.receive() == Ready(detail="fake")
        wait_for(lambda: title_of(process.pid) == "pagemill: worker 3", 5, lambda: title_of(process.pid))
        process.terminate()
        _, log = process.communicate(timeout=10)
        assert json.loads(log.splitlines()[0])["process"] == "worker-3"
        assert "secret token" not in log


@pytest.mark.parametrize("habit", ["stuck", "deaf"])
def test_it_ends_when_the_control_socket_does_whatever_it_is_doing(habit: str) -> None:
    with child(habit) as (process, control):
        control.send(start())
        assert isinstance(control.receive(), Progress)
        assert isinstance(control.receive(), Ready)
        began = time.monotonic()
        control.close()
        assert process.wait(10) in (0, 1)
        assert time.monotonic() - began < 5


def test_it_dies_with_the_process_that_started_it_even_if_the_socket_stays_open() -> None:
    with child("stuck", parent=(sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], close_fds=False)")) as (parent, control):
        control.send(start())
        assert isinstance(control.receive(), Progress)
        pid = psutil.Process(parent.pid).children()[0].pid
        os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: not title_of(pid), 5, lambda: f"{title_of(pid)} lives")


def test_a_launcher_that_is_gone_before_the_first_frame_ends_it() -> None:
    with child("good") as (process, control):
        control.close()
        assert process.wait(30) == 1


def test_what_it_cannot_do_is_told_in_one_line() -> None:
    with child("refuse") as (process, control):
        control.send(start())
        assert control.receive() == Failed(message="the model is made of cheese")
        assert "Traceback" not in process.communicate(timeout=10)[1]
        assert process.returncode == 1


def test_an_exception_is_logged_in_full_and_told_in_one_line() -> None:
    with child("crash") as (process, control):
        control.send(start())
        assert control.receive() == Failed(message="RuntimeError: something broke")
        crash = json.loads(process.communicate(timeout=10)[1].splitlines()[-1])
        assert process.returncode == 1
        assert crash["event"] == "crashed"
        assert "Traceback" in crash["exception"]


def test_another_kind_of_start_is_refused() -> None:
    with child("good") as (process, control):
        control.send(start(kind="scheduler"))
        assert "use `pagemill serve`" in process.communicate(timeout=30)[1]
        assert process.returncode == 1


def test_started_by_hand_it_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "tests.helpers.fake_child", "worker", "good", "--control-fd", "99"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert shown.stderr == "pagemill: worker is started by `pagemill serve`, not by hand\n"
