"""Every benchmark runs on a tiny model and prints the lines it promises. Nothing here is about time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.lib.pressure import PressureError
from tests.helpers.script import load_bench, run_bench
from tests.helpers.tiny_model import tiny_checkpoint

Capture = pytest.CaptureFixture[str]


def deterministic_model() -> list[object]:
    """Arguments for one whose kernels promise equal bits."""
    return ["--model", tiny_checkpoint("wide-heads"), "--dtype", "float32", "--deterministic"]


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


def test_pressure_compares_policies_on_the_same_requests(capsys: Capture) -> None:
    arguments = ["steady", *deterministic_model(), "--scale", 0.1, "--mix", "6:200:300", "--budget", 25]
    lines, summary = run_bench("bench_pressure", arguments, capsys)
    assert [line["policy"] for line in lines] == ["auto", "swap", "recompute", "oracle"]
    assert [line["num_swap_slots"] > 0 for line in lines] == [True, True, False, False]
    auto, swap, recompute, oracle = lines
    assert {line["num_blocks"] for line in lines} == {6}
    assert all(line["requests"] == 6 for line in lines)
    assert swap["swapped_bytes"]["in"] > 0
    assert swap["arena_occupancy"]["most"] > 0
    assert recompute["swapped_bytes"] == {"out": 0, "in": 0}
    assert recompute["tokens_recomputed"] > 0
    assert oracle["preemptions"] == {}
    assert {kind.split("/")[0] for kind in swap["preemptions"]} == {"swap"}
    ratios = summary["ratios"]["6:20:30 at 25 %"]
    assert ratios["auto_over_oracle"] == pytest.approx(auto["output_tok_s"] / oracle["output_tok_s"], rel=1e-3)


@pytest.mark.parametrize("scenario", ["bursts", "conversations", "converse", "no-pressure"])
def test_pressure_scenarios_run_on_a_model_and_are_predicted(scenario: str, tmp_path: Path, capsys: Capture) -> None:
    arguments = [scenario, *deterministic_model(), "--scale", 0.03, "--policy", "auto"]
    lines, summary = run_bench("bench_pressure", arguments, capsys)
    assert "auto" in {line["policy"] for line in lines}
    assert summary["costs"]["link"]["out_bytes_s"] > 0
    assert summary["costs"]["step"]["step_s"] >= 0
    measured = tmp_path / "measured.jsonl"
    measured.write_text("\n".join(map(json.dumps, [*lines, summary])))
    predicted, totals = run_bench("simulate", ["--predict", scenario, "--measured", measured], capsys)
    assert {(line["scenario"], line["policy"]) for line in predicted} == {(line["scenario"], line["policy"]) for line in lines}
    assert all(line["error"].keys() <= line["figures"].keys() for line in predicted)
    assert any(line["error"] for line in predicted)
    assert 0 <= totals["mean_abs_error"] <= totals["worst_abs_error"]


@pytest.mark.parametrize("scenario", ["conversations", "converse", "long"])
def test_at_full_length_conversations_go_on_as_if_the_pool_were_unlimited(scenario: str, capsys: Capture) -> None:
    lines, summary = run_bench("simulate", ["--predict", scenario, "--policy", "auto", "--policy", "oracle"], capsys)
    assert [line["policy"] for line in lines] == ["auto", "oracle"]
    (ratios,) = summary["ratios"].values()
    assert 1 <= ratios["auto_ttft_p50_over_oracle"] < 1.25
    assert 1 <= ratios["auto_ttft_p99_over_oracle"] < 1.25


def test_at_full_length_bursts_cost_jobs_next_to_nothing_and_do_not_wait_for_them(capsys: Capture) -> None:
    _, summary = run_bench("simulate", ["--predict", "bursts", "--policy", "auto", "--policy", "recompute"], capsys)
    (ratios,) = summary["ratios"].values()
    assert ratios["auto_lost_s"] <= 0.1 * ratios["recompute_lost_s"]
    assert ratios["auto_ttft_p99_over_idle"] < 1.2


PRESSED_PEERS = """
import json, os, sys
blocks = int(os.environ.get("PEER_BLOCKS", 0))
if sys.argv[1] == "converse":
    print(json.dumps({"peer": "vllm-cpu", "ttft_p50_s": 1.0 if int(sys.argv[6]) else 0.25, "ttft_max_s": 2.0, "arguments": sys.argv[2:]}))
