"""A request record derives what dashboards show from a handful of stamps, and its ledger balances."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from frontend.request_metrics import CLIENT_CLOSED, MAX_REMEMBERED_NAMES, RequestLedger, RequestRecord
from pagemill.ids import NONE
from pagemill.messages.frontend import SequenceOutput
from pagemill.messages.sequences import FinishReason, SequenceKey


class Observer:
    def __init__(self) -> None:
        self.received: list[RequestRecord] = []
        self.finished: list[RequestRecord] = []

    def request_received(self, record: RequestRecord) -> None:
        self.received.append(record)

    def request_finished(self, record: RequestRecord) -> None:
        self.finished.append(record)


class Bench:
    """A ledger with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.observer = Observer()
        self.ledger = RequestLedger(self.observer, lambda: self.now)

    def open(self, endpoint: str = "/v1/completions") -> RequestRecord:
        return self.ledger.open(method="POST", endpoint=endpoint, request_id="cmpl-1")

    def generating(self, n: int = 1, num_prompts: int = 1) -> RequestRecord:
        record = self.open()
        record.describe(stream=True, n=n, max_tokens=8, num_prompt_tokens=10, num_prompts=num_prompts)
        return record

    def after(self, seconds: float) -> None:
        self.now += seconds

    def line(self, record: RequestRecord, status: int = 200) -> dict[str, Any]:
        with capture_logs() as lines:
            self.ledger.close(record, status)
        assert len(lines) == 1
        return dict(lines[0])


def output(tokens: int, reason: FinishReason | None = None, *, queue_s: float = 0.0, cached: int = 0, preemptions: int = 0) -> SequenceOutput:
    return SequenceOutput(SequenceKey(0, 0, 1, 0), 0, tuple(range(tokens)), (), reason, NONE, cached, preemptions, queue_s, "")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_times_of_a_request_follow_from_its_stamps(bench: Bench) -> None:
    record = bench.open()
    bench.after(0.25)  # reading and tokenizing
    record.describe(stream=True, n=1, max_tokens=8, num_prompt_tokens=10)
    bench.after(1.0)
    record.observe(0, output(1, queue_s=0.5))
    for gap in (0.1, 0.3):
        bench.after(gap)
        record.observe(0, output(1))
    bench.after(0.2)
    record.observe(0, output(1, "stop"))
    bench.after(1.0)  # the client reads slowly
    bench.ledger.close(record, 200)
    assert record.ttft_s == pytest.approx(1.25)
    assert record.queue_s == 0.5
    assert record.prefill_s == pytest.approx(0.5)
    assert record.decode_s == pytest.approx(0.6)
    assert record.e2e_s == pytest.approx(2.85)
    assert list(record.choices[0].gaps) == pytest.approx([0.1, 0.3, 0.2])
    assert record.tpot_s == pytest.approx(0.2)
    assert (record.num_output_tokens, record.outcome) == (4, "stop")


def test_gaps_are_counted_per_choice_and_never_between_choices(bench: Bench) -> None:
    record = bench.generating(n=2)
    for choice in (0, 1, 0, 1):
        bench.after(1.0)
        record.observe(choice, output(1))
    assert [list(times.gaps) for times in record.choices.values()] == [[2.0], [2.0]]
    assert record.tpot_s == 2.0


def test_tokens_that_arrive_together_share_their_gap(bench: Bench) -> None:
    record = bench.generating()
    record.observe(0, output(2))
    bench.after(0.9)
    record.observe(0, output(3, "length"))
    assert list(record.choices[0].gaps) == pytest.approx([0.0, 0.3, 0.3, 0.3])
    assert len(record.choices[0].gaps) == record.num_output_tokens - 1
    assert sum(record.choices[0].gaps) == pytest.approx(record.decode_s)


def test_one_token_has_no_time_per_output_token(bench: Bench) -> None:
    record = bench.generating()
    record.observe(0, output(1, "length"))
    assert record.tpot_s is None
    assert record.decode_s == 0.0


