"""A fault where a request is handed over fails this request, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from pagemill import injection
from pagemill.messages.frontend import AbortRequest, AddRequest
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.lost_scheduler import CHAT, FIRST_CUT, HELLO, Reader, replaced, up_to, whole


@pytest.fixture
def frontend() -> Iterator[RunningFrontend]:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as running:
        yield running


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    injection.disarm()


@pytest.mark.parametrize("point", ["request", "submit", "submitted", "output", "finish"])
def test_a_fault_on_the_way_fails_one_request_and_leaves_nothing_behind(point: str, frontend: RunningFrontend) -> None:
    injection.arm([f"frontend.{point}=raise"], incarnation=0)
    stop = frontend.post("/detokenize", tokens=[42]).json()["prompt"] if point == "finish" else None
    response = frontend.post(CHAT, messages=HELLO, n=2, stop=stop)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "frontend." not in response.text
    frontend.wait_until(lambda: frontend.services.engine.num_sequences == 0, "a sequence is left")
    frontend.scheduler.wait_idle()
    frontend.scheduler.script = whole
    assert frontend.post(CHAT, messages=HELLO, n=2, stop=stop).status_code == 200
    assert frontend.services.overload.num_waiting == 0


def test_a_fault_in_an_abort_does_not_keep_it_from_the_scheduler(frontend: RunningFrontend) -> None:
    injection.arm(["frontend.abort=raise"], incarnation=0)
    with httpx.stream("POST", f"{frontend.url}{CHAT}", json={"messages": HELLO, "stream": True, "n": 2}, timeout=DEADLINE_S) as leaving:
        next(leaving.iter_text())
    frontend.scheduler.wait_for(AbortRequest, count=2)
    frontend.scheduler.wait_idle()


@pytest.mark.parametrize("choice", [0, 1])
def test_a_fault_in_a_resubmission_fails_its_request_and_no_other(choice: int, frontend: RunningFrontend) -> None:
    failing = Reader(frontend, n=2)
    frontend.scheduler.wait_for(AddRequest, count=2)
    staying = Reader(frontend, stream=True)
    staying.wait_for_chunks(FIRST_CUT)
    injection.arm([f"frontend.resubmit=raise@{choice + 1}"], incarnation=0)
    with replaced(frontend) as fake:
        assert failing.reply().status_code == 500
        assert staying.stream().finish_reasons() == ["length"]
        fake.wait_for(AddRequest, count=1 + choice)
        fake.wait_idle()
        assert len(fake.requests()) == 1 + choice  # what has failed already is not sent
