"""Everything that /metrics shows, in a registry of its own: request metrics, the scheduler's, build information.

It observes finished request records (`request_metrics`), passes snapshots on to `scheduler_metrics`, and
adds aliases (`vllm_metrics`) if asked to. Labels are bounded: routes, status codes, fixed catalogues. Where there are
several frontends, what each counts by itself carries the label `frontend`, and all of them are shown (`metrics_exchange`).
Conservation holds at every scrape: received = finished + refused + in flight, by endpoint and frontend.
It must not know HTTP, and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Protocol, get_args

from prometheus_client import Counter, Gauge, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend import exposition
from frontend.exposition import Format
from frontend.histogram import Histogram
from frontend.metrics_exchange import labelled, merged
from frontend.request_metrics import RequestRecord
from frontend.scheduler_metrics import SchedulerMetrics
from frontend.vllm_metrics import aliases
from pagemill import PROTOCOL_VERSION, __version__
from pagemill.config import MetricsCompat
from pagemill.messages.frontend import SchedulerReady, StatsSnapshot
from pagemill.messages.sequences import FinishReason
from pagemill.messages.wire import ProcessKind

#: Bounds that others' dashboards expect, and finer ones below: small models answer within a millisecond.
_FIRST_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_FEW = (0, 1, 2, 5, 10, 20, 50, 100)


class EngineNumbers(Protocol):
    """What is read off the engine at each scrape."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...


class ServerNumbers(Protocol):
    """What is read off the HTTP server at each scrape."""

    @property
    def num_open_connections(self) -> int: ...
    @property
    def num_refused_connections(self) -> int: ...


class FrontendMetrics:
    """One per frontend process. A `RequestObserver` and a `SchedulerObserver`. `frontend` names it where there are several."""

    def __init__(self, model_name: str, compat: MetricsCompat, frontend: str | None = None) -> None:
        self._model_name = model_name
        self._compat = compat
        self._frontend = frontend
        self._process = ProcessCollector(registry=None)
        self._requests = _RequestMetrics()
        self._scheduler = SchedulerMetrics()
        self._restarts = Counter("pagemill_restarts", "Processes that ended while serving and were replaced.", ("process",), registry=None)
        for kind in get_args(ProcessKind):
            self._restarts.labels(kind)
        self._engine: EngineNumbers | None = None
        self._server: ServerNumbers | None = None

    def watch(self, engine: EngineNumbers, server: ServerNumbers) -> None:
        self._engine, self._server = engine, server

    def peer_lost(self, kind: ProcessKind) -> None:
        self._restarts.labels(kind).inc()

    def request_received(self, record: RequestRecord) -> None:
        self._requests.received_at(record.endpoint).inc()
        self._requests.in_flight_at(record.endpoint).inc()

    def request_finished(self, record: RequestRecord) -> None:
        self._requests.finished_or_refused(record)
        self._requests.in_flight_at(record.endpoint).dec()

    def scheduler_ready(self, message: SchedulerReady) -> None:
        self._scheduler.ready(message)

    def scheduler_lost(self) -> None:
        self._scheduler.lost()

    def snapshot(self, message: StatsSnapshot) -> None:
        self._scheduler.update(message)

    @property
    def last_snapshot(self) -> StatsSnapshot | None:
        """The scheduler's numbers as last heard of; None before the first."""
        return self._scheduler.last

    def scrape(self, form: Format = "text", others: Sequence[Iterable[Metric]] = ()) -> Iterator[bytes]:
        """The text of a scrape, in pieces, with the families of `others`, who are frontends. All numbers are of the moment of this call."""
        native = [self._build_info(), *merged(self.own(), others), *self._scheduler.collect()]
        also = aliases(native, self._model_name) if self._compat == "vllm" else ()
        return exposition.pieces(chain(native, also), form)

    def own(self) -> list[Metric]:
        """What this process counts by itself, and what it has seen of others that any frontend sees."""
        families = [*self._process.collect(), *self._requests.collect(), *self._engine_families(), *self._server_families()]
        if self._frontend is not None:
            families = [labelled(family, self._frontend) for family in families]
        return [*families, *map(_without_created, self._restarts.collect())]

    def _engine_families(self) -> Iterator[Metric]:
        if self._engine is not None:
            help_text = "Sequences that clients of this frontend wait for, with a scheduler or without."
            yield GaugeMetricFamily("pagemill_frontend_sequences", help_text, self._engine.num_sequences)
            help_text = "Messages dropped by this frontend: of an older epoch, of no sequence known here, or malformed."
            yield CounterMetricFamily("pagemill_frontend_dropped_messages", help_text, self._engine.num_dropped)

    def _server_families(self) -> Iterator[Metric]:
        if self._server is not None:
            yield GaugeMetricFamily("pagemill_connections_open", "HTTP connections that are open.", self._server.num_open_connections)
            help_text = "HTTP connections that were refused because too many were open."
            yield CounterMetricFamily("pagemill_connections_refused", help_text, self._server.num_refused_connections)

    def _build_info(self) -> Metric:
        family = GaugeMetricFamily("pagemill_build_info", "What is running, as labels; always 1.", labels=["version", "protocol", "model"])
        family.add_metric([__version__, str(PROTOCOL_VERSION), self._model_name], 1)
        return family


