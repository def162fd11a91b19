"""The scheduler's numbers as metric families, made from the snapshots it sends.

Gauges show the last snapshot. Counters begin anew with each scheduler and must not go backwards for whoever scrapes, so
what is shown is the sum of the steps between snapshots. At every scrape the sequences received are those finished, by
reason, and those waiting, running and preempted; what a scheduler takes with it when it is lost is a reason as well.
It must not know requests, HTTP or names of other servers' metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, product
from typing import get_args

import msgspec
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from pagemill.kv_groups import pool_capacity
from pagemill.messages.decisions import PreemptionReason, VictimKind
from pagemill.messages.frontend import SchedulerReady, StatsSnapshot
from pagemill.messages.sequences import FinishReason

#: Counter field of a snapshot -> metric and its help.
_COUNTERS = {
    "steps": ("pagemill_steps", "Steps (batched forwards) completed."),
    "prefix_query_tokens": ("pagemill_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "tokens_computed": ("pagemill_tokens_computed", "Positions computed by the model, recomputed ones included."),
    "tokens_recomputed": ("pagemill_tokens_recomputed", "Positions computed again after a preemption."),
    "tokens_generated": ("pagemill_tokens_generated", "Tokens drawn by the model."),
    "tokens_moved": ("pagemill_tokens_moved", "Positions whose KV was copied out or in on behalf of preempted sequences; each way counts."),
    "early_copies": ("pagemill_early_copies", "KV blocks copied to the arena ahead of need."),
    "sequences_received": ("pagemill_sequences_received", "Sequences that arrived at a scheduler, once more at each that took them over from a lost one."),
    "core_rebuilds": ("pagemill_core_rebuilds", "Times the scheduler failed inside and was built anew from its sequences."),
    "dropped_messages": ("pagemill_dropped_messages", "Messages dropped by the scheduler: of an older epoch or an unknown name."),
}
#: Counter fields that are shown as one metric -> the value of its label `tier`.
_HIT_TOKENS = {"prefix_hit_tokens": "device", "arena_hit_tokens": "arena"}
#: Counters that a snapshot gives by direction -> metric and its help.
_BY_DIRECTION = {
    "swapped_bytes": ("pagemill_swapped_bytes", "KV bytes copied: out to the arena, in to the device."),
    "swap_seconds": ("pagemill_swap_seconds", "Time spent copying KV, by direction, of the slowest worker; it overlaps with steps."),
}
_DIRECTIONS = ("out", "in")
_KINDS: tuple[str, ...] = get_args(VictimKind)
_REASONS: tuple[str, ...] = get_args(PreemptionReason)
#: How sequences leave a scheduler: beside their ends, refused at once, or lost with it.
_REJECTED, _LOST = "rejected", "lost"
_ENDS: tuple[str, ...] = (*get_args(FinishReason), _REJECTED, "handed_on", _LOST)

_PREEMPTIONS_HELP = (
    "Sequences preempted, by what became of their KV (keep: it stayed, swap: copied to the arena, recompute: dropped) and by why "
    "(growth: a running sequence needed blocks, start: another was to start or to resume, seat: its place in the batch was wanted, "
    "forced: it was asked for)."
)
_THRASH_HELP = (
    "(tokens recomputed + tokens moved) / useful tokens, since the frontend started; useful tokens are those computed less those recomputed. "
    "0: no work was lost to preemption, 1: as much as was useful. For a window, divide the rates of the counters."
)

#: Bounds of the tokens in one step.
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Bounds of the time from a preemption to running again.
_RESUME = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

Key = tuple[str, str | float]  #: a counter's field, and a key inside it ("" for a plain number)


class SchedulerMetrics:
    """Owned by the frontend's metrics. `update` is called for every snapshot, `collect` for every scrape."""

    def __init__(self) -> None:
        self.last: StatsSnapshot | None = None  #: None before the first
        self._ready: SchedulerReady | None = None
        self._counted: dict[Key, float] = {}  #: counters of the last snapshot of the scheduler that is there
        self._totals: Counter[Key] = Counter()

    def ready(self, message: SchedulerReady) -> None:
        self._ready = message

    def update(self, snapshot: StatsSnapshot) -> None:
        """Takes over a snapshot. One of an older epoch changes nothing."""
        if self.last is not None and snapshot.epoch < self.last.epoch:
            return
        if self.last is not None and snapshot.epoch > self.last.epoch:
            self._counted = {}  # another core, which counts from zero
        counted = _counters(snapshot)
        for key, value in counted.items():
            before = self._counted.get(key, 0)
            self._totals[key] += value - before if value >= before else value  # type: ignore[assignment]
        self._counted, self.last = counted, snapshot

    def lost(self) -> None:
        """The scheduler is gone, and its sequences with it: the next one receives them anew, and counts from zero."""
        if self.last is None:
            return
        self._totals["sequences_finished", _LOST] += self.last.num_waiting + self.last.num_running + self.last.num_preempted
        self._counted = {}
        self.last = msgspec.structs.replace(self.last, num_waiting=0, num_running=0, num_preempted=0, num_suspects=0, transfers_in_flight=0)

    def collect(self) -> Iterator[Metric]:
        """Families known so far: geometry from the scheduler's readiness on, the rest from its first snapshot on."""
        if self._ready is not None:
            yield from self._geometry(self._ready)
        if self.last is not None:
            yield from self._gauges(self.last)
            yield from self._counter_families()
            yield self._thrash_ratio()
            yield self._step_seconds()
            total = self._totals["tokens_computed", ""]
            yield self._histogram("steps_with_tokens", "pagemill_step_tokens", "Tokens computed by one step.", _STEP_TOKENS, total)
            total = self._totals["resume_seconds_sum", ""]
            yield self._histogram("resume_seconds", "pagemill_resume_seconds", "Preemption to running again.", _RESUME, total)

    @staticmethod
    def _geometry(ready: SchedulerReady) -> Iterator[Metric]:
        yield GaugeMetricFamily("pagemill_max_model_len_tokens", "Longest prompt plus output of one sequence.", ready.max_model_len)
        yield GaugeMetricFamily("pagemill_scheduler_epoch", "Incarnation of the scheduler; grows when it, its core or the workers restart.", ready.epoch)
        capacity = pool_capacity(ready.groups, ready.num_blocks, ready.block_size, max(1, ready.max_model_len))
        labels = {
            "block_size": str(ready.block_size),
            "num_blocks": str(ready.num_blocks),
            "num_swap_slots": str(ready.num_swap_slots),
            "size_tokens": str(capacity.tokens),
            "max_concurrency": f"{capacity.sequences:.2f}",
            "deterministic": str(ready.deterministic).lower(),
        }
        info = GaugeMetricFamily("pagemill_kv_cache_info", "Geometry of the KV pool as labels; always 1.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    @staticmethod
    def _gauges(last: StatsSnapshot) -> Iterator[Metric]:
        sequences = {"waiting": last.num_waiting, "running": last.num_running, "preempted": last.num_preempted}
        yield _by_label("pagemill_sequences", "Live sequences.", "status", sequences)
        yield GaugeMetricFamily("pagemill_suspect_sequences", "Live sequences that run alone, because a worker died while it computed them.", last.num_suspects)
        blocks = {"free": last.blocks_free, "cached": last.blocks_cached, "used": last.blocks_used}
        yield _by_label("pagemill_kv_blocks", "KV blocks; cached ones are unreferenced but indexed, used is the rest.", "state", blocks)
        help_text = "Used KV blocks that no window reaches any more; their share of the used ones is what windows waste."
        yield GaugeMetricFamily("pagemill_kv_dead_blocks", help_text, last.blocks_dead)
        slots = {"free": last.swap_slots_free, "cached": last.swap_slots_cached, "held": last.swap_slots_held}
        help_text = "Swap slots, of one KV block each; held ones have KV of preempted sequences, cached ones may be dropped at any time."
        yield _by_label("pagemill_swap_slots", help_text, "state", slots)
        yield GaugeMetricFamily("pagemill_transfers_in_flight", "Blocks being copied between device and arena.", last.transfers_in_flight)
        help_text = "Distinct computed positions per position of the used blocks; one minus it is waste."
        yield GaugeMetricFamily("pagemill_kv_slot_utilization", help_text, last.slot_utilization)

    def _counter_families(self) -> Iterator[Metric]:
        for name, (metric, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(metric, help_text, self._totals[name, ""])
        hits = CounterMetricFamily("pagemill_prefix_cache_hit_tokens", "Prompt tokens whose KV came from the prefix cache, by where it lay.", labels=["tier"])
        for name, tier in _HIT_TOKENS.items():
            hits.add_metric([tier], self._totals[name, ""])
        yield hits
        for name, (metric, help_text) in _BY_DIRECTION.items():
            family = CounterMetricFamily(metric, help_text, labels=["direction"])
            for direction in _DIRECTIONS:
                family.add_metric([direction], self._totals[name, direction])
            yield family
        ends_help = "Sequences that left a scheduler: their ends, rejected for those that did not run, lost for those whose scheduler ended before them."
        ends = CounterMetricFamily("pagemill_sequences_finished", ends_help, labels=["reason"])
        for reason in _ENDS:
            ends.add_metric([reason], self._totals["sequences_finished", reason])
        yield ends
        preemptions = CounterMetricFamily("pagemill_preemptions", _PREEMPTIONS_HELP, labels=["kind", "reason"])
        for kind, reason in product(_KINDS, _REASONS):
            preemptions.add_metric([kind, reason], self._totals["preemptions", f"{kind}/{reason}"])
        yield preemptions

    def _thrash_ratio(self) -> Metric:
        """Computed from the totals, not from the last snapshot: it must agree with the counters that are shown beside it."""
        recomputed = self._totals["tokens_recomputed", ""]
        useful = self._totals["tokens_computed", ""] - recomputed
        ratio = (recomputed + self._totals["tokens_moved", ""]) / useful if useful > 0 else 0.0
        return GaugeMetricFamily("pagemill_thrash_ratio", _THRASH_HELP, ratio)

    def _step_seconds(self) -> Metric:
        """Seconds by part of a step. The count is of steps, so that sum over count is a part's mean."""
        family = SummaryMetricFamily("pagemill_step_seconds", "Time of steps by part: planning, the worker's parts, waiting.", labels=["part"])
        for (name, part), seconds in sorted(self._totals.items(), key=str):
            if name == "step_seconds":
                family.add_metric([str(part)], int(self._totals["steps", ""]), seconds)
        return family

    def _histogram(self, field: str, metric: str, help_text: str, bounds: tuple[float, ...], total: float) -> Metric:
        """A field of buckets. The scheduler names only those that are not empty; here all are always there."""
        counts = [0.0] * (len(bounds) + 1)
        for (name, bound), number in self._totals.items():
            if name == field:
                counts[bisect_left(bounds, float(bound))] += number
        labels = [*map(str, map(float, bounds)), "+Inf"]
        family = HistogramMetricFamily(metric, help_text)
        family.add_metric([], list(zip(labels, accumulate(counts), strict=True)), total)
        return family


def _counters(snapshot: StatsSnapshot) -> dict[Key, float]:
    """Every counter of a snapshot under one flat key."""
    values: dict[Key, float] = {(name, ""): getattr(snapshot, name) for name in (*_COUNTERS, *_HIT_TOKENS, "resume_seconds_sum")}
    for field in ("step_seconds", "steps_with_tokens", "resume_seconds", "preemptions", "sequences_finished", *_BY_DIRECTION):
        values |= {(field, key): number for key, number in getattr(snapshot, field).items()}
    return values


def _by_label(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
