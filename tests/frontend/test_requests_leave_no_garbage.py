"""However a request ends, nothing of it refers to itself: what a full look for garbage would have to find stays for minutes (`frontend.garbage`)."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.helpers.fake_scheduler import DEADLINE_S
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.server import wait_for

NUM_REQUESTS = 40
#: Objects of a request that is left behind are dozens.
FEW = NUM_REQUESTS // 2


class Ending(NamedTuple):
    """What is sent, and with what status it is answered; None: the client leaves when the answer has begun."""

    body: bytes
    status: bytes | None
    path: str = "/v1/completions"


ENDINGS = {
    "answered": Ending(b'{"prompt": "Hello", "max_tokens": 2}', b"200"),
    "streamed": Ending(b'{"prompt": "Hello", "max_tokens": 2, "stream": true}', b"200"),
    "invalid": Ending(b'{"prompt": 3.5}', b"400"),
    "no JSON": Ending(b"{", b"400"),
    "no route": Ending(b"{}", b"404", "/nowhere"),
    "left": Ending(b'{"prompt": "Hello", "max_tokens": 200, "stream": true}', None),
}


@pytest.fixture(scope="module")
def frontend() -> Iterator[RunningFrontend]:
    with running_frontend() as running:
        yield running


@pytest.fixture(scope="module")
def crowded() -> Iterator[RunningFrontend]:
    with running_frontend(max_num_queued=0) as running:
        running.run(running.services.overload.scheduler_lost)
        yield running


def ask(running: RunningFrontend, ending: Ending) -> None:
    """On a connection of its own, to its end."""
    closing = "" if ending.status is None else "Connection: close\r\n"
    head = f"POST {ending.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{closing}Content-Length: {len(ending.body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + ending.body)
        answer = connection.recv(100)
        assert ending.status is not None or answer.startswith(b"HTTP/1.1 200 ")
        if ending.status is not None:
            assert answer[9:12] == ending.status
            while connection.recv(65536):
                pass


def garbage_of(running: RunningFrontend, work: Callable[[], None]) -> int:
    """Objects that are found when all of it is over."""
    work()  # whatever is made once
    gc.collect()
    gc.disable()
    try:
        work()
        wait_for(lambda: running.services.ledger.num_in_flight == 0, DEADLINE_S, lambda: "some are still answered")
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ENDINGS)
def test_a_request_that_ends_leaves_no_garbage(name: str, frontend: RunningFrontend) -> None:
    def work() -> None:
        for _ in range(NUM_REQUESTS):
            ask(frontend, ENDINGS[name])

    assert garbage_of(frontend, work) < FEW


def test_a_refusal_for_the_head_leaves_no_garbage(crowded: RunningFrontend) -> None:
    def work() -> None:
        for _ in range(NUM_REQUESTS):
            ask(crowded, ENDINGS["answered"]._replace(status=b"429"))

    assert garbage_of(crowded, work) < FEW
