"""GET /debug/preemptions: the newest decisions by name, what they have cost, and who may ask for how many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from pagemill.messages.frontend import DecisionsQuery
from pagemill.preemption_report import PreemptionReport
from tests.helpers.fake_scheduler import DEADLINE_S, decision, snapshot, victim
from tests.helpers.frontend_server import RunningFrontend, running_frontend

PATH = "/debug/preemptions"


def test_decisions_are_shown_with_the_names_and_prices_they_were_made_with(frontend: RunningFrontend) -> None:
    made = decision(3, (victim(), victim("third", kind="keep", yielded=False, freed=0, swap_s=None)), reason="start")
    frontend.scheduler.decisions = [made]
    response = frontend.client.get(PATH)
    assert response.headers["Content-Type"] == "application/json"
    (shown,) = response.json()["decisions"]
    assert (shown["number"], shown["reason"], shown["request_id"]) == (3, "start", "first")
    assert [price["swap_s"] for price in shown["victims"]] == [0.0302, None]
    assert msgspec.json.decode(response.content, type=PreemptionReport).decisions == [made]


def test_the_newest_are_shown_oldest_first_and_a_hundred_where_nothing_is_said(frontend: RunningFrontend) -> None:
    frontend.scheduler.decisions = [decision(number) for number in range(1, 151)]
    assert [shown["number"] for shown in frontend.client.get(PATH).json()["decisions"]] == list(range(51, 151))
    assert [shown["number"] for shown in frontend.client.get(PATH, params={"limit": "2"}).json()["decisions"]] == [149, 150]
    frontend.client.get(PATH, params={"limit": "1000"})
    assert [query.limit for query in frontend.scheduler.wait_for(DecisionsQuery, count=3)] == [100, 2, 1000]


BAD_LIMITS = ("limit=0", "limit=1001", "limit=-1", "limit=", "limit=ten", "limit=1.0", "limit=%D9%A3", "limit=1&limit=2", f"limit={'1' * 5000}")


@pytest.mark.parametrize("query", BAD_LIMITS, ids=range(len(BAD_LIMITS)))
def test_a_limit_out_of_range_is_refused_by_name_and_reaches_no_scheduler(query: str, frontend: RunningFrontend) -> None:
    response = frontend.client.get(f"{PATH}?{query}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", "limit")
    assert "1 to 1000" in error["message"]
    assert not [message for message in frontend.scheduler.received if isinstance(message, DecisionsQuery)]


def test_what_it_has_cost_so_far_stands_beside_the_decisions(frontend: RunningFrontend) -> None:
    numbers = snapshot(preemptions={"swap/growth": 4}, swapped_bytes={"out": 4096, "in": 1024}, swap_seconds={"out": 0.5, "in": 0.125})
    frontend.call_soon(lambda: frontend.services.metrics.snapshot(numbers))
    report = frontend.client.get(PATH).json()
    assert report == {
        "now_s": 200.0,
        "decisions": [],
        "preemptions": {"swap/growth": 4},
        "swapped_bytes": {"out": 4096, "in": 1024},
        "swap_seconds": {"out": 0.5, "in": 0.125},
    }


def test_it_answers_this_machine_under_its_own_name_or_an_admin_key(frontend: RunningFrontend) -> None:
    refused = frontend.client.get(PATH, headers={"Host": "evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    with running_frontend(api_keys=("user",), admin_keys=("admin",)) as guarded:
        answers = [guarded.client.get(PATH, headers={"x-api-key": key}).status_code for key in ("", "user", "admin")]
    assert answers == [401, 401, 200]


def test_before_the_scheduler_is_ready_it_is_unavailable() -> None:
    with running_frontend(connect=False) as loading:
        response = loading.client.get(PATH)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


def test_whoever_waits_for_an_answer_is_told_when_the_scheduler_goes() -> None:
    with running_frontend() as running, ThreadPoolExecutor() as pool:
        running.scheduler.answers_queries = False
        waiting = pool.submit(running.client.get, PATH)
        running.scheduler.wait_for(DecisionsQuery)
        running.call_soon(running.services.engine.disconnect)
        response = waiting.result(DEADLINE_S)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
