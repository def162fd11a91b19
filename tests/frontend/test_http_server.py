"""The HTTP server's guards: malformed requests, floods of headers, slow headers, framing, pipelining."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from frontend import http_server
from pagemill.messages.frontend import AbortRequest, AddRequest
from tests.helpers.fake_scheduler import DEADLINE_S
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.server import wait_for

BODY = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()


def exchange(port: int, *parts: bytes) -> bytes:
    """Sends the parts and reads until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer may be there already
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        return received


@pytest.fixture
def patient(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """Like `exchange`, of a client that reads when all is sent, which must succeed; for a server that hears it out however slow the machine is."""
    monkeypatch.setattr(http_server, "LINGER_S", 60.0)

    def send_and_read(*parts: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
            for part in parts:
                connection.sendall(part)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    return send_and_read


@contextmanager
def draining_frontend() -> Iterator[tuple[RunningFrontend, list[object]]]:
    """One that a test may let drain, and what goes wrong in its event loop, which would only be logged."""
    mishaps: list[object] = []
    with running_frontend() as frontend:
        frontend.run(lambda: frontend.loop.set_exception_handler(lambda _, context: mishaps.append(context)))
        yield frontend, mishaps


def is_held(client: tuple[str, int]) -> bool:
    """Whether this process still has its end of a client's connection."""
    return any(held.raddr == client for held in psutil.Process().net_connections("tcp"))


def exchange_slowly(port: int, first: bytes, second: bytes) -> bytes:
    """Sends the second part when the first has been read, or answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(first)
        connection.settimeout(0.1)
        received = b""
        try:
            received = connection.recv(65536)
        except TimeoutError:
            pass
        connection.settimeout(DEADLINE_S)
        try:
            connection.sendall(second)
            while piece := connection.recv(65536):
                received += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
        return received


@pytest.mark.parametrize(
    "request_head",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"],
)
def test_what_is_not_http_gets_an_error_in_the_api_s_shape(request_head: bytes, frontend: RunningFrontend) -> None:
    head, _, body = exchange(frontend.port, request_head).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert frontend.client.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [b"".join(b"X-%d: y\r\n" % index for index in range(200)) + b"\r\n", b"X: " + b"y" * 40_000 + b"\r\n\r\n", b"X: " + b"y" * 40_000],
    ids=["lines", "bytes", "bytes without end"],
)
def test_too_many_headers_are_refused(headers: bytes, frontend: RunningFrontend) -> None:
    answer = exchange(frontend.port, b"GET /livez HTTP/1.1\r\nHost: x\r\n", headers)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer
    assert frontend.client.get("/livez").status_code == 200


@pytest.mark.parametrize("end", [b" HTTP/1.1\r\nHost: x\r\n\r\n", b""], ids=["whole", "without end"])
@pytest.mark.parametrize("size", [http_server.MAX_URL_BYTES + 1, 70_000, 8_000_000])
def test_a_long_url_is_refused_and_whoever_still_sends_it_hears_so(size: int, end: bytes, frontend: RunningFrontend, patient: Callable[..., bytes]) -> None:
    head, _, body = patient(b"GET /v1/models?" + b"a" * (size - len(b"/v1/models?")) + end).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 414 ")
    assert json.loads(body)["error"]["code"] == "url_too_long"
    assert frontend.client.get("/livez").status_code == 200


@pytest.mark.parametrize("part", [1000, http_server.MAX_URL_BYTES], ids=["in parts", "at once"])
def test_the_longest_url_is_served(part: int, frontend: RunningFrontend) -> None:
    url = b"/v1/models?" + b"a" * (http_server.MAX_URL_BYTES - len(b"/v1/models?"))
    asked = b"GET " + url + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert exchange_slowly(frontend.port, asked[:part], asked[part:]).startswith(b"HTTP/1.1 200 ")


def test_megabytes_of_headers_are_refused_and_whoever_still_sends_them_hears_so(patient: Callable[..., bytes]) -> None:
    answer = patient(b"GET /livez HTTP/1.1\r\nX: " + b"y" * 8_000_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


def test_headers_that_do_not_arrive_in_time_close_the_connection(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.05)
    assert exchange(frontend.port) == b""
    assert exchange(frontend.port, b"GET /livez HTTP/1.1\r\nX: ") == b""


def test_a_body_that_does_not_arrive_in_time_is_refused(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.body.BODY_TIMEOUT_S", 0.05)
    answer = exchange(frontend.port, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_tiny_chunks_make_one_body(frontend: RunningFrontend) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(frontend.port, head, chunks).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_chunks_without_end_are_refused_when_they_are_too_many_and_the_client_hears_so(
    connection: str, frontend: RunningFrontend, patient: Callable[..., bytes]
) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    answer = patient(head, *([b"10000\r\n" + b" " * 65536 + b"\r\n"] * 300))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert frontend.client.get("/livez").status_code == 200


def test_requests_on_one_connection_are_answered_in_order(frontend: RunningFrontend) -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    answer = exchange(frontend.port, post + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.index(b"text_completion") < answer.index(b'"version"')


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("split", [0, 1, 40], ids=["at once", "body apart", "body in two"])
def test_an_offer_to_upgrade_is_passed_over_and_the_body_is_read(chunked: bool, split: int, frontend: RunningFrontend) -> None:
    framing = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: %d\r\n\r\n" % len(BODY)
    content = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + framing
    if split == 0:
        answer = exchange(frontend.port, head + content + VERSION)
    else:
        answer = exchange_slowly(frontend.port, head + content[: split - 1], content[split - 1 :] + VERSION)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.index(b"text_completion") < answer.index(b'"version"')


def test_a_request_for_a_web_socket_is_answered_as_http_and_the_next_one_too(frontend: RunningFrontend) -> None:
    answer = exchange(frontend.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + VERSION)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b"HTTP/1.1 101" not in answer


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize("at_once", [False, True], ids=["sent later", "sent at once"])
def test_a_client_that_sent_requests_ahead_and_leaves_is_noticed(at_once: bool, stream: bool, frontend: RunningFrontend) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 100, "stream": stream}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    frontend.scheduler.gate.clear()
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        connection.sendall(post * 3 if at_once else post)
        frontend.scheduler.wait_for(AddRequest)
        if not at_once:
            connection.sendall(post * 2)
    frontend.scheduler.wait_for(AbortRequest)
    assert sum(isinstance(message, AddRequest) for message in frontend.scheduler.received) == 1


def test_many_requests_sent_ahead_are_all_answered_in_order(frontend: RunningFrontend) -> None:
    asks = [b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\n\r\n" % (index, index) for index in range(http_server.MAX_PIPELINED)]
    answer = exchange(frontend.port, b"".join(asks) + VERSION)
    ids = [line.split(b": ")[1] for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert ids[:-1] == [b"%d" % index for index in range(http_server.MAX_PIPELINED)]


def post(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path, len(body), body)


@pytest.mark.parametrize("later", [post(b"x", b"/livez"), post(BODY), VERSION], ids=["a body", "a request", "no body"])
def test_nothing_is_begun_after_an_answer_that_said_close(later: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with draining_frontend() as (frontend, mishaps), socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        frontend.scheduler.gate.clear()
        connection.sendall(post(BODY) + post(b"{}") + later)
        frontend.scheduler.wait_for(AddRequest)
        frontend.run(frontend.services.readiness.drain)
        frontend.scheduler.gate.set()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"503"]
    assert answer.count(b"connection: close") == 1
    assert (mishaps, caplog.records) == ([], [])


def test_who_is_refused_is_heard_out_for_a_moment_though_it_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 60.0)
    with draining_frontend() as (frontend, _), socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        frontend.scheduler.gate.clear()
        connection.sendall(post(BODY) + b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n" + VERSION)
        frontend.scheduler.wait_for(AddRequest)
        frontend.run(frontend.services.readiness.drain)
        frontend.scheduler.gate.set()
        assert b"HTTP/1.1 503 " in b"".join(iter(lambda: connection.recv(65536), b""))
        connection.sendall(post(BODY))
        assert is_held(connection.getsockname())


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in its turn", "ahead of its turn"])
@pytest.mark.parametrize("later", [b"", post(BODY)], ids=["nothing more", "another request"])
def test_who_is_refused_and_stays_is_dropped_after_a_moment(later: bytes, is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.05)
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 3600.0)
    with draining_frontend() as (frontend, _), socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        if is_ahead:
            frontend.scheduler.gate.clear()
            connection.sendall(post(BODY) + post(b"{}") + later)
            frontend.scheduler.wait_for(AddRequest)
        frontend.run(frontend.services.readiness.drain)
        frontend.scheduler.gate.set()
        if not is_ahead:
            connection.sendall(post(b"{}") + later)
        wait_for(lambda: not is_held(connection.getsockname()), DEADLINE_S, lambda: "the server still holds the connection")


@pytest.mark.parametrize("later", [b"\0garbage\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200], ids=["garbage", "headers"])
@pytest.mark.parametrize("refused", [post(b"{}"), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["a body", "no body"])
def test_what_follows_a_last_answer_is_not_answered(refused: bytes, later: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with draining_frontend() as (frontend, mishaps):
        frontend.run(frontend.services.readiness.drain)
        answer = exchange(frontend.port, refused + later)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"503"]
    assert (mishaps, caplog.records) == ([], [])


def test_requests_sent_ahead_without_end_close_the_connection(frontend: RunningFrontend) -> None:
    exchange(frontend.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
    assert frontend.client.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "rest", [b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n\r\n", b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nab"], ids=["lines", "body"]
)
def test_a_client_that_keeps_an_answered_connection_busy_is_dropped(rest: bytes, frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    assert exchange_slowly(frontend.port, rest, b"\n").count(b"HTTP/1.1 ") == 1


def test_a_client_that_takes_nothing_of_a_large_reply_is_dropped(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WRITE_TIMEOUT_S", 0.2)
    body = json.dumps({"tokens": [0] * 800_000}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", frontend.port))
        connection.sendall(b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        connection.recv(1)
        wait_for(lambda: not is_held(connection.getsockname()), DEADLINE_S, lambda: "the server still waits for a reader")


def test_garbage_after_a_request_does_not_get_into_its_response(frontend: RunningFrontend) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 100, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=DEADLINE_S) as connection:
        frontend.scheduler.gate.set()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        received = connection.recv(12)
        connection.sendall(b"\0garbage\r\n\r\n")
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
    assert received.count(b"HTTP/1.1 ") == 1
