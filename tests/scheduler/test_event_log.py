"""Recording and replaying: the same events give the same effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scheduler.event_log import EventLog, read_log
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


@pytest.mark.parametrize("content", [b"", b"no log", b"\x01\x00\x00\x00\xc1"])
def test_something_else_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    assert replay(tmp_path / "log").returncode == 2


@pytest.mark.parametrize("exists", [False, True])
def test_the_log_is_readable_by_its_owner_only(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "log").touch(0o644)
    record(tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
