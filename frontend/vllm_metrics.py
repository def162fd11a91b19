"""The native metrics once more under the names that vLLM's dashboards, inference gateways and autoscalers read.

One table, one rule: an alias is the sum of the samples of a native family that it selects, by the labels
it renames. Nothing is counted here, so an alias can't disagree with its source. Features that this server
doesn't have (adapters, speculation, sleeping) have no alias. What others call an external cache is the arena here.
It must not know requests or snapshots: it sees families only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

PREFIX = "vllm:"


@dataclass(frozen=True)
class Alias:
    """`only` keeps samples by label value; `labels` maps native labels to the alias's, others are summed over."""

    name: str
    source: str  #: family name without the `_total` of counters
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)  #: label values that are called otherwise there


#: Preempted sequences wait in vLLM's one waiting queue.
_WAITING = {"status": ("waiting", "preempted")}
_ON_DEVICE = {"tier": ("device",)}
_SOURCES = {"computed": "local_compute", "cached": "local_cache_hit"}

ALIASES = (
    Alias("num_requests_running", "pagemill_sequences", only={"status": ("running",)}),
    Alias("num_requests_waiting", "pagemill_sequences", only=_WAITING),
    Alias(
        "cache_config_info",
        "pagemill_kv_cache_info",
        labels={
            "block_size": "block_size",
            "num_blocks": "num_gpu_blocks",
            "size_tokens": "kv_cache_size_tokens",
            "max_concurrency": "kv_cache_max_concurrency",
        },
    ),
    Alias("num_preemptions", "pagemill_preemptions"),
    Alias("prefix_cache_queries", "pagemill_prefix_cache_query_tokens"),
    Alias("prefix_cache_hits", "pagemill_prefix_cache_hit_tokens", only=_ON_DEVICE),
    # Every prompt is looked up in both tiers. Without the hits on the device, as vLLM counts, this could go backwards: they are counted later.
    Alias("external_prefix_cache_queries", "pagemill_prefix_cache_query_tokens"),
    Alias("external_prefix_cache_hits", "pagemill_prefix_cache_hit_tokens", only={"tier": ("arena",)}),
    Alias("gpu_prefix_cache_queries", "pagemill_prefix_cache_query_tokens"),
    Alias("gpu_prefix_cache_hits", "pagemill_prefix_cache_hit_tokens", only=_ON_DEVICE),
    Alias("prompt_tokens", "pagemill_prompt_tokens"),
    Alias("prompt_tokens_cached", "pagemill_prompt_tokens", only={"source": ("cached",)}),
    Alias("prompt_tokens_by_source", "pagemill_prompt_tokens", labels={"source": "source"}, values=_SOURCES),
    Alias("generation_tokens", "pagemill_generation_tokens"),
    Alias("request_success", "pagemill_choices_finished", labels={"reason": "finished_reason"}),
    Alias("admission_rejections", "pagemill_requests_refused", only={"status": ("429", "503")}, labels={"reason": "reason"}),
    Alias("time_to_first_token_seconds", "pagemill_time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "pagemill_inter_token_latency_seconds"),
    Alias("time_per_output_token_seconds", "pagemill_inter_token_latency_seconds"),
    Alias("request_time_per_output_token_seconds", "pagemill_time_per_output_token_seconds"),
    Alias("e2e_request_latency_seconds", "pagemill_request_seconds"),
    Alias("request_queue_time_seconds", "pagemill_queue_seconds"),
    Alias("request_inference_time_seconds", "pagemill_inference_seconds"),
    Alias("request_prefill_time_seconds", "pagemill_prefill_seconds"),
    Alias("request_decode_time_seconds", "pagemill_decode_seconds"),
    Alias("request_prompt_tokens", "pagemill_request_prompt_tokens"),
    Alias("request_generation_tokens", "pagemill_request_generation_tokens"),
    Alias("request_max_num_generation_tokens", "pagemill_request_longest_choice_tokens"),
    Alias("request_params_n", "pagemill_request_choices"),
    Alias("request_params_max_tokens", "pagemill_request_max_tokens"),
    Alias("request_num_preemptions", "pagemill_request_preemptions"),
    Alias("request_prefill_kv_computed_tokens", "pagemill_request_prompt_computed_tokens"),
    Alias("iteration_tokens_total", "pagemill_step_tokens"),
)


def aliases(native: list[Metric], model_name: str) -> Iterator[Metric]:
    """The aliases of the families that exist so far."""
    families = {family.name: family for family in native}
    labels = {"model_name": model_name, "engine": "0"}
    for alias in ALIASES:
        if alias.source in families:
            yield _renamed(alias, families[alias.source], labels)
    if "pagemill_kv_blocks" in families:
        yield from _usage(families["pagemill_kv_blocks"], labels)
    if "pagemill_sequences" in families:
        yield _waiting_by_reason(families["pagemill_sequences"], labels)


def _renamed(alias: Alias, source: Metric, common: Mapping[str, str]) -> Metric:
    family = Metric(PREFIX + alias.name, source.documentation, source.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in source.samples:
        if any(sample.labels[label] not in wanted for label, wanted in alias.only.items()):
            continue
        labels = {**common, **{new: sample.labels[old] for old, new in alias.labels.items()}}
        labels = {label: alias.values.get(value, value) for label, value in labels.items()}
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        key = (sample.name.removeprefix(source.name), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    for (suffix, items), value in sums.items():
        family.add_sample(family.name + suffix, dict(items), value)
    return family


def _usage(blocks: Metric, common: Mapping[str, str]) -> Iterator[Metric]:
    """Used over all blocks, from 0 to 1 in spite of the name; blocks that are only cached count as free."""
    total = sum(sample.value for sample in blocks.samples)
    used = sum(sample.value for sample in blocks.samples if sample.labels["state"] == "used")
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        yield _gauge(name, "Share of the KV blocks that is in use, 0 to 1.", dict(common), used / total if total else 0.0)


def _waiting_by_reason(sequences: Metric, common: Mapping[str, str]) -> Metric:
    """Sequences wait for capacity only: there is nothing here that would defer one."""
    waiting = sum(sample.value for sample in sequences.samples if sample.labels["status"] in _WAITING["status"])
    return _gauge("num_requests_waiting_by_reason", "Live sequences that wait.", {**common, "reason": "capacity"}, waiting)


def _gauge(name: str, documentation: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
