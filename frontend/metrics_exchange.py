"""The counts of the other frontends, so that a scrape shows all of them whichever it meets.

Frontends share one port, and a scrape reaches any of them. Each therefore listens on a socket of its own in the server's
private directory, on which whoever connects is told what this process counts, once. For a scrape the others are asked,
all at the same time; one that does not answer soon is left out. Nothing here waits for another frontend's scrape.
It must not know what is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import Metric

from pagemill.telemetry import get_logger

#: A frontend that does not answer in this time is busy or gone; the scrape goes on without it.
TIMEOUT_S = 0.25
MAX_ANSWER_BYTES = 4 * 1024 * 1024

log = get_logger("frontend.metrics_exchange")


class _Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric family on the wire."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]  #: name, labels, value


_decoder = msgspec.msgpack.Decoder(list[_Family])


class MetricsExchange:
    """One per frontend. `collect` gives what this process counts."""

    def __init__(self, index: int, num_frontends: int, collect: Callable[[], Iterable[Metric]]) -> None:
        self._index = index
        self._others = [other for other in range(num_frontends) if other != index]
        self._collect = collect
        self._directory: Path | None = None
        self._server: asyncio.Server | None = None

    async def open(self, directory: Path) -> None:
        """Answers from now on. A second call changes nothing; alone it has nobody to answer."""
        if self._directory is not None or not self._others:
            return
        self._directory = directory
        path = _socket_path(directory, self._index)
        try:
            path.unlink(missing_ok=True)  # of this frontend's former incarnation
            self._server = await asyncio.start_unix_server(self._answer, path)
        except OSError as error:  # counts are not worth a frontend
            log.error("metrics_not_shared", error=str(error))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self) -> list[list[Metric]]:
        """The families of each other frontend that answers in time."""
        if self._directory is None:
            return []
        answers = await asyncio.gather(*(self._ask(_socket_path(self._directory, other)) for other in self._others))
        return [[_metric(family) for family in families] for families in answers if families]

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.msgpack.encode([_family(metric) for metric in self._collect()]))
        writer.close()

    async def _ask(self, path: Path) -> list[_Family]:
        """Nothing if it is gone, slow, or says what it should not."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    return _decoder.decode(await _read_all(reader))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("frontend_does_not_answer", socket=path.name, error=type(error).__name__)
            return []


def merged(families: Iterable[Metric], others: Sequence[Iterable[Metric]]) -> list[Metric]:
    """Families of the same name become one. Of a series that several have, the largest value stands: who came later has missed some."""
    if not others:
        return list(families)
    by_name: dict[str, Metric] = {}
    for family in (*families, *(family for each in others for family in each)):
        known = by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        places = {(sample.name, tuple(sample.labels.items())): place for place, sample in enumerate(known.samples)}
        for sample in family.samples:
            place = places.get((sample.name, tuple(sample.labels.items())))
            if place is None:
                known.samples.append(sample)
            elif sample.value > known.samples[place].value:
                known.samples[place] = sample
    return list(by_name.values())


def labelled(family: Metric, frontend: str) -> Metric:
    """The family with a label more on each sample: which frontend counted it."""
    copy = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        copy.add_sample(sample.name, {"frontend": frontend, **sample.labels}, sample.value)
    return copy


def _socket_path(directory: Path, index: int) -> Path:
    return directory / f"m{index}"


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = bytearray()
    while piece := await reader.read(65536):
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            raise OSError("the answer is too long")
    return bytes(answer)


def _family(metric: Metric) -> _Family:
    return _Family(metric.name, metric.documentation, metric.type, [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples])


def _metric(family: _Family) -> Metric:
    metric = Metric(family.name, family.documentation, family.type)
    for name, labels, value in family.samples:
        metric.add_sample(name, labels, value)
    return metric
