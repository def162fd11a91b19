"""A cumulative histogram that takes many values at once.

The client library's own takes a lock and walks its buckets for each value, about a microsecond: for the
gaps of a long reply, observed when the request ends, that would hold up every other stream. This one
sorts a whole array of values into buckets in C, and belongs to the one thread of the event loop.
It knows nothing of what it counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily


class Histogram:
    """Values by bucket; a bucket holds the values up to and including its bound."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self._documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  #: not cumulative; the last is what exceeds every bound
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        """Adds one value; None (the request never came that far) adds nothing."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def observe_all(self, values: Collection[float]) -> None:
        for bucket, count in Counter(map(partial(bisect_left, self._bounds), values)).items():
            self._counts[bucket] += count
        self._sum += math.fsum(values)

    def collect(self) -> HistogramMetricFamily:
        labels = [*map(str, map(float, self._bounds)), "+Inf"]
        cumulative = [(label, float(total)) for label, total in zip(labels, accumulate(self._counts), strict=True)]
        family = HistogramMetricFamily(self.name, self._documentation)
        family.add_metric([], cumulative, self._sum)
        return family
