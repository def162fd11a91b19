"""The long checks of the core run, report, and fail when a law is broken. Here they are cut short."""

from __future__ import annotations

import pytest

from scheduler.preemption import Preemption
from tests.helpers.core_driver import CoreDriver
from tests.helpers.script import load_bench

Capture = pytest.CaptureFixture[str]


def test_soak_core_names_its_seeds_and_says_what_happened(capsys: Capture) -> None:
    assert load_bench("soak_core").main(["--events", "1500", "--seed", "7"]) == 0
    output = capsys.readouterr().out
    assert "(seeds 7 to 8)" in output
    assert "every invariant held" in output
    assert "copies done" in output


def test_soak_core_goes_on_after_a_failure_and_names_it(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(driver: CoreDriver) -> bool:
        raise AssertionError("planted")

    monkeypatch.setattr(CoreDriver, "answer", fail)
    assert load_bench("soak_core").main(["--events", "20", "--seed", "7"]) == 1
    output = capsys.readouterr().out
    assert "walk 7 failed" in output
    assert "planted" in output
    assert output.splitlines()[-1].startswith("failed: 7")


def test_model_check_counts_states_and_transitions(capsys: Capture) -> None:
    assert load_bench("model_check").main(["--suite", "--world", "grow, two plans", "--max-states", "500"]) == 0
    world, _, total = capsys.readouterr().out.splitlines()
    assert "grow, two plans, cut short" in world
    assert total.endswith("0 worlds broken, 1 cut short")


def test_model_check_fails_and_tells_the_way_to_a_dead_state(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preemption, "_holders", lambda planner, needy: [])
    assert load_bench("model_check").main(["--suite", "--world", "grow, two plans"]) == 1
    output = capsys.readouterr().out
    assert "BROKEN  grow, two plans: nothing can happen any more" in output
    assert "arrive 0 → " in output
