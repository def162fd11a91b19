"""New connections: many in one turn of the event loop, but not all; none left waiting when they cannot be had."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import cast

import pytest
import uvloop

from frontend import acceptor
from frontend.acceptor import MAX_A_TURN, Acceptor
from pagemill.ids import NONE
from tests.helpers.fake_scheduler import DEADLINE_S


class Served(asyncio.Protocol):
    """Counts those that are connected."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).made += 1
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data.upper())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    Served.made = 0
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        yield listening


def connect(listener: socket.socket, stack: ExitStack, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)) for _ in range(count)]


async def until(condition: Callable[[], bool]) -> int:
    """Turns of the event loop until it holds."""
    turns = 0
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)
            turns += 1
    return turns


def run(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def test_a_crowd_is_taken_in_a_few_turns_and_never_all_in_one(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_A_TURN", 50)

    async def serve() -> None:
        with ExitStack() as stack:
            connect(listener, stack, 200)
            taking = Acceptor(listener, Served)
            most, before = 0, 0

            def all_made() -> bool:
                nonlocal most, before
                most, before = max(most, Served.made - before), Served.made
                return Served.made == 200

            assert await until(all_made) < 20
            assert 0 < most <= 50
            taking.close()
            await taking.wait_closed()

    run(serve())
    assert MAX_A_TURN >= 128


def test_who_was_taken_is_served_and_after_the_end_nobody_is_taken(listener: socket.socket) -> None:
    async def serve() -> None:
        with ExitStack() as stack:
            taking = Acceptor(listener, Served)
            (first,) = connect(listener, stack, 1)
            await until(lambda: Served.made == 1)
            taking.close()
            await taking.wait_closed()
            first.sendall(b"hello")
            assert await asyncio.to_thread(first.recv, 100) == b"HELLO"
            connect(listener, stack, 1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert Served.made == 1

    run(serve())


class Refusing:
    """A listening socket on which `accept` fails in given ways before it works; 0 is no failure."""

    def __init__(self, real: socket.socket, failures: list[int]) -> None:
        self._real, self.failures = real, failures

    def accept(self) -> tuple[socket.socket, object]:
        failure = self.failures.pop(0) if self.failures else 0
        if failure:
            raise OSError(failure, "cannot")
        return self._real.accept()

    def fileno(self) -> int:
        return self._real.fileno()

    def setblocking(self, flag: bool) -> None:
        self._real.setblocking(flag)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_that_is_gone_already_does_not_keep_the_next_from_being_taken(listener: socket.socket) -> None:
    async def serve() -> None:
        with ExitStack() as stack:
            connect(listener, stack, 2)
            refusing = Refusing(listener, [errno.ECONNABORTED, errno.EPROTO])
            taking = Acceptor(refusing, Served)  # type: ignore[arg-type]  # it is used as one
            await until(lambda: Served.made == 2)
            taking.close()

    run(serve())


@pytest.mark.parametrize("failure", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_one_is_turned_away_for_each_that_cannot_be_taken(failure: int, listener: socket.socket) -> None:
    async def serve() -> None:
        with ExitStack() as stack:
            clients = connect(listener, stack, 5)
            taking = Acceptor(Refusing(listener, [failure, 0] * 3), Served)  # type: ignore[arg-type]
            await until(lambda: Served.made == 2)
            assert [client.recv(1) for client in clients[:3]] == [b""] * 3
            clients[4].sendall(b"hello")
            assert await asyncio.to_thread(clients[4].recv, 100) == b"HELLO"
            taking.close()

    run(serve())


def test_where_none_can_be_taken_nor_turned_away_the_loop_does_not_spin(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)

    async def serve() -> None:
        with ExitStack() as stack:
            connect(listener, stack, 1)
            refusing = Refusing(listener, [errno.ENOMEM] * 5)
            taking = Acceptor(refusing, Served)  # type: ignore[arg-type]
            monkeypatch.setattr(Acceptor, "_turn_away", lambda self: False)
            await until(lambda: len(refusing.failures) < 5)
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(refusing.failures) == 4, "it rests after the first"
            await until(lambda: Served.made == 1)
            taking.close()

    run(serve())


def test_no_more_are_taken_in_a_turn_than_there_are_descriptors_for(listener: socket.socket) -> None:
    async def serve() -> None:
        with ExitStack() as stack:
            connect(listener, stack, 20)
            taking = Acceptor(listener, Served, lambda: 4)
            await until(lambda: Served.made > 0)
            assert Served.made <= 8
            await until(lambda: Served.made == 20)
            taking.close()

    run(serve())


def test_where_the_spare_descriptor_is_lost_it_goes_on_without(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        with ExitStack() as stack:
            connect(listener, stack, 4)
            taking = Acceptor(Refusing(listener, [errno.EMFILE, 0] * 2), Served)  # type: ignore[arg-type]
            monkeypatch.setattr(acceptor, "_open_spare", lambda: NONE)
            await until(lambda: Served.made == 3)
            before = num_descriptors()
            taking.close()
            assert num_descriptors() == before  # nobody else's descriptor is closed in its place

    run(serve())
