"""What scrapers read is what the client library would write, in pieces between which other work goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics

from frontend.exposition import CONTENT_TYPES, Format, format_for, pieces
from frontend.metrics import FrontendMetrics
from tests.frontend.test_metrics import used_metrics

NASTY = 'a "quoted" \\ value\nin two lines, {with} braces'


def awkward() -> list[Metric]:
    """Families with everything that has to be escaped or looks otherwise than it is."""
    gauge = GaugeMetricFamily("pagemill_gauge", NASTY, labels=["zz", "aa"])
    for value in (0, 1, -1.5, 1e-9, 123456.0, 1234567.0, 1e21, float("inf"), float("-inf"), float("nan")):
        gauge.add_metric([NASTY, str(value)], value)
    histogram = HistogramMetricFamily("vllm:histogram", "H.")
    histogram.add_metric([], [("0.1", 1.0), ("+Inf", 3.0)], 7.25)
    summary = SummaryMetricFamily("pagemill_summary", "S.", labels=["part"])
    summary.add_metric(["forward"], 3, 0.5)
    return [gauge, CounterMetricFamily("vllm:counter", "C.", 3), histogram, summary, GaugeMetricFamily("pagemill_nothing", "No sample.", labels=["x"])]


def as_the_library_writes(families: list[Metric], form: Format) -> bytes:
    class Collector:
        def collect(self) -> Iterator[Metric]:
            return iter(families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    if form == "text":
        return generate_latest(registry)
    # Its default would turn the colon of `vllm:` in samples, not in headers, into an underscore.
    return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call, no-any-return]


def real() -> list[Metric]:
    metrics = used_metrics("vllm")
    return [*metrics.own(), *metrics._scheduler.collect()]


@pytest.mark.parametrize("form", ["text", "openmetrics"])
@pytest.mark.parametrize("families", [awkward(), real()], ids=["awkward", "real"])
def test_it_is_what_the_library_writes(families: list[Metric], form: Format) -> None:
    assert b"".join(pieces(families, form)) == as_the_library_writes(families, form)


def test_no_piece_is_long_and_the_next_families_are_not_asked_for_before_they_are_needed() -> None:
    asked = []

    def families() -> Iterator[Metric]:
        for number in range(100):
            asked.append(number)
            family = GaugeMetricFamily(f"pagemill_g{number}", "G.", labels=["x"])
            for value in range(20):
                family.add_metric([str(value)], value)
            yield family

    found = []
    for piece in pieces(families(), "text"):
        found.append((piece.count(b"\n"), len(asked)))
    assert max(lines for lines, _ in found) < 200
    assert found[0][1] < 10
    assert len(asked) == 100


def test_a_scrape_of_everything_is_in_several_pieces() -> None:
    sizes = [len(piece) for piece in used_metrics("vllm").scrape()]
    assert len(sizes) > 4
    assert max(sizes) < sum(sizes) / 3


def test_openmetrics_is_written_for_whoever_accepts_it() -> None:
    assert format_for("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5") == "openmetrics"
    assert format_for("*/*") == format_for("") == "text"
    assert CONTENT_TYPES["openmetrics"].startswith("application/openmetrics-text; version=1.0.0")
    assert CONTENT_TYPES["text"] == "text/plain; version=0.0.4; charset=utf-8"


def test_names_of_every_metric_are_known_to_both_formats() -> None:
    text = b"".join(FrontendMetrics("tiny", "vllm").scrape("openmetrics"))
    assert text.endswith(b"# EOF\n")
    assert b'{"vllm:' not in text
