"""What a long run must show: memory that does not grow with requests, and counters that always add up.

Memory is what a process cannot give back by itself: anonymous pages, swapped out or not. Its slope over completed requests
is fitted by least squares once the run is warm. Must not know how requests are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

MIB = 1024 * 1024
PER_REQUESTS = 100_000
#: Of a run, before memory counts: caches and allocators fill.
WARM_UP_SHARE = 0.25
_LEAST_POINTS = 3


@dataclass
class MemoryLog:
    """Private bytes of processes, each over the requests completed by then."""

    points: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def note(self, process: str, num_completed: int, num_bytes: int) -> None:
        self.points.setdefault(process, []).append((num_completed, num_bytes))

    def slopes(self) -> dict[str, float]:
        """MiB per 100,000 requests, by process, after the warm-up. Processes that were not there long enough are left out."""
        warm = {process: points[int(len(points) * WARM_UP_SHARE) :] for process, points in self.points.items()}
        return {process: slope(points) * PER_REQUESTS / MIB for process, points in warm.items() if len(points) >= _LEAST_POINTS}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through the points by least squares; 0.0 where nothing moved along the first axis."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Scrape:
    """One look at /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over samples of this name that carry these labels."""
        return sum(sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items())

    def values_of(self, name: str, label: str) -> list[str]:
        """The values that a label has in samples of this name."""
        return sorted({sample.labels[label] for sample in self._samples if sample.name == name and label in sample.labels})

    def broken_laws(self) -> Iterator[str]:
        """What does not add up: requests of each endpoint, and the scheduler's sequences."""
        for endpoint in self.values_of("pagemill_requests_received_total", "endpoint"):
            parts = ("pagemill_requests_finished_total", "pagemill_requests_refused_total", "pagemill_requests_in_flight")
            yield from self._compare(endpoint, "pagemill_requests_received_total", parts, endpoint=endpoint)
        yield from self._compare("sequences", "pagemill_sequences_received_total", ("pagemill_sequences_finished_total", "pagemill_sequences"))

    def _compare(self, what: str, whole: str, parts: Sequence[str], **labels: str) -> Iterator[str]:
        received, accounted = self.total(whole, **labels), sum(self.total(part, **labels) for part in parts)
        if received != accounted:
            yield f"{what}: {received:.0f} received, {accounted:.0f} accounted for"
