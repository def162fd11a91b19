"""More connections than a server holds, and more than it has descriptors for."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from frontend import http_server
from frontend.connection_limit import NUM_SURPLUS, RESERVED_DESCRIPTORS, ConnectionLimit, raise_descriptor_limit
from tests.helpers.fake_scheduler import DEADLINE_S
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.server import wait_for

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
MAX_CONNECTIONS = 3


@pytest.fixture
def small() -> Iterator[RunningFrontend]:
    with running_frontend(max_connections=MAX_CONNECTIONS) as frontend:
        frontend.client.close()  # it would hold one,
        wait_for(lambda: not held_by_the_server(frontend), DEADLINE_S, lambda: "the client is still connected")  # and does until that is noticed
        yield frontend


def connect(port: int, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))


def ask(connection: socket.socket, request: bytes = b"") -> bytes:
    """What the server says until it closes, or until nothing more comes at once."""
    received = b""
    try:
        connection.sendall(request)
        while piece := connection.recv(65536):
            received += piece
            if request == LIVEZ and received.endswith(b"}"):
                break
    except (BrokenPipeError, ConnectionResetError):
        pass
    return received


def held_by_the_server(frontend: RunningFrontend) -> int:
    """How many connections this process, where the frontend runs, has accepted and not closed."""
    return sum(held.laddr.port == frontend.port and held.status in ("ESTABLISHED", "CLOSE_WAIT") for held in psutil.Process().net_connections("tcp"))


def fill(frontend: RunningFrontend, stack: ExitStack, count: int) -> list[socket.socket]:
    """That many connections, all accepted."""
    opened = [connect(frontend.port, stack) for _ in range(count)]
    wait_for(lambda: held_by_the_server(frontend) >= count, DEADLINE_S, lambda: f"{held_by_the_server(frontend)} of {count} connections are held")
    return opened


def test_as_many_as_allowed_are_served_and_stay_open(small: RunningFrontend) -> None:
    with ExitStack() as stack:
        for connection in fill(small, stack, MAX_CONNECTIONS):
            assert ask(connection, LIVEZ).startswith(b"HTTP/1.1 200 ")
            assert ask(connection, LIVEZ).startswith(b"HTTP/1.1 200 ")


def test_one_too_many_may_probe_once_and_nothing_else(small: RunningFrontend) -> None:
    with ExitStack() as stack:
        fill(small, stack, MAX_CONNECTIONS)
        probe = connect(small.port, stack)
        answer = ask(probe, LIVEZ)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        refused = ask(connect(small.port, stack), MODELS)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert b"too many open connections" in refused


def test_those_beyond_hear_so_at_once_and_the_next_are_welcome_when_others_have_left(small: RunningFrontend) -> None:
    with ExitStack() as stack:
        fill(small, stack, MAX_CONNECTIONS + NUM_SURPLUS)
        refused = ask(connect(small.port, stack))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert b'"code":"unavailable"' in refused
    with ExitStack() as stack:
        wait_for(lambda: ask(connect(small.port, stack), LIVEZ).count(b"connection: close") == 0, DEADLINE_S, lambda: "the server is still full")


def test_connections_are_counted_open_or_refused() -> None:
    with running_frontend(max_connections=MAX_CONNECTIONS) as frontend, ExitStack() as stack:

        def counts() -> list[float]:
            lines = frontend.client.get("/metrics").text.splitlines()
            return [float(line.split()[1]) for name in ("open", "refused_total") for line in lines if line.startswith(f"pagemill_connections_{name} ")]

        assert counts() == [1, 0], "the one that asks"
        fill(frontend, stack, MAX_CONNECTIONS - 1 + NUM_SURPLUS)
        for _ in range(2):
            assert ask(connect(frontend.port, stack)).startswith(b"HTTP/1.1 503 ")
        wait_for(lambda: counts()[1] == 2, DEADLINE_S, lambda: f"{counts()}")
        stack.close()
        wait_for(lambda: counts() == [1, 2], DEADLINE_S, lambda: f"{counts()}")


def test_one_too_many_that_says_nothing_is_dropped_soon(small: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SURPLUS_TIMEOUT_S", 0.05)
    with ExitStack() as stack:
        fill(small, stack, MAX_CONNECTIONS)
        assert ask(connect(small.port, stack)) == b""


def test_the_limit_leaves_descriptors_for_what_is_no_connection() -> None:
    script = textwrap.dedent("""
        import resource
        from frontend.connection_limit import NUM_SURPLUS, RESERVED_DESCRIPTORS, ConnectionLimit, raise_descriptor_limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, 256))
        assert ConnectionLimit(1000).maximum == 160 - RESERVED_DESCRIPTORS - NUM_SURPLUS
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
        limit = ConnectionLimit(1000)
        assert limit.maximum == 256 - RESERVED_DESCRIPTORS - NUM_SURPLUS
        assert limit.num_to_take(0) == (256 - RESERVED_DESCRIPTORS) // 3
        assert limit.num_to_take(256 - RESERVED_DESCRIPTORS) == 8
        limit.maximum = 7
        assert limit.maximum == 7
    """)
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_limit_that_is_as_high_as_it_can_be_is_left_alone() -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_places_are_counted_from_the_first_connection() -> None:
    limit = ConnectionLimit(2)
    assert [limit.place(count) for count in (1, 2, 3, 2 + NUM_SURPLUS, 3 + NUM_SURPLUS)] == ["within", "within", "surplus", "surplus", "beyond"]
    assert limit.num_refused == 1


#: Serves with 256 descriptors, and is busy for a moment when asked to, so that connections pile up before it.
STARVED = """
import asyncio, resource, socket, time, uvloop
from frontend.http_server import HttpServer
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

