"""A launcher with children that do no work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.started_launcher import Start, StartedLauncher


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts one with these arguments of `tests.helpers.fake_launcher`."""
    started: list[StartedLauncher] = []

    def begin(*arguments: str, stderr: int | None = None) -> StartedLauncher:
        started.append(StartedLauncher(tmp_path, arguments, stderr))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.close()
