"""The launcher with children that do no work: readiness, deaths, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemill.messages import NONE
from tests.helpers.server import ROOT, title_of, wait_for

Start = Callable[..., "Fake"]
GOOD = ("frontend:good", "worker:good", "scheduler:good")


class Fake:
    """A started `tests.helpers.fake_launcher`."""

    def __init__(self, folder: Path, ready_timeout_s: float, habits: tuple[str, ...]) -> None:
        self._log = folder / "log"
        self.run_directories = folder / "run"
        self.run_directories.mkdir()
        environment = {**os.environ, "TMPDIR": str(self.run_directories)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.fake_launcher", str(ready_timeout_s), *habits],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait_for_event(self, name: str, count: int = 1) -> None:
        wait_for(lambda: len(self.events(name)) >= count, 60, lambda: f"no {name} in:\n{self.log}")
        self.children()

    def children(self) -> list[psutil.Process]:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._children[child.pid] = child
        return list(self._children.values())

    def child(self, kind: str) -> psutil.Process:
        return next(child for child in self.children() if title_of(child.pid) == f"pagemill: {kind} 0")

    def living(self) -> list[str]:
        return [title_of(child.pid) for child in self._children.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Fake] = []

    def begin(*habits: str, ready_timeout_s: float = 60.0) -> Fake:
        started.append(Fake(tmp_path, ready_timeout_s, habits))
        return started[-1]

    yield begin
    for fake in started:
        if fake.process.poll() is None:
            fake.process.kill()
            fake.process.wait()


@pytest.mark.parametrize(("number", "drain_s"), [(signal.SIGTERM, 5.0), (signal.SIGINT, 1.0), (signal.SIGHUP, 5.0)])
def test_a_signal_ends_everything_as_asked_frontends_first(start: Start, number: signal.Signals, drain_s: float) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("ready")
    began = time.monotonic()
    fake.process.send_signal(number)
    assert fake.wait() == 0
    assert time.monotonic() - began < 10
    assert fake.living() == []
    assert list(fake.run_directories.iterdir()) == []
    assert fake.events("process_killed") == []
    drains = [(line["process"], line["timeout_s"]) for line in fake.events("drain")]
    assert drains[0] == ("frontend-0", drain_s)
    assert sorted(drains[1:]) == [("scheduler-0", 0.0), ("worker-0", 0.0)]


def test_children_hear_of_each_other_and_not_of_the_terminal(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("peer_up", count=4)
    addresses: dict[str, set[str]] = {}
    for line in fake.events("peer_up"):
        addresses.setdefault(line["process"], set()).add(line["address"])
    assert addresses["scheduler-0"] == addresses["worker-0"] | addresses["frontend-0"]
    assert len(addresses["scheduler-0"]) == 2

    fake.wait_for_event("progress_passed_on", count=2)
    passed_on = fake.events("progress_passed_on")
    assert {line["process"] for line in passed_on} == {"frontend-0"}
    assert {line["detail"] for line in passed_on} == {"half of worker", "half of scheduler"}

    groups = {os.getpgid(child.pid) for child in fake.children()}
    assert len(groups) == 3
    assert os.getpgid(fake.process.pid) not in groups


def test_the_arena_reaches_workers_alone_and_goes_no_further(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("started", count=3)
    told = {line["process"]: line for line in fake.events("started")}
    assert {name: len(line["open_arenas"]) for name, line in told.items()} == {"worker-0": 1, "frontend-0": 0, "scheduler-0": 0}
    assert told["worker-0"]["open_arenas"] == [told["worker-0"]["arena_fd"]]
    assert told["worker-0"]["inheritable"] == []
    assert [told[name]["arena_fd"] for name in ("frontend-0", "scheduler-0")] == [NONE, NONE]


def test_who_does_not_listen_is_killed(start: Start) -> None:
    fake = start("frontend:good", "worker:stuck", "scheduler:deaf")
    fake.wait_for_event("ready")
    fake.process.terminate()
    assert fake.wait() == 0
    assert sorted(line["child"] for line in fake.events("process_killed")) == ["scheduler 0", "worker 0"]
    assert fake.living() == []


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    fake = start("frontend:deaf", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.process.terminate()
    fake.wait_for_event("drain")
    began = time.monotonic()
    wait_for(lambda: ended_after_another_signal(fake), 20, lambda: fake.log)
    assert fake.wait() == 0
    assert time.monotonic() - began < 5  # a deaf frontend would otherwise have its full drain
    assert fake.living() == []


def ended_after_another_signal(fake: Fake) -> bool:
    fake.process.terminate()  # signals close together count as one: it takes several to be a second
    return fake.process.poll() is not None


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("refuse", "pagemill: worker 0: the model is made of cheese"),
        ("quit", "pagemill: worker 0 ended unasked"),
    ],
)
def test_a_child_that_ends_stops_everything_and_is_named(start: Start, habit: str, says: str) -> None:
    fake = start("frontend:good", f"worker:{habit}", "scheduler:good")
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == says
    assert list(fake.run_directories.iterdir()) == []


@pytest.mark.parametrize(("kind", "number"), [("worker", signal.SIGKILL), ("frontend", signal.SIGSEGV), ("scheduler", signal.SIGTERM)])
def test_a_signal_to_a_child_is_its_death(start: Start, kind: str, number: signal.Signals) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("ready")
    fake.child(kind).send_signal(number)
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == f"pagemill: {kind} 0 was killed by {number.name}"
    assert fake.living() == []


def test_who_is_not_ready_in_time_is_named(start: Start) -> None:
    fake = start("worker:slow", "frontend:good", "scheduler:good", ready_timeout_s=6.0)
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: worker 0 was not ready after 6 s"
    assert fake.events("ready") == []


def test_nothing_survives_the_death_of_the_launcher(start: Start) -> None:
    fake = start("frontend:good", "worker:stuck", "scheduler:deaf")
    fake.wait_for_event("ready")
    assert len(fake.living()) == 3
    fake.process.kill()
    fake.wait()
    wait_for(lambda: not fake.living(), 5, lambda: f"still there: {fake.living()}")


def test_the_launcher_loads_neither_zmq_nor_torch_nor_tokenizers() -> None:
    code = "import sys, pagemill.serve, pagemill.model_store; print(sorted({'zmq', 'torch', 'tokenizers', 'transformers'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
