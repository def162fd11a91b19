"""One frontend for a whole module of tests, against a fake scheduler whose script each test may replace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.fake_scheduler import counting
from tests.helpers.frontend_server import RunningFrontend, running_frontend


@pytest.fixture(scope="module")
def served() -> Iterator[RunningFrontend]:
    with running_frontend() as running:
        yield running


@pytest.fixture
def frontend(served: RunningFrontend) -> Iterator[RunningFrontend]:
    """The module's frontend, with the fake as it was at first. Nothing may be left running."""
    fake = served.scheduler
    fake.script, fake.repeat_all, fake.burst = counting, False, 1
    fake.gate.set()
    fake.received.clear()
    fake.decisions.clear()
    yield served
    fake.gate.set()
    fake.wait_idle()
