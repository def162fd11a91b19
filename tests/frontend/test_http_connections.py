"""Connections of a server in the test's own event loop: how they are taken, what waits in them, what they leave behind."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, TypeVar

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend import http_server
from tests.helpers.fake_scheduler import DEADLINE_S

Result = TypeVar("Result")


@asynccontextmanager
async def bare_server(application: ASGIApp) -> AsyncIterator[tuple[http_server.HttpServer, tuple[str, int]]]:
    """In this event loop, with its address."""
    server = http_server.HttpServer(application, max_connections=1000)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield server, listener.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def never_answers(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, DEADLINE_S))


async def the_connection_of(server: http_server.HttpServer, condition: Callable[[http_server.GuardedProtocol], bool]) -> http_server.GuardedProtocol:
    """The only one, once the condition holds."""
    while True:
        for protocol in server.server_state.connections:
            assert isinstance(protocol, http_server.GuardedProtocol)
            if condition(protocol):
                return protocol
        await asyncio.sleep(0)


def test_connections_that_wait_together_are_not_accepted_one_by_one() -> None:
    async def turns_for(num_connections: int) -> int:
        async with bare_server(never_answers) as (server, address):
            clients = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(num_connections)]
            turns = 0
            while len(server.server_state.connections) < num_connections:
                await asyncio.sleep(0)
                turns += 1
            for client in clients:
                client.close()
            return turns

    assert run(turns_for(200)) < 6


def test_what_waits_behind_a_request_costs_as_little_at_the_end_as_at_first() -> None:
    """Kept as one string that grows, each part would cost a copy of all before it."""

    async def seconds_of_each_part() -> list[float]:
        async with bare_server(never_answers) as (server, address):
            with socket.create_connection(address, timeout=DEADLINE_S) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
                protocol = await the_connection_of(server, lambda protocol: bool(protocol.pipeline))
                times = [time.process_time()]
                for _ in range(32):
                    for _ in range(http_server.MAX_BACKLOG_BYTES // 32):
                        protocol.data_received(b"x")
                    times.append(time.process_time())
                return [after - before for before, after in pairwise(times)]

    seconds = run(seconds_of_each_part())
    assert min(seconds[-4:]) < 4 * max(seconds[:2])  # copies would take ten times as long


def test_what_a_client_has_not_taken_is_unsent_though_its_response_has_ended() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (1 << 24))]})
        await send({"type": "http.response.body", "body": bytes(1 << 24)})

    async def read_late() -> list[bool]:
        async with bare_server(answers) as (server, address):
            reader, writer = await asyncio.open_connection(*address)
            seen = [server.has_unsent]
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await the_connection_of(server, lambda protocol: protocol.cycle is not None and protocol.cycle.response_complete)
            seen.append(server.has_unsent)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1 << 24)
            while server.has_unsent:
                await asyncio.sleep(0)
            writer.close()
            return seen

    assert run(read_late()) == [False, True]


def test_of_a_connection_that_its_client_broke_off_no_timer_is_left() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def break_off() -> http_server.GuardedProtocol:
        async with bare_server(answers) as (server, address):
            with socket.create_connection(address, timeout=DEADLINE_S) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                protocol = await the_connection_of(server, lambda protocol: protocol.timeout_keep_alive_task is not None)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to close is to reset
            while server.server_state.connections:
                await asyncio.sleep(0)
            return protocol

    assert run(break_off()).timeout_keep_alive_task is None
