"""The load generator against a real server with a tiny model, and the numbers it makes of its records."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.lib.serving_client import Record, ServiceLevel, summary
from tests.helpers.script import SCRIPTS, read_lines
from tests.helpers.server import Server


def test_it_reports_each_load_against_a_running_server(plain_server: Server) -> None:
    command = [sys.executable, str(SCRIPTS / "bench_serving"), "5:20:4", "--url", plain_server.url, "--vocab-size", "500"]
    in_turn = subprocess.run([*command, "--concurrency", "1", "3"], capture_output=True, text=True, check=True)
    at_rate = subprocess.run([*command, "--request-rate", "50", "--ttft-slo-ms", "0.001"], capture_output=True, text=True, check=True)
    refused = subprocess.run([*command, "--model", "nobody"], capture_output=True, text=True, check=False)
    lines, totals = read_lines(in_turn.stdout)
    assert [line["scenario"] for line in lines] == ["concurrency 1", "concurrency 3"]
    for line in lines:
        assert (line["completed"], line["failed"], line["good_share"]) == (5, 0, 1.0)
        assert line["output_tok_s"] == pytest.approx(5 * 4 / line["seconds"], rel=1e-3)
        assert line["total_tok_s"] == pytest.approx(5 * 24 / line["seconds"], rel=1e-3)
        assert 0 < line["ttft_ms"]["p50"] <= line["ttft_ms"]["p99"] <= line["e2e_ms"]["p99"]
    assert set(totals["ratios"]) == {"concurrency 1", "concurrency 3"}
    (line,), _ = read_lines(at_rate.stdout)
    assert (line["scenario"], line["completed"], line["goodput_request_s"]) == ("rate 50/s", 5, 0.0)
    assert refused.returncode == 1
    assert "HTTP 404" in refused.stderr


def test_a_server_that_is_not_there_is_one_line_and_no_traceback() -> None:
    command = [sys.executable, str(SCRIPTS / "bench_serving"), "--url", "http://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("bench_serving: http://127.0.0.1:1: ")
    assert len(ended.stderr.splitlines()) == 1


def record(ttft: float, gap: float, num_tokens: int = 3, error: str = "") -> Record:
    """Sent at 10 s; tokens `gap` apart, the stream ends with the last."""
    times = [10 + ttft + gap * index for index in range(num_tokens)]
    return Record(sent_at=10.0, token_times=times, num_tokens=num_tokens, ended_at=times[-1], error=error)


def test_times_are_milliseconds_of_completed_requests() -> None:
    found = summary([record(0.5, 0.1), record(1.0, 0.3), record(9.0, 9.0, error="HTTP 429")], 2.0, ServiceLevel())
    assert found["ttft_ms"] == pytest.approx({"p50": 500, "p90": 1000, "p99": 1000})
    assert found["itl_ms"] == pytest.approx({"p50": 100, "p90": 300, "p99": 300})
    assert found["tpot_ms"] == pytest.approx({"p50": 100, "p90": 300, "p99": 300})
    assert found["e2e_ms"] == pytest.approx({"p50": 700, "p90": 1600, "p99": 1600})
    assert (found["completed"], found["failed"], found["request_s"]) == (2, 1, 1.0)


def test_goodput_counts_requests_that_kept_every_level() -> None:
    records = [record(0.5, 0.1), record(0.5, 0.3), record(2.0, 0.1), record(0.1, 0.1, error="reset")]
    found = summary(records, 2.0, ServiceLevel(ttft_s=1.0, tpot_s=0.2))
    assert (found["goodput_request_s"], found["good_share"]) == (0.5, 0.25)


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert summary([record(0.5, 0.1, num_tokens=1)], 1.0, ServiceLevel(tpot_s=0.0001))["goodput_request_s"] == 1.0
