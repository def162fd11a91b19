"""The client of the load generators, against servers that close connections when it suits them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scripts.lib import http_load
from scripts.lib.http_load import BROKEN, Client, get

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"


class Listener:
    """Answers every request, or closes instead."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.answers = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n") and self.answers:
                writer.write(_ANSWER)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def client_of(listener: Listener) -> AsyncIterator[Client]:
    async with await asyncio.start_server(listener.serve, "127.0.0.1", 0) as server:
        with Client(*server.sockets[0].getsockname()[:2]) as client:
            yield client


def test_a_connection_is_used_again_unless_it_was_idle_for_so_long_that_the_server_may_be_closing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()

    async def run() -> list[int]:
        async with client_of(listener) as client:
            statuses = [(await client.ask(get("/"))).status for _ in range(3)]
            assert listener.num_connections == 1
            monkeypatch.setattr(http_load, "_MAX_IDLE_S", 0.0)
            return [*statuses, (await client.ask(get("/"))).status]

    assert asyncio.run(run()) == [200] * 4
    assert listener.num_connections == 2


def test_a_connection_that_broke_is_said_to_have_and_is_not_used_again() -> None:
    listener = Listener()

    async def run() -> None:
        async with client_of(listener) as client:
            listener.answers = False
            broken = await client.ask(get("/"))
            assert broken.status == BROKEN
            assert broken.tail.startswith(b"closed 0.")
            listener.answers = True
            assert (await client.ask(get("/"))).status == 200

    asyncio.run(run())
    assert listener.num_connections == 2
