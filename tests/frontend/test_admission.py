"""Requests that come while too many wait: refused before their body is read, cheaply, with a time to come again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from frontend import overload
from pagemill.messages import AddRequest
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler, Refuse, snapshot
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.server import wait_for

COMPLETIONS = "/v1/completions"
MAX_NUM_QUEUED = 3
NUM_WAITING = 128  #: more than seats and queue together


@pytest.fixture
def full() -> Iterator[RunningFrontend]:
    """A server with one request too many: nothing goes on until the test says so."""
    with running_frontend(max_num_queued=MAX_NUM_QUEUED) as frontend:
        frontend.scheduler.gate.clear()
        with sent(frontend, {"prompt": "Hello", "max_tokens": 2, "n": NUM_WAITING}):
            frontend.scheduler.wait_for(AddRequest, count=NUM_WAITING)
            yield frontend


@contextmanager
def sent(frontend: RunningFrontend, body: dict[str, object], part: float = 1.0) -> Iterator[socket.socket]:
    """A request of which this part of the body has been sent, on a connection of its own."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        connection.sendall(data[: int(part * len(data))])
        yield connection


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"] == {"message": "Too many requests are waiting.", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}


def test_who_comes_too_late_is_refused_before_the_body_is_read(full: RunningFrontend) -> None:
    with socket.create_connection(("127.0.0.1", full.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
    assert len(full.scheduler.requests()) == NUM_WAITING


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_every_route_that_takes_a_body_is_guarded(path: str, full: RunningFrontend) -> None:
    check_refused(full.client.post(path, content=b"this is never parsed"))


def test_probes_and_metrics_are_answered_whatever_waits(full: RunningFrontend) -> None:
    for path in ("/livez", "/readyz", "/metrics", "/v1/models"):
        assert full.client.get(path).status_code == 200
    full.post(COMPLETIONS, prompt="Hello")
    assert f'requests_refused_total{{endpoint="{COMPLETIONS}",reason="rate_limit_exceeded",status="429"}} 1.0' in full.client.get("/metrics").text


def test_who_is_refused_waits_for_nobody_s_turn(full: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: overload.Pacer) -> None:
        raise AssertionError("a refusal has waited for its turn")

    monkeypatch.setattr(overload.Pacer, "turn", never)
    check_refused(full.post(COMPLETIONS, prompt="Hello"))


def test_as_soon_as_sequences_start_the_next_are_taken(full: RunningFrontend) -> None:
    check_refused(full.post(COMPLETIONS, prompt="Hello"))
    full.scheduler.gate.set()
    assert full.post(COMPLETIONS, prompt="Hello", max_tokens=1).status_code in (200, 429)
    full.scheduler.wait_idle()
    assert full.post(COMPLETIONS, prompt="Hello", max_tokens=1).status_code == 200
    wait_for(lambda: full.services.overload.num_waiting == 0, DEADLINE_S, lambda: "something still waits")


def test_requests_whose_clients_leave_make_room(full: RunningFrontend) -> None:
    overloaded = full.services.overload
    assert overloaded.num_waiting == NUM_WAITING
    full.call_soon(full.services.engine.end_all)
    wait_for(lambda: overloaded.num_waiting == 0, DEADLINE_S, lambda: f"{overloaded.num_waiting} wait")


def test_what_the_scheduler_rejects_waits_no_longer_and_is_told_when_to_come_again() -> None:
    with running_frontend(FakeScheduler(lambda _: Refuse("queue_full"))) as frontend:
        check_refused(frontend.post(COMPLETIONS, prompt="Hello", n=3))
        assert frontend.services.overload.num_waiting == 0


def test_the_time_to_come_again_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload.Throughput, "sequences_s", 2.0)
    with running_frontend(max_num_queued=0) as frontend:
        frontend.call_soon(lambda: frontend.services.overload.snapshot(snapshot(num_waiting=40, num_running=4)))
        wait_for(lambda: frontend.services.overload.num_waiting == 40, DEADLINE_S, lambda: "the snapshot is not taken over")
        response = frontend.post(COMPLETIONS, prompt="Hello")
        assert (response.status_code, response.headers["retry-after"]) == (429, "20")


def test_large_bodies_that_are_being_read_stand_against_further_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "MAX_BODY_BYTES_HELD", 100_000)
    large = {"prompt": "Hello" * 20_000, "max_tokens": 1}
    with running_frontend() as frontend:
        with sent(frontend, large, part=0.95):
            wait_for(lambda: frontend.services.overload.body_bytes > 90_000, DEADLINE_S, lambda: "the body does not arrive")
            response = frontend.post(COMPLETIONS, **large)
            assert response.status_code == 429
            assert "large request bodies" in response.json()["error"]["message"]
            assert frontend.post(COMPLETIONS, prompt="Hello", max_tokens=1).status_code == 200
        wait_for(lambda: frontend.services.overload.body_bytes == 0, DEADLINE_S, lambda: "the body is still held")
        assert frontend.post("/tokenize", prompt="Hello" * 10_000).status_code == 200