def test_tokens_behind_a_stop_string_do_not_count(bench: Bench) -> None:
    record = bench.generating()
    for _ in range(4):
        bench.after(1.0)
        record.observe(0, output(1))
    record.finish(0, "stop", keep=2)
    record.observe(0, output(1, "length"))  # was already on its way
    bench.ledger.close(record, 200)
    assert record.num_output_tokens == 2
    assert list(record.choices[0].gaps) == [1.0]
    assert record.last_token == 102.0
    assert record.finish_reasons == ["stop"]


def test_keeping_no_token_leaves_no_first_token(bench: Bench) -> None:
    record = bench.generating()
    record.observe(0, output(1))
    record.finish(0, "stop", keep=0)
    bench.ledger.close(record, 200)
    assert (record.num_output_tokens, record.ttft_s, record.outcome) == (0, None, "stop")


def test_cached_tokens_of_a_prompt_count_once_for_all_its_choices(bench: Bench) -> None:
    record = bench.generating(n=2, num_prompts=2)
    for choice, cached in enumerate((3, 9, 4, 9)):
        record.observe(choice, output(1, "stop", cached=cached, preemptions=1))
    assert record.num_cached_tokens == 7
    assert record.num_preemptions == 4


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        (["stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "abort", "stop"], "abort"),
        (["stop", "error", "abort"], "error"),
        (["stop", None], "abort"),
        ([None], "abort"),
    ],
)
def test_the_worst_choice_is_the_outcome_of_the_request(bench: Bench, reasons: list[FinishReason | None], outcome: str) -> None:
    record = bench.generating(n=len(reasons))
    for choice, reason in enumerate(reasons):
        record.observe(choice, output(1, reason))
    bench.ledger.close(record, 200)
    assert record.outcome == outcome


def test_a_choice_that_never_began_makes_the_request_aborted(bench: Bench) -> None:
    record = bench.generating(n=2)
    record.observe(0, output(1, "stop"))
    bench.ledger.close(record, 200)
    assert record.outcome == "abort"


@pytest.mark.parametrize(
    ("status", "code", "outcome", "reason"),
    [
        (400, "context_length_exceeded", "refused", "context_length_exceeded"),
        (400, None, "refused", "invalid_request"),
        (401, None, "refused", "invalid_api_key"),
        (429, "queue_full", "refused", "queue_full"),
        (503, None, "refused", "unavailable"),
        (418, None, "refused", "invalid_request"),
        (500, None, "error", "error"),
        (CLIENT_CLOSED, None, "abort", "abort"),
        (200, None, "done", "done"),
    ],
)
def test_every_end_has_one_outcome_and_a_reason(bench: Bench, status: int, code: str | None, outcome: str, reason: str) -> None:
    record = bench.open()
    if code is not None:
        record.refuse(code)
    bench.ledger.close(record, status)
    assert (record.outcome, record.reason) == (outcome, reason)


@pytest.mark.parametrize(
    ("status", "code", "num_tokens", "outcome", "reason", "level"),
    [
        (429, "queue_timeout", 0, "refused", "queue_timeout", "info"),
        (503, "too_slow", 1, "abort", "abort", "info"),
        (500, "internal_error", 0, "error", "error", "error"),
        (500, "internal_error", 1, "error", "error", "error"),
    ],
)
def test_an_error_in_a_response_that_has_begun_counts_though_its_status_was_good(
    bench: Bench, status: int, code: str, num_tokens: int, outcome: str, reason: str, level: str
) -> None:
    record = bench.generating()
    if num_tokens:
        record.observe(0, output(num_tokens))
    record.cut_short(code, status)
    line = bench.line(record)
    assert (record.outcome, record.reason) == (outcome, reason)
    assert (line["status"], line["outcome"], line["log_level"], line.get("refused")) == (200, outcome, level, code if outcome == "refused" else None)


