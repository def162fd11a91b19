"""The signals that reach a launcher with children that do no work: the end, a reload, or nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.server import wait_for
from tests.helpers.started_launcher import GOOD, Start, StartedLauncher


@pytest.mark.parametrize(("number", "drain_s"), [(signal.SIGTERM, 5.0), (signal.SIGINT, 1.0)])
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


def ended_after_another_signal(fake: StartedLauncher) -> bool:
    fake.process.terminate()  # signals close together count as one: it takes several to be a second
    return fake.process.poll() is not None


def test_a_server_that_ignores_hangups_is_deaf_to_them(start: Start, tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fake = start("--reload", str(tmp_path / "none"), *GOOD)
    finally:
        signal.signal(signal.SIGHUP, previous)
    fake.wait_for_event("ready")
    fake.process.send_signal(signal.SIGHUP)
    fake.process.terminate()
    assert fake.wait() == 0
    assert fake.events("reload_refused") == []


def test_a_server_ends_with_the_terminal_that_it_writes_to(start: Start) -> None:
    terminal, ours = os.openpty()
    fake = start(*GOOD, stderr=ours)
    os.close(ours)
    shown = b""
    while b'"ready"' not in shown:
        shown += os.read(terminal, 65536)
    fake.process.send_signal(signal.SIGHUP)  # while there is a terminal this ends nothing
    fake.child("worker 0").kill()
    while b'"server_ready"' not in shown:
        shown += os.read(terminal, 65536)
    fake.children()
    os.close(terminal)
    fake.process.send_signal(signal.SIGHUP)
    assert fake.wait() == 0
    assert fake.living() == []
