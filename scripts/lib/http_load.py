"""A client that costs little: HTTP/1.1 on raw sockets in one event loop, for thousands of requests a second.

It understands what this server answers and no more: a status line, headers, a body of known length or in chunks. One
request at a time on a connection, connections are kept. Must not know what is asked, nor what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import cast

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 4096
_LONGEST_TEXT = 1 << 24
#: A connection that was idle for longer is not used again: the server may be closing it, which it does after 30 s.
_MAX_IDLE_S = 20.0
#: The status of an answer that never came whole.
BROKEN = 0


@dataclass
class Answer:
    """What came of one request. Times are `time.perf_counter()`; latency counts from when it was due, not from when it left."""

    due: float
    status: int = BROKEN
    retry_after: str = ""
    first_at: float = 0.0  #: when the first byte came
    ended_at: float = 0.0
    num_bytes: int = 0  #: of the body, chunk sizes included
    tail: bytes = b""  #: the end of the body; all of a short one. What became of the connection, if it broke

    @property
    def latency_s(self) -> float:
        return self.ended_at - self.due


class Connection(asyncio.Protocol):
    """One connection. `is_open` is False once the server has closed it."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since = 0.0  #: by `time.perf_counter()`, since it was made or answered
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = b""
        self._length: int | None = None  #: of the body; None: in chunks
        self._keeps = True
        self._tail_bytes = _TAIL_BYTES
        self._on_start: Callable[[], object] = lambda: None

    @staticmethod
    async def open(host: str, port: int) -> Connection:
        """Raises OSError."""
        _, protocol = await asyncio.get_running_loop().create_connection(Connection, host, port)
        return protocol

    def ask(
        self, request: bytes, due: float | None = None, on_start: Callable[[], object] = lambda: None, tail_bytes: int = _TAIL_BYTES
    ) -> asyncio.Future[Answer]:
        """Sends a request, now. The future never fails: what breaks is in the answer. `on_start` is called when a status has come."""
        self._sent_at = time.perf_counter()
        self._answer = Answer(self._sent_at if due is None else due)
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._on_start, self._tail_bytes = b"", on_start, tail_bytes
        done = self._done
        if self._transport is None or not self.is_open:
            self._finish(BROKEN)
        else:
            self._transport.write(request)
        return done

    @property
    def is_usable(self) -> bool:
        return self.is_open and time.perf_counter() - self.idle_since < _MAX_IDLE_S

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        self.idle_since = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None:
            seconds = time.perf_counter() - self._sent_at
            self._answer.tail = f"{exc or 'closed'} {seconds:.3f} s after it was sent; idle before for {self._sent_at - self.idle_since:.3f} s".encode()
        self._finish(BROKEN)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.first_at == 0.0:
            answer.first_at = time.perf_counter()
        if answer.status == BROKEN:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(answer, head)
            self._on_start()
        answer.num_bytes += len(data)
        answer.tail = (answer.tail + data)[-self._tail_bytes :]
        if answer.num_bytes >= self._length if self._length is not None else (b"\r\n" + answer.tail).endswith(_END_OF_CHUNKS):
            self._finish(answer.status)
            if not self._keeps:
                self.is_open = False
                self.close()

    def _read_head(self, answer: Answer, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        answer.status = int(first[9:12])
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        answer.retry_after = headers.get(b"retry-after", b"").decode()
        self._keeps = headers.get(b"connection") != b"close"
        self._length = None if headers.get(b"transfer-encoding") == b"chunked" else int(headers.get(b"content-length", b"0"))

    def _finish(self, status: int) -> None:
        answer, done = self._answer, self._done
        self._answer = self._done = None
        if answer is None or done is None or done.done():
            return
        answer.status, answer.ended_at = status, time.perf_counter()
        self.idle_since = answer.ended_at
        done.set_result(answer)


class Client:
    """Connections to one server; as many as there are requests at once. Used with `with`, in an event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for connection in self._all:
            connection.close()

    async def connect(self, count: int) -> None:
        """Opens connections ahead of their use."""
        self._idle += [await self._open() for _ in range(count)]

    async def ask(self, request: bytes, due: float | None = None, on_start: Callable[[], object] = lambda: None, tail_bytes: int = _TAIL_BYTES) -> Answer:
        """One request on a connection that is idle, or on a new one. Never raises for what the server does."""
        due = time.perf_counter() if due is None else due
        while self._idle and not self._idle[-1].is_usable:
            self._discard(self._idle.pop())
        try:
            connection = self._idle.pop() if self._idle else await self._open()
        except OSError:
            return Answer(due, ended_at=time.perf_counter())
        answer = await connection.ask(request, due, on_start, tail_bytes)
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._discard(connection)
        return answer

    async def text(self, path: str) -> str:
        """What a GET yields. Raises RuntimeError if it is no 200."""
        answer = await self.ask(get(path), tail_bytes=_LONGEST_TEXT)
        if answer.status != 200:
            raise RuntimeError(f"{path} answers {answer.status}")
        return answer.tail.decode()

    async def ask_and_leave(self, request: bytes, after_s: float) -> Answer:
        """One request on a connection of its own, which is closed so long after the answer has begun, or could have."""
        try:
            connection = await self._open()
        except OSError:
            return Answer(time.perf_counter())
        begun = asyncio.Event()
        answer = connection.ask(request, on_start=begun.set)
        try:
            async with asyncio.timeout(after_s):
                await begun.wait()
            async with asyncio.timeout(after_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            return Answer(time.perf_counter())
        finally:
            self._discard(connection)

    def drop_all(self) -> None:
        """Closes every connection, whatever waits on it."""
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def _open(self) -> Connection:
        connection = await Connection.open(self._host, self._port)
        self._all.add(connection)
        return connection

    def _discard(self, connection: Connection) -> None:
        connection.close()
        self._all.discard(connection)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def post(path: str, body: Mapping[str, object] | bytes) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
