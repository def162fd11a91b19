"""A short run of what `scripts/chaos` does for ten minutes: random deaths and pauses, and nobody can tell."""

from __future__ import annotations

import asyncio

import pytest

from scripts.lib.chaos import TINY, Chaos, Settings, chaos_server

#: Deaths and pauses; what takes a watchdog's patience to be found is in test_recovery.
SETTINGS = Settings(seconds=15.0, num_streams=10, every_s=0.5, seed=3, kinds=("kill", "segv", "freeze"), scale=TINY, slack_s=10.0)

pytestmark = pytest.mark.timeout(300)


def test_random_faults_change_no_answer_and_leave_nothing_behind() -> None:
    with chaos_server(SETTINGS.scale, SETTINGS.num_streams) as (server, run_folder):
        outcome = asyncio.run(Chaos(SETTINGS, server, run_folder).run())
    assert outcome.breaches == []
    assert outcome.clients.outcomes["completed"] >= SETTINGS.num_streams
    assert len({report.fault.process_kind for report in outcome.reports}) > 1