async def application(scope, receive, send):
    if scope["path"] == "/busy":
        time.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(listener.getsockname()[1], flush=True)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(HttpServer(application, 1000).serve(sockets=[listener]))
"""


@pytest.mark.parametrize("first", [b"/livez", b"/busy"], ids=["one by one", "all at once"])
def test_without_descriptors_connections_are_shed_and_the_server_goes_on(first: bytes) -> None:
    with subprocess.Popen([sys.executable, "-c", STARVED], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        canary = connect(port, stack)
        canary.sendall(LIVEZ.replace(b"/livez", first))
        crowd = [connect(port, stack) for _ in range(500)]
        assert whole_answer(canary).startswith(b"HTTP/1.1 200 ")
        answers = [ask_once(connection) for connection in crowd]
        assert answers.count("200") >= 256 - RESERVED_DESCRIPTORS - NUM_SURPLUS - 1
        assert answers.count("200") <= 256
        assert set(answers) <= {"200", "503", "closed"}
        spent = process_seconds(process.pid)
        canary.settimeout(0.5)
        with pytest.raises(TimeoutError):
            canary.recv(1)  # nothing is due, so nothing is to be done: the server does not spin
        assert process_seconds(process.pid) - spent < 0.2
        canary.settimeout(DEADLINE_S)
        canary.sendall(LIVEZ)
        assert whole_answer(canary).startswith(b"HTTP/1.1 200 ")
        for connection in crowd:
            connection.close()
        wait_for(lambda: ask_once(connect(port, stack)) == "200", DEADLINE_S, lambda: "nobody is served any more")


def whole_answer(connection: socket.socket) -> bytes:
    """Head and body of the starved server's answer, which may arrive one by one."""
    answer = b""
    while not answer.endswith(b"ok"):
        piece = connection.recv(65536)
        assert piece, "the server hung up"
        answer += piece
    return answer


def ask_once(connection: socket.socket) -> str:
    """The status of an answer, or `closed`."""
    try:
        connection.sendall(LIVEZ)
        return connection.recv(65536)[9:12].decode() or "closed"
    except (BrokenPipeError, ConnectionResetError):
        return "closed"


def process_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
