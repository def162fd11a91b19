"""Metric families as the text that scrapers read, in pieces.

A scrape of a thousand lines takes a while, in which an event loop does nothing else. So numbers are taken at one moment,
by whoever gives the families, and are then written a piece at a time, between which other work goes on. Two formats:
Prometheus' own and OpenMetrics. Names are written as they are; they must be those that both formats know.
It must not know what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

Format = Literal["text", "openmetrics"]

CONTENT_TYPES: Mapping[Format, str] = {"text": CONTENT_TYPE_PLAIN_0_0_4, "openmetrics": CONTENT_TYPE_LATEST}
#: Samples of one piece, about: less than a millisecond.
_PIECE_SAMPLES = 128


def format_for(accept: str) -> Format:
    """OpenMetrics where the scraper's `Accept` header names it."""
    return "openmetrics" if "application/openmetrics-text" in accept else "text"


def pieces(families: Iterable[Metric], form: Format) -> Iterator[bytes]:
    """The whole text, if put together. Families are asked for as they are needed."""
    lines: list[str] = []
    num_samples = 0
    for family in families:
        lines += _head(family, form)
        lines += [f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n" for sample in family.samples]
        num_samples += len(family.samples)
        if num_samples >= _PIECE_SAMPLES:
            yield "".join(lines).encode()
            lines, num_samples = [], 0
    if form == "openmetrics":
        lines.append("# EOF\n")
    yield "".join(lines).encode()


def _head(family: Metric, form: Format) -> tuple[str, str]:
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    if form == "openmetrics":
        name, text = family.name, text.replace('"', r"\"")
    else:
        name = family.name + ("_total" if family.type == "counter" else "")
    return f"# HELP {name} {text}\n", f"# TYPE {name} {family.type}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())]) + "}"


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


@lru_cache(1024)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