elif sys.argv[2] == "openvino":
    sys.exit("no such engine here")
else:
    print(json.dumps({"peer": sys.argv[2], "workload": sys.argv[3], "seconds": 1.0, "output_tok_s": float(blocks)}))
"""


def test_pressure_measures_each_peer_by_its_own_figure(tmp_path: Path, capsys: Capture) -> None:
    peers = tmp_path / "peers.py"
    peers.write_text(PRESSED_PEERS)
    common = [*deterministic_model(), "--scale", 0.1, "--policy", "recompute", "--peers", peers]
    lines, summary = run_bench("bench_pressure", ["steady", "--mix", "4:320:320", "--budget", 100, "--budget", 50, *common], capsys)
    assert [(line["engine"], line["peer_blocks"]) for line in lines if "peer_blocks" in line] == [("vllm", 8), ("vllm", 4)]  # blocks of 32 tokens
    assert summary["ratios"]["peer vllm"] == {"4:32:32 at 100 %": 1.0, "4:32:32 at 50 %": 0.5}
    assert summary["ratios"]["peer openvino"] == {}
    _, summary = run_bench("bench_pressure", ["converse", *common], capsys)
    assert summary["ratios"]["peer vllm"] == {"ttft_p50_s_budget": 1.0, "ttft_max_s_budget": 2.0, "ttft_p50_s_unlimited": 0.25, "ttft_max_s_unlimited": 2.0}


def test_pressure_fails_loudly_if_policies_draw_different_tokens(capsys: Capture) -> None:
    check_tokens = load_bench("bench_pressure").check_tokens
    runs = {("one", "auto"): [SimpleNamespace(outputs=[[1, 2], [3]])], ("one", "swap"): [SimpleNamespace(outputs=[[3], [1, 4]])]}
    with pytest.raises(PressureError, match="one: 1 of 2 outputs differ between auto and swap, though equal bits are promised"):
        check_tokens(runs, deterministic=True)
    check_tokens(runs, deterministic=False)
    assert "1 of 2 outputs differ between auto and swap" in capsys.readouterr().err


def test_a_simulated_gpu_says_where_the_time_goes(capsys: Capture) -> None:
    arguments = ["--requests", 8, "--input", 256, "--output", 256, "--fitting", 3, "--swap-memory", 1]
    lines, summary = run_bench("simulate", arguments, capsys)
    assert [line["policy"] for line in lines] == ["auto", "swap", "recompute", "oracle"]
    for line in lines:
        assert sum(line["where"].values()) == pytest.approx(1.0, rel=0.01)
        assert line["simulated"] is True
    auto, swap, recompute, oracle = lines
    assert swap["where"]["recompute"] == oracle["where"]["recompute"] == 0.0
    assert recompute["where"]["recompute"] > 0.0
    assert auto["seconds"] <= recompute["seconds"]
    assert summary["ratios"]["auto_over_oracle"] == pytest.approx(oracle["seconds"] / auto["seconds"], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "story"), [("not json", "is nothing that"), ('{"bench": "pressure", "scenario": "summary"}', "no last line"), ("[]", "is nothing that")]
)
def test_a_file_that_no_bench_printed_is_refused_in_one_line(text: str, story: str, tmp_path: Path) -> None:
    (tmp_path / "measured").write_text(text)
    with pytest.raises(SystemExit, match=story):
        load_bench("simulate").main(["--predict", "steady", "--measured", str(tmp_path / "measured")])


def test_a_prediction_takes_no_option_of_the_simulated_gpu(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_bench("simulate").main(["--predict", "converse", "--max-num-seqs", "8"])
    assert "--max-num-seqs is not for a prediction" in capsys.readouterr().err
