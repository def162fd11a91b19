"""The scheduler's numbers as metric families, made from the snapshots it sends.

Gauges show the last snapshot. Counters restart with each epoch of the scheduler and must not go backwards
for whoever scrapes, so what is shown is the sum of the steps between snapshots.
It must not know requests, HTTP or names of other servers' metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from pagemill.messages import SchedulerReady, StatsSnapshot

#: Counter field of a snapshot -> metric and its help.
_COUNTERS = {
    "steps": ("pagemill_steps", "Steps (batched forwards) completed."),
    "prefix_query_tokens": ("pagemill_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("pagemill_prefix_cache_hit_tokens", "Prompt tokens whose KV came from the prefix cache."),
    "tokens_computed": ("pagemill_tokens_computed", "Positions computed by the model, recomputed ones included."),
    "tokens_recomputed": ("pagemill_tokens_recomputed", "Positions computed again after a preemption."),
    "tokens_generated": ("pagemill_tokens_generated", "Tokens drawn by the model."),
    "dropped_messages": ("pagemill_dropped_messages", "Messages dropped by the scheduler: of an older epoch or an unknown name."),
}
_PREEMPTIONS = {"preemptions_swap": "swap", "preemptions_recompute": "recompute"}

#: Bounds of the tokens in one step.
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Key = tuple[str, str | int]  #: a counter's field, and a key inside it ("" for a plain number)


class SchedulerMetrics:
    """Owned by the frontend's metrics. `update` is called for every snapshot, `collect` for every scrape."""

    def __init__(self) -> None:
        self._ready: SchedulerReady | None = None
        self._last: StatsSnapshot | None = None
        self._totals: Counter[Key] = Counter()

    def ready(self, message: SchedulerReady) -> None:
        self._ready = message

    def update(self, snapshot: StatsSnapshot) -> None:
        """Takes over a snapshot. One of an older epoch changes nothing."""
        if self._last is not None and snapshot.epoch < self._last.epoch:
            return
        same_epoch = self._last is not None and self._last.epoch == snapshot.epoch
        before = _counters(self._last) if same_epoch and self._last is not None else {}
        for key, value in _counters(snapshot).items():
            self._totals[key] += max(0, value - before.get(key, 0))  # type: ignore[assignment]
        self._last = snapshot

    def collect(self) -> Iterator[Metric]:
        """Families known so far: geometry from the scheduler's readiness on, the rest from its first snapshot on."""
        if self._ready is not None:
            yield from self._geometry(self._ready)
        if self._last is not None:
            yield from self._gauges(self._last)
            yield from self._counter_families()
            yield self._step_seconds()
            yield self._step_tokens()

    @staticmethod
    def _geometry(ready: SchedulerReady) -> Iterator[Metric]:
        yield GaugeMetricFamily("pagemill_max_model_len_tokens", "Longest prompt plus output of one sequence.", ready.max_model_len)
        yield GaugeMetricFamily("pagemill_scheduler_epoch", "Incarnation of the scheduler; grows when it, its core or the workers restart.", ready.epoch)
        size_tokens = ready.num_blocks * ready.block_size
        labels = {
            "block_size": str(ready.block_size),
            "num_blocks": str(ready.num_blocks),
            "num_swap_slots": str(ready.num_swap_slots),
            "size_tokens": str(size_tokens),
            "max_concurrency": f"{size_tokens / max(1, ready.max_model_len):.2f}",
            "deterministic": str(ready.deterministic).lower(),
        }
        info = GaugeMetricFamily("pagemill_kv_cache_info", "Geometry of the KV pool as labels; always 1.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    @staticmethod
    def _gauges(last: StatsSnapshot) -> Iterator[Metric]:
        sequences = {"waiting": last.num_waiting, "running": last.num_running, "preempted": last.num_preempted}
        yield _by_label("pagemill_sequences", "Live sequences.", "status", sequences)
        blocks = {"free": last.blocks_free, "cached": last.blocks_cached, "used": last.blocks_used}
        yield _by_label("pagemill_kv_blocks", "KV blocks; cached ones are unreferenced but indexed, used is the rest.", "state", blocks)
        slots = {"free": last.swap_slots_free, "cached": last.swap_slots_cached, "held": last.swap_slots_held}
        yield _by_label("pagemill_swap_slots", "Swap slots; cached ones may be dropped at any time.", "state", slots)
        help_text = "Distinct computed positions per position of the used blocks; one minus it is waste."
        yield GaugeMetricFamily("pagemill_kv_slot_utilization", help_text, last.slot_utilization)

    def _counter_families(self) -> Iterator[Metric]:
        for name, (metric, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(metric, help_text, self._totals[name, ""])
        preemptions = CounterMetricFamily("pagemill_preemptions", "Sequences preempted because blocks ran out.", labels=["kind"])
        for name, kind in _PREEMPTIONS.items():
            preemptions.add_metric([kind], self._totals[name, ""])
        yield preemptions

    def _step_seconds(self) -> Metric:
        """Seconds by part of a step. The count is of steps, so that sum over count is a part's mean."""
        family = SummaryMetricFamily("pagemill_step_seconds", "Time of steps by part: planning, the worker's parts, waiting.", labels=["part"])
        for (name, part), seconds in sorted(self._totals.items(), key=str):
            if name == "step_seconds":
                family.add_metric([str(part)], int(self._totals["steps", ""]), seconds)
        return family

    def _step_tokens(self) -> Metric:
        """Plans by number of tokens. The scheduler names only buckets that are not empty; here all are always there."""
        plans = [0.0] * (len(_STEP_TOKENS) + 1)
        for (name, bound), number in self._totals.items():
            if name == "steps_with_tokens":
                plans[bisect_left(_STEP_TOKENS, int(bound))] += number
        labels = [*map(str, map(float, _STEP_TOKENS)), "+Inf"]
        family = HistogramMetricFamily("pagemill_step_tokens", "Tokens computed by one step.")
        family.add_metric([], list(zip(labels, accumulate(plans), strict=True)), self._totals["tokens_computed", ""])
        return family


def _counters(snapshot: StatsSnapshot) -> dict[Key, float]:
    """Every counter of a snapshot under one flat key."""
    values: dict[Key, float] = {(name, ""): getattr(snapshot, name) for name in (*_COUNTERS, *_PREEMPTIONS)}
    values |= {("step_seconds", part): seconds for part, seconds in snapshot.step_seconds.items()}
    values |= {("steps_with_tokens", bound): plans for bound, plans in snapshot.steps_with_tokens.items()}
    return values


def _by_label(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
