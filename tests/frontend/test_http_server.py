"""The HTTP server's guards: malformed requests, floods of headers, slow headers, framing, pipelining."""

from __future__ import annotations

import json
import socket

import pytest

from frontend import http_server
from tests.helpers.fake_scheduler import DEADLINE_S
from tests.helpers.frontend_server import RunningFrontend

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


def test_a_long_path_without_end_is_refused(frontend: RunningFrontend) -> None:
    assert exchange(frontend.port, b"GET /" + b"a" * 100_000).startswith(b"HTTP/1.1 431 ")


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


def test_chunks_without_end_are_refused_when_they_are_too_many(frontend: RunningFrontend) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(frontend.port, head, *([b"10000\r\n" + b" " * 65536 + b"\r\n"] * 140))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")
    assert frontend.client.get("/livez").status_code == 200


def test_requests_on_one_connection_are_answered_in_order(frontend: RunningFrontend) -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    answer = exchange(frontend.port, post + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.index(b"text_completion") < answer.index(b'"version"')
