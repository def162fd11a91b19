"""Recording and replaying: the same events give the same effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from scheduler.core_config import CoreConfig
from scheduler.event_log import EventLog, EventLogs, read_log
from scheduler.events import Turn
from tests.helpers.core_driver import CoreDriver

REPLAY = Path(__file__).resolve().parents[2] / "scripts" / "replay"


def record(path: Path) -> CoreDriver:
    driver = CoreDriver(num_blocks=10, block_size=4, max_num_batched_tokens=9)
    for stem in range(5):
        driver.add([(stem + i) % 32 for i in range(3 + 4 * stem)], max_tokens=9)
    driver.run()
    log = EventLog(str(path), driver.core.config)
    for now, event, effects in driver.log:
        log.append(now, event, effects)
    log.close()
    return driver


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(REPLAY), str(path), "--check-invariants"], capture_output=True, text=True, timeout=60, check=False)


def test_a_recorded_run_replays_to_the_same_effects(tmp_path: Path) -> None:
    driver = record(tmp_path / "log")
    result = replay(tmp_path / "log")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(driver.log)} events replayed" in result.stdout


def test_a_log_reads_back_as_written(tmp_path: Path) -> None:
    driver = record(tmp_path / "log")
    config, records = read_log(tmp_path / "log")
    assert config == driver.core.config
    assert [(entry.now, entry.event, entry.effects) for entry in records] == driver.log


def test_another_outcome_is_found_and_named(tmp_path: Path) -> None:
    driver = record(tmp_path / "log")
    other = msgspec.structs.replace(driver.core.config, max_num_batched_tokens=8)
    log = EventLog(str(tmp_path / "other"), other)
    for now, event, effects in driver.log:
        log.append(now, event, effects)
    log.close()
    result = replay(tmp_path / "other")
    assert result.returncode == 1
    assert "recorded:" in result.stdout


def test_a_log_cut_short_by_a_crash_is_read_up_to_there(tmp_path: Path) -> None:
    driver = record(tmp_path / "log")
    (tmp_path / "cut").write_bytes((tmp_path / "log").read_bytes()[:-5])
    _, records = read_log(tmp_path / "cut")
    assert len(list(records)) == len(driver.log) - 1


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "is empty"), (b"no log", "is no event log"), (b"\x01\x00\x00\x00\xc1", "is no event log of this version: ")]
)
def test_something_else_is_refused_with_a_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "log").write_bytes(content)
    refused = replay(tmp_path / "log")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"replay: {tmp_path}/log {says}")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("exists", [False, True])
def test_the_log_is_readable_by_its_owner_only(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "log").touch(0o644)
    record(tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_each_core_of_each_scheduler_has_a_log_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    for incarnation in range(2):
        logs = EventLogs(path, incarnation, first_epoch=100)
        for epoch in (100, 101):
            logs.begin(CoreConfig(epoch=epoch))
            logs.append(float(incarnation), Turn(), [])
        logs.close()
    files = {file.name: read_log(file) for file in tmp_path.iterdir()}
    assert {name: (config.epoch, [record.now for record in records]) for name, (config, records) in files.items()} == {
        "log": (100, [0.0]),
        "log.0.1": (101, [0.0]),
        "log.1.0": (100, [1.0]),
        "log.1.1": (101, [1.0]),
    }


@pytest.mark.parametrize("noticed_by", ["append", "flush", "close"])
def test_a_log_that_cannot_be_written_ends_and_the_next_core_has_one_again(noticed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("scheduler.event_log.log", SimpleNamespace(error=lambda event, error: said.append(error)))
    monkeypatch.setattr("os.fchmod", lambda *_: None)  # the device is everybody's
    (tmp_path / "log").symlink_to("/dev/full")
    logs = EventLogs(str(tmp_path / "log"), 0, first_epoch=0)
    logs.begin(CoreConfig(epoch=0))
    match noticed_by:
        case "append":
            for _ in range(10_000):  # more than a buffer holds
                logs.append(1.0, Turn(), [])
        case "flush":
            logs.flush()
    logs.begin(CoreConfig(epoch=1))
    logs.append(2.0, Turn(), [])
    logs.close()
    assert said == ["No space left on device"]
    assert [record.now for record in read_log(tmp_path / "log.0.1")[1]] == [2.0]


def test_a_log_that_cannot_be_opened_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("scheduler.event_log.log", SimpleNamespace(error=lambda event, error: said.append(error)))
    logs = EventLogs(str(tmp_path / "nowhere" / "log"), 0, first_epoch=0)
    logs.begin(CoreConfig())
    logs.append(1.0, Turn(), [])
    logs.flush()
    logs.close()
    assert said == ["No such file or directory"]


def test_without_a_path_there_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logs = EventLogs("", 0, first_epoch=0)
    logs.begin(CoreConfig())
    logs.append(1.0, Turn(), [])
    logs.close()
    assert list(tmp_path.iterdir()) == []


def test_a_log_whose_mode_cannot_be_set_leaves_no_descriptor_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.fchmod", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    logs = EventLogs(str(tmp_path / "log"), 0, 0)
    for epoch in range(3):
        logs.begin(CoreConfig(num_blocks=4, block_size=4, epoch=epoch))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
