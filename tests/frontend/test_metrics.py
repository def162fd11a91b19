"""What /metrics says: native names that promtool accepts, aliases that others read, and sums that balance."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Literal

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from frontend.exposition import Format
from frontend.histogram import Histogram
from frontend.metrics import FrontendMetrics
from frontend.request_metrics import RequestLedger
from pagemill.ids import NONE
from pagemill.messages.frontend import SchedulerReady, SequenceOutput
from pagemill.messages.sequences import FinishReason, KvGroup, SequenceKey
from tests.helpers.fake_scheduler import snapshot

#: What gateways, autoscalers and vLLM's dashboards read, as far as this server has the feature.
READ_BY_OTHERS = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "cache_config_info", "num_preemptions_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total"),
    *("generation_tokens_total", "request_success_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "admission_rejections_total", "time_to_first_token_seconds_bucket"),
    *("inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_sum", "request_inference_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_max_num_generation_tokens_sum", "request_params_n_bucket", "request_params_max_tokens_bucket"),
    *("request_num_preemptions_bucket", "request_prefill_kv_computed_tokens_bucket", "iteration_tokens_total_bucket"),
    *("gpu_cache_usage_perc", "time_per_output_token_seconds_bucket", "gpu_prefix_cache_queries_total"),
    *("gpu_prefix_cache_hits_total", "external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def text_of(metrics: FrontendMetrics, form: Format = "text", others: Sequence[Iterable[Metric]] = ()) -> str:
    """A whole scrape."""
    return b"".join(metrics.scrape(form, others)).decode()


def samples(metrics: FrontendMetrics | str) -> Samples:
    """Of a scrape now, or of the text of one."""
    families = parse_text(metrics if isinstance(metrics, str) else text_of(metrics))
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def value(metrics: FrontendMetrics | str, name: str, **labels: str) -> float:
    """The sum over samples of this name that carry these labels."""
    found = [number for (sample, items), number in samples(metrics).items() if sample == name and labels.items() <= dict(items).items()]
    assert found, f"no sample {name} {labels}"
    return sum(found)


def used_metrics(compat: Literal["vllm", "none"]) -> FrontendMetrics:
    """Metrics after one finished and one refused request, with a scheduler that works."""
    metrics = FrontendMetrics("tiny", compat)
    ledger = RequestLedger(metrics, iter(range(1000)).__next__)
    record = ledger.open(method="POST", endpoint="/v1/completions", request_id="cmpl-1")
    record.describe(stream=True, n=1, max_tokens=8, num_prompt_tokens=10)
    reasons: list[FinishReason | None] = [None, None, "length"]
    for reason in reasons:
        record.observe(0, SequenceOutput(SequenceKey(0, 0, 1, 0), 0, (1,), (), reason, NONE, 4, 2, 0.5, ""))
    ledger.close(record, 200)
    refused = ledger.open(method="POST", endpoint="/v1/completions", request_id="cmpl-2")
    refused.refuse("queue_full")
    ledger.close(refused, 429)
    metrics.scheduler_ready(SchedulerReady(1, 2048, 16, 100, 0, 64, True))
    metrics.snapshot(
        snapshot(
            num_running=3,
            num_waiting=2,
            num_preempted=1,
            blocks_total=100,
            blocks_free=50,
            blocks_cached=30,
            blocks_used=20,
            blocks_dead=1,
            slot_utilization=0.9,
            steps=7,
            tokens_computed=90,
            step_seconds={"forward": 1.5, "schedule": 0.25},
            steps_with_tokens={1: 2, 16: 4, 2**31 - 1: 1},
            preemptions={"swap/growth": 5, "swap/start": 1, "recompute/growth": 2, "keep/seat": 3},
            swapped_bytes={"out": 4096, "in": 1024},
            swap_seconds={"out": 0.5, "in": 0.125},
            transfers_in_flight=6,
            swap_slots_total=10,
            swap_slots_free=5,
            swap_slots_cached=2,
            swap_slots_held=3,
            tokens_recomputed=10,
            tokens_moved=30,
            early_copies=4,
            resume_seconds={0.03: 2, 0.3: 4, math.inf: 1},
            resume_seconds_sum=700.5,
            prefix_query_tokens=64,
            prefix_hit_tokens=32,
            arena_hit_tokens=16,
        )
    )
    return metrics


def test_a_request_becomes_counts_tokens_and_times() -> None:
    metrics = used_metrics("none")
    assert value(metrics, "pagemill_requests_finished_total", reason="length", status="200", endpoint="/v1/completions") == 1
    assert value(metrics, "pagemill_requests_refused_total", reason="queue_full", status="429") == 1
    assert value(metrics, "pagemill_choices_finished_total", reason="length") == 1
    assert value(metrics, "pagemill_prompt_tokens_total", source="computed") == 6
    assert value(metrics, "pagemill_prompt_tokens_total", source="cached") == 4
    assert value(metrics, "pagemill_generation_tokens_total") == 3
    assert value(metrics, "pagemill_inter_token_latency_seconds_count") == 2
    assert value(metrics, "pagemill_time_to_first_token_seconds_sum") == 2
    assert value(metrics, "pagemill_queue_seconds_sum") == 0.5
    assert value(metrics, "pagemill_request_preemptions_sum") == 2


def test_the_scheduler_is_shown_by_state() -> None:
    metrics = used_metrics("none")
    assert [value(metrics, "pagemill_kv_blocks", state=state) for state in ("free", "cached", "used")] == [50, 30, 20]
    assert [value(metrics, "pagemill_sequences", status=status) for status in ("waiting", "running", "preempted")] == [2, 3, 1]
    assert value(metrics, "pagemill_kv_slot_utilization") == 0.9
    assert value(metrics, "pagemill_step_seconds_sum", part="forward") == 1.5
    assert value(metrics, "pagemill_step_seconds_count", part="forward") == 7
    found = [value(metrics, "pagemill_step_tokens_bucket", le=bound) for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")]
    assert found == [2, 2, 6, 6, 7]


def test_preemptions_are_counted_by_kind_and_reason_and_all_of_them_for_others() -> None:
    metrics = used_metrics("vllm")
    assert [value(metrics, "pagemill_preemptions_total", kind=kind) for kind in ("keep", "swap", "recompute")] == [3, 6, 2]
    assert [value(metrics, "pagemill_preemptions_total", reason=reason) for reason in ("growth", "start", "seat", "forced")] == [7, 1, 3, 0]
    assert value(metrics, "pagemill_preemptions_total", kind="swap", reason="start") == 1
    assert value(metrics, "vllm:num_preemptions_total") == 11


def test_blocks_that_no_window_reaches_are_shown() -> None:
    assert value(used_metrics("vllm"), "pagemill_kv_dead_blocks") == 1


def test_swapping_is_shown_by_direction_use_and_tier() -> None:
    metrics = used_metrics("vllm")
    assert [value(metrics, "pagemill_swapped_bytes_total", direction=way) for way in ("out", "in")] == [4096, 1024]
    assert [value(metrics, "pagemill_swap_seconds_total", direction=way) for way in ("out", "in")] == [0.5, 0.125]
    assert [value(metrics, "pagemill_swap_slots", state=state) for state in ("free", "cached", "held")] == [5, 2, 3]
    assert value(metrics, "pagemill_transfers_in_flight") == 6
    assert (value(metrics, "pagemill_tokens_moved_total"), value(metrics, "pagemill_early_copies_total")) == (30, 4)
    assert [value(metrics, "pagemill_prefix_cache_hit_tokens_total", tier=tier) for tier in ("device", "arena")] == [32, 16]
    assert [value(metrics, f"vllm:{name}prefix_cache_hits_total") for name in ("", "gpu_", "external_")] == [32, 32, 16]
    assert [value(metrics, f"vllm:{name}prefix_cache_queries_total") for name in ("", "gpu_", "external_")] == [64, 64, 64]


def test_the_time_to_resume_is_a_histogram_with_all_its_buckets() -> None:
    metrics = used_metrics("none")
    found = [value(metrics, "pagemill_resume_seconds_bucket", le=bound) for bound in ("0.01", "0.03", "0.1", "0.3", "100.0", "+Inf")]
    assert found == [0, 2, 2, 6, 6, 7]
    assert value(metrics, "pagemill_resume_seconds_sum") == 700.5
    assert value(metrics, "pagemill_resume_seconds_count") == 7


def test_thrash_is_work_lost_to_preemption_by_useful_work() -> None:
    metrics = used_metrics("none")
    assert value(metrics, "pagemill_thrash_ratio") == (10 + 30) / (90 - 10)
    metrics.snapshot(snapshot(epoch=2, tokens_computed=20))  # restarted: what was done before still counts
    assert value(metrics, "pagemill_thrash_ratio") == 40 / 100
    unused = FrontendMetrics("tiny", "none")
    unused.snapshot(snapshot())
    assert value(unused, "pagemill_thrash_ratio") == 0


def test_counters_by_label_exist_from_the_first_snapshot_so_that_an_increase_is_seen() -> None:
    metrics = FrontendMetrics("tiny", "none")
    metrics.snapshot(snapshot())
    assert value(metrics, "pagemill_preemptions_total", kind="recompute", reason="growth") == 0
    assert value(metrics, "pagemill_swapped_bytes_total", direction="in") == 0


def test_counters_by_label_do_not_go_backwards_when_the_scheduler_restarts() -> None:
    metrics = FrontendMetrics("tiny", "none")
    seen = []
    for epoch, preempted, copied, resumed in ((1, 4, 100, 3), (1, 6, 150, 5), (2, 1, 50, 1), (1, 9, 900, 9), (2, 2, 75, 2)):
        numbers = snapshot(epoch=epoch, preemptions={"swap/growth": preempted}, swapped_bytes={"out": copied}, resume_seconds={0.3: resumed})
        metrics.snapshot(numbers)
        buckets = value(metrics, "pagemill_resume_seconds_bucket", le="0.3")
        seen.append((value(metrics, "pagemill_preemptions_total"), value(metrics, "pagemill_swapped_bytes_total", direction="out"), buckets))
    assert seen == [(4, 100, 3), (6, 150, 5), (7, 200, 6), (7, 200, 6), (8, 225, 7)]


def test_counters_do_not_go_backwards_when_the_scheduler_restarts() -> None:
    metrics = FrontendMetrics("tiny", "none")
    seen = []
    snapshots = [
        snapshot(epoch=1, steps=10, step_seconds={"forward": 1.0}),
        snapshot(epoch=1, steps=15, step_seconds={"forward": 1.5}),
        snapshot(epoch=2, steps=3, step_seconds={"forward": 0.25}),
        snapshot(epoch=1, steps=16, step_seconds={"forward": 9.0}),  # late, of the epoch before
        snapshot(epoch=2, steps=5, step_seconds={"forward": 0.5, "sample": 0.125}),
    ]
    for message in snapshots:
        metrics.snapshot(message)
        seen.append((value(metrics, "pagemill_steps_total"), value(metrics, "pagemill_step_seconds_sum", part="forward")))
    assert seen == [(10, 1.0), (15, 1.5), (18, 1.75), (18, 1.75), (20, 2.0)]
    assert value(metrics, "pagemill_step_seconds_sum", part="sample") == 0.125


def test_every_core_counts_from_zero_and_nothing_that_one_counted_is_forgotten() -> None:
    metrics = FrontendMetrics("tiny", "none")
    metrics.snapshot(snapshot(epoch=1, steps=10, core_rebuilds=0))
    metrics.snapshot(snapshot(epoch=2, steps=4, core_rebuilds=1))
    assert value(metrics, "pagemill_steps_total") == 14
    metrics.scheduler_lost()
    metrics.snapshot(snapshot(epoch=9, steps=20))
    metrics.snapshot(snapshot(epoch=10, steps=50))  # more than the former counted, and all of it new
    assert (value(metrics, "pagemill_steps_total"), value(metrics, "pagemill_core_rebuilds_total")) == (84, 1)


def test_sequences_received_are_finished_or_live_at_every_scrape_whatever_is_lost() -> None:
    metrics = FrontendMetrics("tiny", "vllm")
    metrics.scheduler_lost()  # before anything is known
    for message in (
        snapshot(epoch=1, sequences_received=9, sequences_finished={"stop": 2, "length": 1, "rejected": 1}, num_waiting=2, num_running=2, num_preempted=1),
        None,
        None,  # was lost before it said anything
        snapshot(epoch=3, sequences_received=7, sequences_finished={"abort": 1, "error": 1}, num_running=5, num_suspects=2),
        snapshot(epoch=3, sequences_received=7, sequences_finished={"abort": 1, "error": 1, "handed_on": 5}),
        snapshot(epoch=4, sequences_received=15, sequences_finished={"stop": 7}, num_waiting=8),
    ):
        if message is None:
            metrics.scheduler_lost()
        else:
            metrics.snapshot(message)
        live = value(metrics, "pagemill_sequences")
        assert value(metrics, "pagemill_sequences_received_total") == value(metrics, "pagemill_sequences_finished_total") + live
        assert value(metrics, "pagemill_suspect_sequences") == (0 if message is None else message.num_suspects)
    reasons = {
        reason: value(metrics, "pagemill_sequences_finished_total", reason=reason)
        for reason in ("stop", "length", "abort", "error", "rejected", "lost", "handed_on")
    }
    assert reasons == {"stop": 9, "length": 1, "abort": 1, "error": 1, "rejected": 1, "lost": 5, "handed_on": 5}


def test_processes_that_were_replaced_are_counted_by_kind() -> None:
    metrics = FrontendMetrics("tiny", "none")
    metrics.peer_lost("worker")
    metrics.peer_lost("worker")
    metrics.peer_lost("scheduler")
    assert [value(metrics, "pagemill_restarts_total", process=kind) for kind in ("worker", "scheduler", "frontend")] == [2, 1, 0]


def test_what_the_engine_holds_and_drops_and_the_server_has_open_and_refuses_is_shown() -> None:
    class Numbers:
        num_sequences = 3
        num_dropped = 5
        num_open_connections = 7
        num_refused_connections = 9

    metrics = FrontendMetrics("tiny", "none")
    metrics.watch(Numbers(), Numbers())
    names = ("frontend_sequences", "frontend_dropped_messages_total", "connections_open", "connections_refused_total")
    assert [value(metrics, f"pagemill_{name}") for name in names] == [3, 5, 7, 9]


def test_received_is_finished_plus_refused_plus_in_flight_at_every_scrape() -> None:
    chance = random.Random(7)
    metrics = FrontendMetrics("tiny", "none")
    ledger = RequestLedger(metrics, lambda: 0.0)
    open_records = []
    for number in range(200):
        open_records.append(ledger.open(method="POST", endpoint=chance.choice(["/a", "/b"]), request_id=str(number)))
        if chance.random() < 0.7:
            record = open_records.pop(chance.randrange(len(open_records)))
            if chance.random() < 0.5:
                record.describe(stream=False, n=1, max_tokens=1, num_prompt_tokens=1)
            ledger.close(record, chance.choice([200, 200, 400, 429, 499, 500, 503]))
        if number % 20:
            continue
        ended = [number for (name, _), number in samples(metrics).items() if name in ("pagemill_requests_finished_total", "pagemill_requests_refused_total")]
        assert value(metrics, "pagemill_requests_received_total") == sum(ended) + len(open_records)
        assert value(metrics, "pagemill_requests_in_flight") == len(open_records)


def test_metrics_start_with_counters_at_zero_and_without_a_scheduler() -> None:
    metrics = FrontendMetrics("tiny", "vllm")
    assert value(metrics, "pagemill_choices_finished_total", reason="abort") == 0
    assert value(metrics, "vllm:generation_tokens_total", model_name="tiny", engine="0") == 0
    assert not [name for name, _ in samples(metrics) if name.startswith(("pagemill_kv", "vllm:kv"))]


def test_every_name_that_others_read_is_there_with_its_labels() -> None:
    metrics = used_metrics("vllm")
    for name in READ_BY_OTHERS:
        value(metrics, f"vllm:{name}", model_name="tiny", engine="0")
    assert value(metrics, "vllm:num_requests_waiting") == 3  # preempted ones wait as well
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.2
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", kv_cache_size_tokens="1600") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4
    assert value(metrics, "vllm:admission_rejections_total", reason="queue_full") == 1


def test_what_the_pool_holds_is_said_for_all_groups_of_layers_together() -> None:
    metrics = FrontendMetrics("tiny", "vllm")
    hybrid = SchedulerReady(1, 480, 16, 120, 0, 64, True, groups=(KvGroup(), KvGroup(window=64), KvGroup(window=64)))
    metrics.scheduler_ready(hybrid)
    assert value(metrics, "pagemill_kv_cache_info", num_blocks="120", size_tokens="1440", max_concurrency="3.00") == 1
    assert value(metrics, "vllm:cache_config_info", kv_cache_size_tokens="1440", kv_cache_max_concurrency="3.00") == 1


def test_features_that_are_not_there_have_no_alias() -> None:
    text = text_of(used_metrics("vllm"))
    assert not re.search(r"vllm:(lora|spec_decode|engine_sleep)", text)
    assert "vllm:" not in text_of(used_metrics("none"))


def test_an_alias_equals_its_source_bucket_for_bucket() -> None:
    found = samples(used_metrics("vllm"))
    native = {dict(items)["le"]: number for (name, items), number in found.items() if name == "pagemill_inter_token_latency_seconds_bucket"}
    alias = {dict(items)["le"]: number for (name, items), number in found.items() if name == "vllm:inter_token_latency_seconds_bucket"}
    assert native == alias
    assert {"0.01", "0.025", "0.2", "80.0"} < set(alias)


def test_openmetrics_has_the_same_names() -> None:
    families = parse_openmetrics(text_of(used_metrics("vllm"), "openmetrics"))  # type: ignore[no-untyped-call]
    names = {sample.name for family in families for sample in family.samples}
    assert {"vllm:num_requests_waiting", "vllm:generation_tokens_total", "pagemill_kv_blocks"} <= names


def test_all_numbers_of_a_scrape_are_of_one_moment() -> None:
    metrics = used_metrics("vllm")
    ledger = RequestLedger(metrics, lambda: 0.0)
    expected = text_of(metrics)
    pieces = metrics.scrape()
    text = next(pieces)
    for piece in pieces:  # what arrives while it is written is in the next one
        ledger.close(ledger.open(method="GET", endpoint="/v1/models", request_id="x"), 200)
        metrics.snapshot(snapshot(num_waiting=9))
        text += piece
    moving = re.compile(r"process_.*\n")  # the process itself, which works on meanwhile
    assert moving.sub("", text.decode()) == moving.sub("", expected)
    assert text_of(metrics) != expected


def test_native_metrics_pass_promtool() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    result = subprocess.run([promtool, "check", "metrics"], input=text_of(used_metrics("none")).encode(), capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")


def test_native_names_follow_promtools_rules() -> None:
    families = list(parse_text(text_of(used_metrics("none"))))
    abbreviations = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
    for family in families:
        name = family.name
        assert re.fullmatch(r"(pagemill|process)_[a-z0-9_]+", name), name
        assert family.documentation.strip(), name
        assert not abbreviations & set(name.split("_")), name
        assert not {"gauge", "counter", "summary", "histogram"} & set(name.split("_")), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        assert not re.search(r"milliseconds|minutes|hours|kilobytes|megabytes|percent", name), name
        labels = {label for sample in family.samples for label in sample.labels}
        assert all(re.fullmatch(r"[a-z_]+", label) for label in labels), name
    assert len({family.name for family in families}) == len(families)


def test_a_histogram_puts_a_value_on_a_bound_into_the_bounds_own_bucket() -> None:
    histogram = Histogram("x", "X.", (1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(None)
    histogram.observe_all([0.5, 1.5, 2.0, 3.0])
    found = {sample.labels.get("le", sample.name): sample.value for sample in histogram.collect().samples}
    assert found == {"1.0": 2, "2.0": 4, "+Inf": 5, "x_count": 5, "x_sum": 8.0}