def test_the_server_s_failure_outweighs_that_all_choices_had_ended(bench: Bench) -> None:
    record = bench.generating()
    record.observe(0, output(1, "length"))
    record.cut_short("internal_error", 500)
    bench.ledger.close(record, 200)
    assert record.outcome == "error"


def test_a_request_generates_from_its_submission_to_its_end(bench: Bench) -> None:
    bench.open()  # goes on reading its body
    record = bench.open()
    seen = [bench.ledger.is_generating]
    record.describe(stream=True, n=1, max_tokens=8, num_prompt_tokens=10)
    record.observe(0, output(1, "length"))
    seen.append(bench.ledger.is_generating)
    bench.ledger.close(record, 200)
    assert [*seen, bench.ledger.is_generating] == [False, True, False]
    assert bench.ledger.num_in_flight == 1


def test_closing_twice_counts_once(bench: Bench) -> None:
    record = bench.open()
    assert bench.ledger.num_in_flight == 1
    bench.ledger.close(record, 200)
    bench.ledger.close(record, 500)
    assert bench.ledger.num_in_flight == 0
    assert bench.observer.finished == [record]
    assert record.status == 200


def test_the_access_line_says_what_the_request_cost(bench: Bench) -> None:
    record = bench.generating()
    bench.after(0.5)
    record.observe(0, output(1, queue_s=0.125, cached=4, preemptions=1))
    bench.after(0.25)
    record.observe(0, output(1, "length", queue_s=0.125, cached=4, preemptions=1))
    assert bench.line(record) == {
        "event": "request_finished",
        "log_level": "info",
        "request_id": "cmpl-1",
        "method": "POST",
        "endpoint": "/v1/completions",
        "status": 200,
        "stream": True,
        "n": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 2,
        "finish_reasons": ["length"],
        "outcome": "length",
        "preemptions": 1,
        "queue_ms": 125.0,
        "ttft_ms": 500.0,
        "tpot_ms": 250.0,
        "e2e_ms": 750.0,
    }


def test_a_refused_request_has_a_line_with_its_reason(bench: Bench) -> None:
    record = bench.open()
    record.refuse("context_length_exceeded")
    line = bench.line(record, 400)
    assert (line["status"], line["refused"], line["log_level"]) == (400, "context_length_exceeded", "info")
    assert "prompt_tokens" not in line


@pytest.mark.parametrize(
    ("endpoint", "status", "level"),
    [
        ("/metrics", 200, "debug"),
        ("/readyz", 503, "debug"),
        ("/metrics", 401, "info"),
        ("/v1/models", 200, "info"),
        ("/v1/models", 503, "info"),
        ("/v1/models", 500, "error"),
    ],
)
def test_probes_are_quiet_unless_they_are_refused(bench: Bench, endpoint: str, status: int, level: str) -> None:
    assert bench.line(bench.open(endpoint), status)["log_level"] == level


def test_an_unknown_field_is_counted_each_time_and_warned_of_once(bench: Bench) -> None:
    with capture_logs() as lines:
        for _ in range(2):
            record = bench.open()
            bench.ledger.unknown_fields(record, ["no_stop_trim", "x" * 500])
            assert record.num_unknown_fields == 2
    assert [line["field"] for line in lines] == ["no_stop_trim", "x" * 64]


def test_of_a_long_name_only_the_beginning_is_remembered(bench: Bench) -> None:
    with capture_logs() as lines:
        bench.ledger.unknown_fields(bench.open(), ["x" * 500 + "1", "x" * 500 + "2"])
    assert [line["field"] for line in lines] == ["x" * 64]


def test_names_that_clients_invent_do_not_grow_memory_or_log_without_end(bench: Bench) -> None:
    record = bench.open()
    with capture_logs() as lines:
        bench.ledger.unknown_fields(record, [f"field_{number}" for number in range(MAX_REMEMBERED_NAMES + 10)])
    assert len(lines) == MAX_REMEMBERED_NAMES
    assert record.num_unknown_fields == MAX_REMEMBERED_NAMES + 10
