"""The entry of a child process, driven through a control socketpair."""

from __future__ import annotations

import itertools
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

from pagemill import injection
from pagemill.child import Child
from pagemill.config import SchedulerConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import NONE
from pagemill.injection import InjectedFault
from pagemill.messages.control import Alive, ChildToLauncher, Drain, Failed, LauncherToChild, PeerLost, PeerUp, Progress, Ready, Reload, Start, Stuck
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


def start(kind: str = "worker", injections: tuple[str, ...] = ()) -> Start:
    raw = msgspec.Raw(msgspec.msgpack.encode(CONFIG))
    return Start(kind, 3, 0, 1, b"secret token", raw, NONE, injections=injections)  # type: ignore[arg-type]


@contextmanager
def beside_a_launcher() -> Iterator[tuple[Child[SchedulerConfig], Control]]:
    """A child in this process, with a non-blocking control socket, and the launcher's end."""
    ours, theirs = control_pair()
    for end in (ours, theirs):
        end.setblocking(False)
    control: Control = ControlSocket(ours, ChildToLauncher)
    child: Child[SchedulerConfig] = Child(start(), CONFIG, ControlSocket(theirs, LauncherToChild))
    try:
        yield child, control
    finally:
        injection.disarm()
        ours.close()
        theirs.close()


def said(control: Control) -> list[ChildToLauncher]:
    """All that has arrived."""
    messages: list[ChildToLauncher] = []
    try:
        while (message := control.receive()) is not None:
            messages.append(message)
    except BlockingIOError:
        pass
    return messages


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


@pytest.mark.parametrize(("habit", "code"), [("fail", 1), ("refuse", 2)])
def test_what_it_cannot_do_is_told_in_one_line_and_whether_it_could_ever_work_in_the_exit_code(habit: str, code: int) -> None:
    with child(habit) as (process, control):
        control.send(start())
        assert control.receive() == Failed(message="the model is made of cheese")
        assert "Traceback" not in process.communicate(timeout=10)[1]
        assert process.returncode == code


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


def test_faults_for_this_process_are_armed_before_it_does_anything() -> None:
    with child("good") as (process, control):
        control.send(start(injections=("scheduler/control.ready=kill", "control.ready=raise")))
        assert isinstance(control.receive(), Progress)
        assert control.receive() == Failed(message="InjectedFault: control.ready")
        process.communicate(timeout=10)
        assert process.returncode == 1


def test_it_says_that_it_is_alive_once_a_second_however_often_its_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((5.0, 5.4, 5.99, 6.0, 6.1, 7.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with beside_a_launcher() as (child, control):
        heard = []
        for _ in range(6):
            child.alive()
            heard.append(said(control))
        assert heard == [[Alive()], [], [], [Alive()], [], [Alive()]]


def test_a_launcher_that_does_not_read_costs_it_nothing_and_hears_all_that_matters_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with beside_a_launcher() as (child, control):
        for _ in range(5000):
            child.alive()
        assert len(child._unsent) == 1
        stuck = Stuck("worker", 0, 0, "did not finish its step")
        child.say(stuck)
        child.say_ready("at last")
        assert set(map(type, said(control))) == {Alive}
        child.alive()
        assert said(control) == [Alive(), stuck, Ready("at last")]


def test_a_launcher_that_is_gone_is_no_error() -> None:
    with beside_a_launcher() as (child, control):
        control.close()
        child.alive()
        child.say_ready("anybody?")
        assert child.receive() is None


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("control.peer_up", PeerUp("scheduler", 0, 0, "ipc://x")),
        ("control.peer_lost", PeerLost("scheduler", 0, 0)),
        ("control.drain", Drain(1.0)),
        ("control.reload", Reload(msgspec.Raw(b"\xc0"))),
    ],
)
def test_each_message_from_the_launcher_passes_its_own_point(point: str, message: LauncherToChild) -> None:
    with beside_a_launcher() as (child, control):
        injection.arm([f"{point}=raise@2"], incarnation=0)
        for other in (PeerUp("worker", 0, 0, "a"), PeerLost("worker", 0, 0), Drain(0.0), Progress("", 0.0, "")):
            control.send(other)
        while True:
            try:
                child.receive()
            except BlockingIOError:
                break
        injection.arm([f"{point}=raise"], incarnation=0)
        control.send(message)
        with pytest.raises(InjectedFault, match=point):
            child.receive()


def test_a_reload_brings_the_config_and_the_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[tuple[str, ...]] = []
    monkeypatch.setattr("pagemill.child.configure", lambda *arguments: configured.append(arguments))
    with beside_a_launcher() as (child, _):
        config = msgspec.structs.replace(CONFIG, log_level="debug", max_num_queued=77)
        assert child.apply_reload(Reload(msgspec.Raw(msgspec.msgpack.encode(config)))) == child.config == config
        assert configured == [("worker-3", "json", "debug")]
