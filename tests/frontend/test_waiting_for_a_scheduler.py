"""Requests that come while no scheduler is there: kept in order, no more than may wait, and no longer than they said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from frontend.errors import ApiError
from pagemill.messages.frontend import AddRequest
from tests.helpers.fake_scheduler import FakeScheduler
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.lost_scheduler import FIRST_CUT, NUM_TOKENS, Reader, add, received, up_to, whole


@pytest.fixture
def frontend() -> Iterator[RunningFrontend]:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as running:
        yield running


def test_a_request_that_comes_while_no_scheduler_is_there_waits_behind_the_others(frontend: RunningFrontend) -> None:
    before = Reader(frontend, stream=True)
    before.wait_for_chunks(FIRST_CUT)
    frontend.lose_scheduler()
    response = frontend.client.get("/readyz")
    assert (response.status_code, response.json()) == (503, {"status": "restarting", "detail": "The scheduler is restarting."})
    assert frontend.client.get("/livez").status_code == 200
    assert frontend.client.get("/v1/models").status_code == 200
    during = Reader(frontend)
    frontend.wait_until(lambda: frontend.services.engine.num_sequences == 2, "the request is not kept")
    with FakeScheduler(whole, epoch=2) as fake:
        frontend.meet(fake)
        assert before.stream().finish_reasons() == ["length"]
        assert during.reply().json()["usage"]["completion_tokens"] == NUM_TOKENS
        assert [(request.resubmitted, len(received(request))) for request in fake.requests()] == [(True, FIRST_CUT), (False, 0)]


def test_no_more_sequences_are_kept_than_may_wait() -> None:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT)), max_num_queued=3) as frontend:
        add(frontend, 4)
        frontend.scheduler.wait_for(AddRequest, count=4)  # these were taken once, and do not count
        frontend.lose_scheduler()
        frontend.services.engine.room.retry_after_s = lambda: 7
        with pytest.raises(ApiError, match="Too many requests are waiting") as refusal:
            add(frontend, 4)
        assert (refusal.value.status, refusal.value.headers) == (429, {"Retry-After": "7"})
        add(frontend, 2)
        add(frontend, 1)
        with pytest.raises(ApiError):
            add(frontend, 1)
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            assert [request.resubmitted for request in fake.wait_for(AddRequest, count=7)] == [True] * 4 + [False] * 3
            fake.wait_idle()
            add(frontend, 4)  # the scheduler has its own limit
            fake.wait_for(AddRequest, count=11)


def test_without_a_scheduler_prompt_tokens_are_bounded() -> None:
    with running_frontend(FakeScheduler(whole), max_queued_tokens=5) as frontend:
        add(frontend, 3)
        frontend.scheduler.wait_for(AddRequest, count=3)  # the scheduler has its own limit
        frontend.lose_scheduler()
        add(frontend, 2)
        with pytest.raises(ApiError, match="Too many requests are waiting"):
            add(frontend, 1)


def test_who_waits_for_a_scheduler_does_not_wait_for_longer_than_it_said() -> None:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT)), max_queue_time_s=1) as frontend:
        begun = Reader(frontend, stream=True)
        begun.wait_for_chunks(FIRST_CUT)
        frontend.lose_scheduler()
        refused = Reader(frontend, n=2).reply()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_timeout")
        assert refused.json()["error"]["message"] == "The request waited longer than the limit of 1 s."
        late = Reader(frontend)
        frontend.wait_until(lambda: frontend.services.engine.num_sequences == 2, "it is not taken")
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            assert begun.stream().finish_reasons() == ["length"], "what was begun waits as long as it takes"
            assert late.reply().status_code == 200
            again, new = fake.requests()
    assert (again.resubmitted, again.limits.max_queue_s) == (True, 1.0)
    assert 0 < new.limits.max_queue_s < 1.0, "what it has waited for here is over"
    assert frontend.services.engine.num_dropped == 0