class _RequestMetrics:
    """Instruments that request records feed."""

    def __init__(self) -> None:
        outcome = ("endpoint", "status", "reason")
        self.received = Counter("pagemill_requests_received", "HTTP requests that arrived.", ("endpoint",), registry=None)
        self.in_flight = Gauge("pagemill_requests_in_flight", "HTTP requests whose response has not ended.", ("endpoint",), registry=None)
        self.finished = Counter("pagemill_requests_finished", "HTTP requests whose response has ended, by how.", outcome, registry=None)
        self.refused = Counter("pagemill_requests_refused", "HTTP requests that were turned away, by why.", outcome, registry=None)
        self.choices = Counter("pagemill_choices_finished", "Choices of replies that ended: one for each sequence of a request.", ("reason",), registry=None)
        self.prompt_tokens = Counter("pagemill_prompt_tokens", "Prompt tokens of ended requests, by where their KV came from.", ("source",), registry=None)
        self.generation_tokens = Counter("pagemill_generation_tokens", "Output tokens of ended requests.", registry=None)
        self.unknown_fields = Counter("pagemill_unknown_request_fields", "Fields in requests that nobody knows; their names are in the log.", registry=None)
        # To look up a child costs the library more than to count: labels are bounded, so what was looked up once is remembered.
        self.received_at, self.in_flight_at = cache(self.received.labels), cache(self.in_flight.labels)
        self._finished_as, self._refused_as = cache(self.finished.labels), cache(self.refused.labels)
        for reason in get_args(FinishReason):
            self.choices.labels(reason)  # counters exist from the start, so that a first increase is seen
        for source in ("computed", "cached"):
            self.prompt_tokens.labels(source)

        self.ttft = Histogram("pagemill_time_to_first_token_seconds", "TTFT: arrival to first token.", _FIRST_TOKEN)
        self.itl = Histogram("pagemill_inter_token_latency_seconds", "ITL: gap between consecutive tokens of a choice.", _TOKEN)
        self.tpot = Histogram("pagemill_time_per_output_token_seconds", "TPOT: (E2E - TTFT) / (tokens - 1) of a choice.", _TOKEN)
        self.e2e = Histogram("pagemill_request_seconds", "E2E: arrival to the end of the response.", _REQUEST)
        self.queue = Histogram("pagemill_queue_seconds", "Arrival at the scheduler to first slice.", _REQUEST)
        self.prefill = Histogram("pagemill_prefill_seconds", "First slice to first token.", _REQUEST)
        self.decode = Histogram("pagemill_decode_seconds", "First token to last token.", _REQUEST)
        self.inference = Histogram("pagemill_inference_seconds", "First slice to last token.", _REQUEST)
        self.request_prompt = Histogram("pagemill_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_computed = Histogram("pagemill_request_prompt_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS)
        self.request_generation = Histogram("pagemill_request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self.request_longest = Histogram("pagemill_request_longest_choice_tokens", "Output tokens of a request's longest choice.", _TOKENS)
        self.request_max_tokens = Histogram("pagemill_request_max_tokens", "Output tokens a request allows for each choice.", _TOKENS)
        self.request_choices = Histogram("pagemill_request_choices", "Choices a request asks for.", _FEW)
        self.request_preemptions = Histogram("pagemill_request_preemptions", "Preemptions of a request's sequences.", _FEW)

    def finished_or_refused(self, record: RequestRecord) -> None:
        """The one place where a record becomes observations."""
        if record.num_unknown_fields:
            self.unknown_fields.inc(record.num_unknown_fields)
        is_refused = record.outcome == "refused"
        child = self._refused_as if is_refused else self._finished_as
        child(record.endpoint, str(record.status), record.reason).inc()
        if not record.generates or is_refused:
            return
        computed = max(0, record.num_prompt_tokens - record.num_cached_tokens)
        self.prompt_tokens.labels("computed").inc(computed)
        self.prompt_tokens.labels("cached").inc(record.num_prompt_tokens - computed)
        self.generation_tokens.inc(record.num_output_tokens)
        self._observe_times(record)
        self.request_prompt.observe(record.num_prompt_tokens)
        self.request_computed.observe(computed)
        self.request_generation.observe(record.num_output_tokens)
        self.request_longest.observe(max((times.num_tokens for times in record.choices.values()), default=0))
        self.request_max_tokens.observe(record.max_tokens)
        self.request_choices.observe(record.n)
        self.request_preemptions.observe(record.num_preemptions)

    def _observe_times(self, record: RequestRecord) -> None:
        self.ttft.observe(record.ttft_s)
        self.e2e.observe(record.e2e_s)
        self.queue.observe(record.queue_s)
        self.prefill.observe(record.prefill_s)
        self.decode.observe(record.decode_s)
        if record.prefill_s is not None and record.decode_s is not None:
            self.inference.observe(record.prefill_s + record.decode_s)
        unfinished = record.n * record.num_prompts - len(record.finish_reasons)
        for reason in [*record.finish_reasons, *["error" if record.outcome == "error" else "abort"] * unfinished]:
            self.choices.labels(reason).inc()
        for times in record.choices.values():
            self.itl.observe_all(times.gaps)
            self.tpot.observe(times.tpot_s)

    def collect(self) -> Iterator[Metric]:
        for instrument in vars(self).values():
            if isinstance(instrument, Histogram):
                yield instrument.collect()
            elif isinstance(instrument, Counter | Gauge):
                yield from map(_without_created, instrument.collect())


def _without_created(family: Metric) -> Metric:
    """Drops the creation times that the library adds: one more family for each, which nothing here reads."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family
