"""Several frontends, one scrape: whichever is met shows all of them, and none waits for one that is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from frontend.metrics import FrontendMetrics
from frontend.metrics_exchange import MAX_ANSWER_BYTES, MetricsExchange, labelled, merged
from frontend.request_metrics import RequestLedger
from tests.frontend.test_metrics import text_of, value
from tests.helpers.fake_scheduler import DEADLINE_S


def counter(value: float, **labels: str) -> CounterMetricFamily:
    family = CounterMetricFamily("pagemill_x", "X.", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def values(families: Iterable[Metric]) -> dict[str, float]:
    return {sample.labels.get("frontend", ""): sample.value for family in families for sample in family.samples if sample.name == "pagemill_x_total"}


def answers_of(*exchanges: MetricsExchange, directory: Path, asking: int = 0) -> list[list[Metric]]:
    """What the one that asks is told, once all are open."""

    async def run() -> list[list[Metric]]:
        for exchange in exchanges:
            await exchange.open(directory)
            await exchange.open(directory)  # each new scheduler is a reason to try
        answers = await asyncio.wait_for(exchanges[asking].ask(), DEADLINE_S)
        for exchange in exchanges:
            exchange.close()
        return answers

    return asyncio.run(run())


def one_of_three(index: int, count: float) -> MetricsExchange:
    return MetricsExchange(index, 3, lambda: [labelled(counter(count), str(index))])


def test_each_is_told_what_the_others_count(tmp_path: Path) -> None:
    frontends = [one_of_three(index, 10.0 + index) for index in range(3)]
    assert [values(families) for families in answers_of(*frontends, directory=tmp_path, asking=1)] == [{"0": 10.0}, {"2": 12.0}]


def test_a_new_incarnation_takes_the_place_of_the_former(tmp_path: Path) -> None:
    answers_of(one_of_three(1, 7.0), directory=tmp_path)  # leaves its socket, as one that is killed does
    assert [values(families) for families in answers_of(one_of_three(0, 10.0), one_of_three(1, 0.0), directory=tmp_path)] == [{"1": 0.0}]


def test_alone_nothing_is_opened_or_asked(tmp_path: Path) -> None:
    assert answers_of(MetricsExchange(0, 1, list), directory=tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "answer", [None, b"", b"\xc1", b"\x93\x01\x02\x03", b"\0" * (MAX_ANSWER_BYTES + 1)], ids=["silence", "nothing", "no msgpack", "other", "too much"]
)
def test_one_that_is_gone_stuck_or_strange_is_left_out(answer: bytes | None, tmp_path: Path) -> None:
    async def run() -> list[list[Metric]]:
        writers: list[asyncio.StreamWriter] = []

        async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            if answer is not None:
                writer.write(answer)
                writer.close()

        strange = await asyncio.start_unix_server(speak, tmp_path / "m1")
        exchanges = [MetricsExchange(index, 4, lambda: [counter(1.0)]) for index in (0, 2)]  # 3 was never there
        for exchange in exchanges:
            await exchange.open(tmp_path)
        answers = await asyncio.wait_for(exchanges[0].ask(), DEADLINE_S)
        strange.close()
        for exchange in exchanges:
            exchange.close()
        for writer in writers:
            writer.close()
        return answers

    assert [values(families) for families in asyncio.run(run())] == [{"": 1.0}]


def test_a_frontend_that_cannot_share_serves_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "m0").mkdir()
    assert answers_of(MetricsExchange(0, 2, list), directory=tmp_path) == []


def test_series_are_put_side_by_side_and_of_the_same_one_the_largest_value_stands() -> None:
    mine = [counter(1.0, frontend="0"), CounterMetricFamily("pagemill_restarts", "R.", 3.0)]
    other = [counter(2.0, frontend="1"), CounterMetricFamily("pagemill_restarts", "R.", 5.0)]
    for first, second in ((mine, other), (other, mine)):
        families = merged(first, [second])
        assert values(families) == {"0": 1.0, "1": 2.0}
        assert [sample.value for family in families for sample in family.samples if family.name == "pagemill_restarts"] == [5.0]
    assert [sample.value for sample in mine[0].samples] == [1.0]  # nothing is changed in place


def test_a_scrape_balances_for_each_frontend_and_aliases_are_sums() -> None:
    frontends = [FrontendMetrics("tiny", "vllm", str(index)) for index in range(2)]
    for frontend, num_requests in zip(frontends, (3, 5), strict=True):
        ledger = RequestLedger(frontend, lambda: 0.0)
        records = [ledger.open(method="POST", endpoint="/a", request_id=str(number)) for number in range(num_requests)]
        records[0].describe(stream=False, n=2, max_tokens=1, num_prompt_tokens=7)
        ledger.close(records[0], 200)
        frontend.peer_lost("worker")
    frontends[0].peer_lost("worker")
    text = text_of(frontends[1], others=[frontends[0].own()])

    def shown(name: str, **labels: str) -> float:
        return value(text, name, **labels)

    for index, num_requests in (("0", 3), ("1", 5)):
        assert shown("pagemill_requests_received_total", frontend=index) == num_requests
        assert shown("pagemill_requests_finished_total", frontend=index) + shown("pagemill_requests_in_flight", frontend=index) == num_requests
        assert shown("process_resident_memory_bytes", frontend=index) > 0
    assert shown("pagemill_restarts_total", process="worker") == 2
    assert shown("vllm:prompt_tokens_total", model_name="tiny", engine="0") == 14
    assert text.count("# TYPE pagemill_requests_received_total counter") == 1
    assert text_of(frontends[1]).count('frontend="0"') == 0


def test_a_single_frontend_has_no_such_label() -> None:
    assert "frontend=" not in text_of(FrontendMetrics("tiny", "vllm"))
