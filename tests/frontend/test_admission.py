"""Requests that come while too many wait: refused before their body is read, cheaply, with a time to come again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from frontend import overload
from frontend.app import Application, Refusal
from frontend.http_server import GuardedProtocol
from pagemill.messages.frontend import AddRequest
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
    wait_for(lambda: full.services.overload.num_waiting == 0, DEADLINE_S, lambda: "something still waits")
    assert full.post(COMPLETIONS, prompt="Hello", max_tokens=1).status_code == 200


def test_a_snapshot_that_has_not_heard_of_all_that_was_sent_makes_no_room_for_it(full: RunningFrontend) -> None:
    """A scheduler in the middle of a long step says that nobody waits; what would be taken for that it had to reject later."""
    engine = full.services.engine
    for num_heard in (0, 1, NUM_WAITING):
        full.scheduler.send(snapshot(requests_heard=num_heard, num_running=num_heard))
        num_unheard = NUM_WAITING - num_heard
        wait_for(partial(lambda expected: engine.num_unheard == expected, num_unheard), DEADLINE_S, lambda: "the snapshot does not arrive")
        status = full.client.post(COMPLETIONS, content=b"this is never parsed").status_code
        assert status == (400 if num_heard == NUM_WAITING else 429)


def test_a_new_scheduler_has_heard_of_nothing_but_what_it_was_sent(full: RunningFrontend) -> None:
    with FakeScheduler(epoch=2) as successor:
        successor.gate.clear()
        full.lose_scheduler()
        full.meet(successor)
        successor.wait_for(AddRequest, count=NUM_WAITING)
        assert full.services.engine.num_unheard == NUM_WAITING
        successor.send(snapshot(epoch=2, requests_heard=NUM_WAITING))
        wait_for(lambda: full.services.engine.num_unheard == 0, DEADLINE_S, lambda: "the snapshot does not arrive")


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


# --- answered while the head is parsed ----------------------------------------------------------------------


@pytest.fixture
def judging(full: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> RunningFrontend:
    """A full server whose application must not be called: what is answered is answered for its head."""

    async def never(*_: object) -> None:
        raise AssertionError("the application was called")

    monkeypatch.setattr(Application, "__call__", never)
    return full


def test_a_refusal_costs_no_task_and_is_on_record(judging: RunningFrontend) -> None:
    response = judging.client.post(COMPLETIONS, content=b"x" * 100_000, headers={"Content-Type": "application/json", "X-Request-Id": "mine"})
    check_refused(response)
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["content-type"] == "application/json"
    assert "date" in response.headers
    text = b"".join(judging.services.metrics.scrape()).decode()
    for line in ('refused_total{endpoint="/v1/completions",reason="rate_limit_exceeded",status="429"} 1.0', 'received_total{endpoint="/v1/completions"} 2.0'):
        assert f"pagemill_requests_{line}" in text
    assert 'pagemill_requests_in_flight{endpoint="/v1/completions"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("POST", "/nowhere", {}, (404, "not_found")),
        ("GET", COMPLETIONS, {}, (405, "method_not_allowed")),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, (415, "unsupported_media_type")),
        ("POST", COMPLETIONS, {"Content-Encoding": "br"}, (415, "unsupported_content_encoding")),
        ("POST", COMPLETIONS, {"Content-Length": "99999999"}, (413, "too_large")),
        ("POST", "/tokenize", {}, (429, "rate_limit_exceeded")),
    ],
)
def test_whatever_the_head_is_refused_for_is_said_at_once(
    method: str, path: str, headers: dict[str, str], expected: tuple[int, str], judging: RunningFrontend
) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", judging.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        answer = connection.recv(65536)
    assert (int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]) == expected


def test_who_may_not_call_hears_nothing_else() -> None:
    with running_frontend(api_keys=("key",), max_num_queued=0) as frontend:
        frontend.run(frontend.services.overload.scheduler_lost)
        for path in (COMPLETIONS, "/nowhere"):
            assert frontend.post(path, prompt="Hello").status_code == 401
        assert frontend.client.post(COMPLETIONS, json={}, headers={"Authorization": "Bearer key"}).status_code == 429


def post_of(num_bytes: int, *headers: str) -> bytes:
    """A request with a body that is no JSON."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {num_bytes}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + b"x" * num_bytes


def answers_to(port: int, data: bytes) -> bytes:
    """Everything that is said until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


def test_the_body_of_who_was_refused_is_passed_over_and_the_connection_serves_on(full: RunningFrontend) -> None:
    with socket.create_connection(("127.0.0.1", full.port), timeout=DEADLINE_S) as connection:
        for num_bytes in (10, 200_000, 10):
            connection.sendall(post_of(num_bytes))
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_refusals_sent_ahead_are_answered_in_order_and_all_but_the_first_take_a_turn(full: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[Refusal] = []
    judge = GuardedProtocol._refusal

    def note(protocol: GuardedProtocol, cycle: RequestResponseCycle) -> Refusal | None:
        refusal = judge(protocol, cycle)
        at_once.extend([refusal] if refusal is not None else [])
        return refusal

    monkeypatch.setattr(GuardedProtocol, "_refusal", note)
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = answers_to(full.port, b"".join(post_of(20, f"X-Request-Id: {number}") for number in range(5)) + last)
    ids = [line.split(b": ")[1] for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert ids[:-1] == [b"%d" % number for number in range(5)]
    assert (answer.count(b"HTTP/1.1 429 "), answer.count(b"HTTP/1.1 200 ")) == (5, 1)
    assert [refusal.request_id for refusal in at_once] == ["0"]


def test_what_follows_a_last_request_that_was_refused_is_not_begun(full: RunningFrontend) -> None:
    answer = answers_to(full.port, post_of(10, "Connection: close") + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 429 ") == 1
    assert b"connection: close" in answer


def test_a_refusal_that_says_close_closes(full: RunningFrontend) -> None:
    """Nobody reads ten gigabytes to throw them away. At once: a connection that does nothing would be closed at some time."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {10 * 2**30}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", full.port), timeout=DEADLINE_S / 2) as connection:
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def test_who_is_refused_while_still_sending_hears_it(full: RunningFrontend) -> None:
    """A connection that is closed at once would be reset by what still comes, and the answer lost."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**33}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", full.port), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode())
        for _ in range(256):
            connection.sendall(bytes(65536))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_an_answer_to_a_head_request_has_no_body(full: RunningFrontend) -> None:
    response = full.client.head(COMPLETIONS)
    assert (response.status_code, response.content) == (405, b"")
    assert full.client.get("/livez").status_code == 200
