"""What several ranks cost: the parts of their steps, by hand and of a real server, and the plans that they are sent."""

from __future__ import annotations

import pytest

from pagemill.ids import NO_PLAN, PlanId, RowId
from pagemill.messages.worker import Plan, Slice, StepDone
from scheduler.event_log import Record
from scheduler.events import Turn
from scheduler.peers import Peers
from scripts.lib.rank_costs import decode_steps, encodings_per_plan, parts_ms, plan_bytes
from tests.helpers.script import run_bench


def planned(number: int, at: float, *num_tokens: int) -> Record:
    slices = tuple(Slice(RowId(row), 1, 40, tokens, True, b"", NO_PLAN, (b"",)) for row, tokens in enumerate(num_tokens))
    return Record(at, Turn(), [Plan(1, PlanId(number), slices, (), ())])


def answered(number: int, rank: int, at: float, **seconds: float) -> Record:
    return Record(at, StepDone(1, rank, PlanId(number), (), seconds), [])


LOG = [
    planned(1, 0.0, 9, 9),
    answered(1, 0, 0.5, forward=0.5),
    answered(1, 1, 0.5, forward=0.5),
    planned(2, 1.0, 1, 1),
    answered(2, 1, 1.08, forward=0.04, sample=0.01, agree=0.0, reduce=0.02),
    answered(2, 0, 1.09, forward=0.02, sample=0.01, agree=0.01, reduce=0.04),
    planned(3, 1.1, 1),
    answered(3, 0, 1.2, forward=0.1),
    planned(4, 1.2, 1, 1),
]


def test_a_step_is_what_ranks_do_and_wait_for_and_what_is_left_to_the_scheduler() -> None:
    (step,) = decode_steps(LOG, 2)
    assert (step.planned_at, step.ended_at, set(step.seconds)) == (1.0, 1.1, {0, 1})
    parts = parts_ms([step])
    assert parts == pytest.approx({"step_ms": 100.0, "compute_ms": 40.0, "reduce_ms": 20.0, "wait_ms": 15.0, "scheduler_ms": 25.0})
    assert sum(parts.values()) == pytest.approx(2 * parts["step_ms"])


def test_a_plan_has_the_same_bytes_whatever_is_computed_already() -> None:
    short, long = plan_bytes(3, 512), plan_bytes(3, 2048)
    assert short == long
    assert plan_bytes(6, 512) < 2 * short


def test_a_plan_is_encoded_once_whatever_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [encodings_per_plan(size) for size in (1, 2, 8)] == [1.0, 1.0, 1.0]

    def encode_for_each(peers: Peers, message: Plan) -> None:
        for channel in peers._workers.values():
            channel.send_frame(peers._encoder.encode(message))

    monkeypatch.setattr(Peers, "send_workers", encode_for_each)
    assert encodings_per_plan(4) == 4.0


def test_the_benchmark_reports_each_size_that_divides_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines, summary = run_bench("bench_tp", ["2:20:8", "--ranks", 3, 2, "--sequences", 4, "--context", 256, 1024], capsys)
    ranks, *plans = lines
    assert (ranks["scenario"], ranks["ranks"], ranks["workload"]) == ("2 ranks", 2, "2:20:8")
    assert min(ranks[f"{part}_ms"] for part in ("step", "compute", "reduce", "wait", "scheduler")) > 0
    assert [(line["workload"], line["plan_bytes"]) for line in plans] == [("4:256:16", plans[0]["plan_bytes"]), ("4:1024:16", plans[0]["plan_bytes"])]
    assert summary["step_over_first"] == {"2": 1.0}
    assert summary["plan_bytes_over_first_context"] == {"4 sequences": {"256": 1.0, "1024": 1.0}}
    assert summary["encodings_per_plan"] == {"3": 1.0, "2": 1.0}
