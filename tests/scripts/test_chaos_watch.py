"""What `scripts/chaos` sees of a repair: when it was noticed, when it was over, and what took too long."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from scripts.lib.chaos_clients import Clients
from scripts.lib.chaos_faults import Fault, Limits, Struck
from scripts.lib.chaos_watch import LOST, RESTARTED, Report, Watch, disturb
from tests.helpers.chaos import response
from tests.helpers.server import LogFollower, Server


class Patient:
    """A server that is struck in a test: it notices, repairs itself and says so, or not, as it is told."""

    def __init__(self, folder: Path, *, seen_s: float = 0.05, repaired_s: float = 0.2, is_ready_again: bool = True) -> None:
        self.process = SimpleNamespace(poll=lambda: None)
        self.url = ""
        self.clients = SimpleNamespace(num_parts=0, excuse=None)
        self._log_path = folder / "log"
        self._log_path.touch()
        self._seen_s, self._repaired_s, self._is_ready_again = seen_s, repaired_s, is_ready_again
        self._status = "200 OK"

    def follow(self) -> LogFollower:
        return LogFollower(self._log_path, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            self.clients.num_parts += self._status == "200 OK"
            writer.write(response(self._status, "{}"))

    def be_struck(self, *_: object) -> Struck:
        """Called in a thread."""
        at = time.time()
        self.loop.call_soon_threadsafe(self.loop.call_later, self._seen_s, self._notice)
        return Struck(at, psutil.Process())

    def _notice(self) -> None:
        self._status = "503 Service Unavailable"
        self._say(LOST)
        self.loop.call_later(self._repaired_s, self._recover)

    def _recover(self) -> None:
        self._say(RESTARTED)
        self._status = "200 OK" if self._is_ready_again else self._status

    def _say(self, event: str, child: str = "worker 0") -> None:
        line = {"timestamp": datetime.now(UTC).isoformat(), "event": event, "child": child}
        with self._log_path.open("a") as log:
            log.write(json.dumps(line) + "\n")

    async def suffer(self, limits: Limits) -> tuple[Report, Watch]:
        self.loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            watch = Watch(cast(Server, self))
            watching = asyncio.create_task(watch.run())
            report = await disturb(cast(Server, self), watch, cast(Clients, self.clients), Fault("kill", "worker 0"), limits)
            watching.cancel()
            return report, watch


def test_what_never_comes_or_comes_late_is_a_breach() -> None:
    report = Report(Fault("kill", "worker 0"))
    assert report.measure("seen", 10.0, 10.5, 1.0) == 0.5
    assert report.breaches == []
    assert report.measure("seen", 10.0, 12.0, 1.0) == 2.0
    assert report.measure("ready", 10.0, None, 1.0) is None
    assert report.breaches == ["kill worker 0: seen after 2.0 s, of 1.0 s", "kill worker 0: not ready at all"]


def test_ranks_that_end_together_are_one_death(tmp_path: Path) -> None:
    patient = Patient(tmp_path)
    watch = Watch(cast(Server, patient))
    for event, child in ((LOST, "worker 1"), (LOST, "worker 0"), (LOST, "frontend 0"), (RESTARTED, "worker 0"), (RESTARTED, "worker 1"), (LOST, "worker 0")):
        patient._say(event, child)
    watch._read_log()
    assert watch.deaths == Counter({"worker 1": 1, "worker 0": 1, "frontend 0": 1})
    assert watch.down == {"frontend 0", "worker 0"}


def test_what_a_repair_takes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Patient(tmp_path)
    monkeypatch.setattr("scripts.lib.chaos_watch.strike", patient.be_struck)
    report, watch = asyncio.run(patient.suffer(Limits(load_s=0.0, step_s=0.0, slack_s=20.0)))
    assert report.breaches == []
    assert report.seen_s is not None
    assert report.unready_s is not None
    assert report.back_s is not None
    assert 0.05 <= report.seen_s < report.seen_s + 0.2 <= report.seen_s + report.back_s
    assert watch.deaths == {"worker 0": 1}
    assert watch.down == set()


@pytest.mark.parametrize(
    ("patient", "limits", "breaches"),
    [
        ({"seen_s": 0.3}, Limits(20.0, 0.0, -0.8), ["seen after", "unready after"]),
        ({"repaired_s": 0.5}, Limits(-4.8, 0.0, 0.0), ["restarted after", "ready after", "going on after"]),
        ({"seen_s": 60.0}, Limits(-4.0, 0.0), ["not seen at all", "not unready at all", "not restarted at all", "going on after"]),
        ({"is_ready_again": False}, Limits(-5.0, 0.0), ["restarted after", "not ready at all", "not going on at all"]),
    ],
)
def test_what_takes_too_long_is_a_breach(patient: dict[str, Any], limits: Limits, breaches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck = Patient(tmp_path, **patient)
    monkeypatch.setattr("scripts.lib.chaos_watch.strike", struck.be_struck)
    monkeypatch.setattr("scripts.lib.chaos_watch._PATIENCE_S", 1.0)
    report, _ = asyncio.run(struck.suffer(limits))
    for breach, says in zip(report.breaches, breaches, strict=True):
        assert breach.startswith("kill worker 0: ")
        assert says in breach
