"""The script reports each fault and their sum, and fails if anything went wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest

from scripts.lib.chaos import Outcome
from scripts.lib.chaos_clients import Clients
from scripts.lib.chaos_faults import Fault
from scripts.lib.chaos_watch import Report
from tests.helpers.chaos import AT_REST
from tests.helpers.script import load_bench


def outcome_with(breaches: list[str]) -> Outcome:
    clients = Clients("http://127.0.0.1:1", [])
    clients.outcomes.update({"completed": 40, "broken": 2})
    reports = [Report(Fault("kill", f"frontend {index}"), seen_s=0.1 * index, back_s=1.0 + index) for index in range(3)]
    return Outcome(clients, AT_REST, AT_REST, {"swap": 3.0}, seconds=10.0, num_deaths=3, reports=reports, breaches=breaches)


@pytest.mark.parametrize("breaches", [[], ["1 blocks left"]])
def test_the_script_reports_each_fault_and_the_sum_and_fails_on_a_breach(
    breaches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = outcome_with(breaches)

    class ScriptedChaos:
        clients = outcome.clients

        def __init__(self, *_: object) -> None: ...

        async def run(self, on_round: Callable[[Sequence[Report]], None]) -> Outcome:
            on_round(outcome.reports[:2])
            on_round(outcome.reports[2:])
            return outcome

    script = load_bench("chaos")
    monkeypatch.setattr(script, "chaos_server", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr(script, "Chaos", ScriptedChaos)
    assert script.main(["--seconds", "10", "--seed", "7"]) == len(breaches)
    output = capsys.readouterr()
    *faults, summary = [json.loads(line) for line in output.out.splitlines()]
    assert [(fault["scenario"], fault["process"], fault["in_company"], fault["seed"]) for fault in faults] == [
        ("kill", "frontend 0", True, 7),
        ("kill", "frontend 1", True, 7),
        ("kill", "frontend 2", False, 7),
    ]
    assert summary["recovery_s"] == {"kill frontend": {"faults": 3, "seen_s": {"p50": 0.1, "p100": 0.2}, "back_s": {"p50": 2.0, "p100": 3.0}}}
    assert (summary["completed"], summary["broken_connections"], summary["wrong"], summary["breaches"]) == (40, 2, 0, breaches)
    assert all(breach in output.err for breach in breaches)
