"""Every benchmark runs on a tiny model and prints the lines it promises. Nothing here is about time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.script import run_bench
from tests.helpers.tiny_model import tiny_checkpoint

Capture = pytest.CaptureFixture[str]


def test_offline_reports_each_workload_and_its_rate_last(tiny_model: Path, capsys: Capture) -> None:
    lines, summary = run_bench("bench_offline", ["2:9:3", "1:20:2", "--model", tiny_model, "--repeat", 2], capsys)
    assert [line["workload"] for line in lines] == ["2:9:3", "1:20:2"] * 2
    assert lines[0]["output_tok_s"] == pytest.approx(2 * 3 / lines[0]["seconds"], rel=1e-3)
    assert lines[0]["steps"] == 3  # a prompt's step draws the first of three tokens; the warm-up is not counted
    assert set(summary["ratios"]) == {"2:9:3", "1:20:2"}
    assert summary["passes"] == 2


PEERS = """
import json, sys
assert sys.argv[1] == "run"
if sys.argv[2] == "openvino":
    sys.exit("no such engine here")
rate = {"vllm": 10.0, "transformers": 5.0, "llamacpp": 40.0}[sys.argv[2]]
for workload in sys.argv[3:]:
    print(json.dumps({"peer": sys.argv[2], "workload": workload, "seconds": 1.0, "output_tok_s": rate, "other": None}))
"""


def test_offline_compares_with_the_best_bfloat16_peer_and_skips_one_that_cannot_run(tiny_model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "peers.py").write_text(PEERS)
    lines, summary = run_bench("bench_offline", ["1:8:2", "--model", tiny_model, "--peers", tmp_path / "peers.py"], capsys)
    ours = [line for line in lines if line["engine"].startswith("pagemill")]
    assert [line["engine"] for line in lines if line not in ours] == ["vllm", "transformers", "llamacpp"]
    assert [line["weights"] for line in lines if line not in ours] == ["bfloat16", "bfloat16", "4 bit"]
    assert len(ours) == 4  # one before all peers and one behind each that ran
    ratios = summary["ratios"]["1:8:2"]
    assert ratios["best_bfloat16_peer"] == "vllm"
    around_vllm = (ours[0]["output_tok_s"] + ours[1]["output_tok_s"]) / 2
    assert ratios["over_best_bfloat16_peer"] == ratios["over_vllm"] == pytest.approx(around_vllm / 10, rel=1e-3)
    assert "over_openvino" not in ratios


def test_batching_runs_the_same_requests_under_both_policies(tiny_model: Path, capsys: Capture) -> None:
    arguments = ["--model", tiny_model, "--requests", 9, "--seats", 3, "--prompt", 8, "--longest", 20]
    lines, summary = run_bench("bench_batching", arguments, capsys)
    assert [line["policy"] for line in lines] == ["fcfs", "static"]
    assert lines[0]["output_tokens"] == lines[1]["output_tokens"]
    assert all(0 < line["seat_utilization_by_step"] <= 1 and 0 < line["kv_slot_utilization"] <= 1 for line in lines)
    assert summary["continuous_over_static"] == pytest.approx(lines[1]["seconds"] / lines[0]["seconds"], rel=1e-3)


def test_continuous_batching_takes_less_than_half_the_steps_of_static(capsys: Capture) -> None:
    (continuous, static), summary = run_bench("bench_batching", ["--simulate"], capsys)
    assert continuous["workload"].startswith("256:64:")
    assert continuous["preemptions"] == static["preemptions"] == 0
    assert continuous["seat_utilization_by_step"] > 2 * static["seat_utilization_by_step"]
    assert summary["steps_static_over_continuous"] == pytest.approx(static["steps"] / continuous["steps"], rel=1e-3)
    assert summary["steps_static_over_continuous"] >= 2


def test_waste_runs_with_a_model_as_without(tiny_model: Path, capsys: Capture) -> None:
    arguments = ["--requests", 6, "--mean", 60, "--long-prompt", 150, "--output", 8, "--max-num-batched-tokens", 64]
    (simulated,), summary = run_bench("bench_waste", arguments, capsys)
    (real,), _ = run_bench("bench_waste", [*arguments, "--model", tiny_model], capsys)
    assert (simulated["simulated"], real["simulated"]) == (True, False)
    assert simulated["steps"] == real["steps"]
    assert simulated["workload"] == real["workload"] == "6:52.0:8"
    assert simulated["worst_kv_waste"] == real["worst_kv_waste"]
    assert 0 < simulated["kv_waste"] < simulated["worst_kv_waste"]
    assert summary["kv_waste"] == simulated["kv_waste"]


def test_prefix_counts_what_was_computed_of_it(tiny_model: Path, capsys: Capture) -> None:
    arguments = ["--model", tiny_model, "--requests", 4, "--shared", 100, "--own", 5, "--output", 3]
    lines, summary = run_bench("bench_prefix", arguments, capsys)
    assert [line["scenario"] for line in lines] == ["one after another", "same instant"]
    for line in lines:
        assert line["whole_block_tokens_computed"] == 96  # six blocks, once
        assert line["prefix_tokens_computed"] == 96 + 4 * 4  # what is behind the last whole block, by everybody
        assert line["cached_tokens"] == 3 * 96
    assert summary["prefix_computed_once"] is True
    assert summary["ttft_first_over_later"] == lines[0]["ttft_first_over_later"]


def test_deterministic_pairs_runs_with_and_without(capsys: Capture) -> None:
    arguments = ["--model", tiny_checkpoint("wide-heads"), "--dtype", "float32", "--decode", 2, "--prefill", 20, "--steps", 2, "--repeat", 2]
    lines, summary = run_bench("bench_deterministic", arguments, capsys)
    assert [(line["scenario"], line["deterministic"]) for line in lines] == [("decode 2", True), ("decode 2", False)] * 2 + [
        ("prefill 20", True),
        ("prefill 20", False),
    ] * 2
    assert set(summary["seconds_on_over_off"]["float32"]) == {"decode 2", "prefill 20"}


def test_scheduler_times_the_core_alone(capsys: Capture) -> None:
    lines, summary = run_bench("bench_scheduler", ["--sequences", 4, 8, "--steps", 3, "--context", 20], capsys)
    assert [line["workload"] for line in lines] == ["4:20:3", "8:20:3"]
    assert summary["plan_and_encode_ms"].keys() == {"4", "8"}
    assert all(milliseconds > 0 for milliseconds in summary["plan_and_encode_ms"].values())
