"""The HTTP server: uvicorn with httptools on an inherited listening socket, and the guards that it lacks.

Guards: connections are bounded in number; the URL, header lines, their size and the time they take are bounded, and so is
the time in which a client takes or sends nothing at all; a malformed request is answered in the API's error shape; whoever
is still sending when the last answer is given is heard out for a moment, or it would lose the answer to a reset; a client
that leaves is noticed whatever it sent ahead; an offer to upgrade is passed over; the application can drop a connection
whose client does not read (`ABORT_EXTENSION`), and knows which is one too many (`SURPLUS_EXTENSION`). What it refuses for
the head of a request is answered while that is parsed, without a task. Signals are left to the launcher, proxies' headers
are not believed.
This module must not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.acceptor import Acceptor
from frontend.app import ABORT_EXTENSION, SURPLUS_EXTENSION, Refusal
from frontend.connection_limit import ConnectionLimit
from frontend.errors import ApiError, headers_too_large, malformed_request, too_many_connections, url_too_long
from frontend.watchdog import Watchdog

MAX_URL_BYTES = 8 * 1024
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADER_LINES = 100
HEADER_TIMEOUT_S = 30.0
#: A connection that is one too many has little time to say what it wants.
SURPLUS_TIMEOUT_S = 2.0
KEEP_ALIVE_TIMEOUT_S = 30
#: A client that reads nothing of what is ready for it is dropped after this time.
WRITE_TIMEOUT_S = 60.0
#: After a last answer, what a client still sends is read and thrown away for so long (see `_linger`).
LINGER_S = 2.0
#: Requests that may wait for their turn on one connection, and bytes behind them that are kept unparsed.
MAX_PIPELINED = 16
MAX_BACKLOG_BYTES = 256 * 1024
#: After everything has been ended, connections get this long to take their last bytes.
SHUTDOWN_TIMEOUT_S = 3

#: Judges a request by its head: what it is refused with, or None.
Judge = Callable[[Scope], Refusal | None]


def _nothing() -> None:
    """Takes the place of a callback that is not needed any more."""


class HttpServer(uvicorn.Server):
    """Serves until `should_exit` is set. What `judge` refuses never comes before the application."""

    def __init__(self, application: ASGIApp, max_connections: int, judge: Judge = lambda scope: None) -> None:
        self.limit = ConnectionLimit(max_connections)
        super().__init__(
            uvicorn.Config(
                application,
                http=functools.partial(GuardedProtocol, self.limit, judge),  # type: ignore[arg-type]  # it is only called
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts by itself: the event loop's own servers take one connection in a turn."""
        protocol_class: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        make_protocol = functools.partial(protocol_class, config=self.config, server_state=self.server_state, app_state={})
        self.servers = [Acceptor(listener, make_protocol, self._num_to_take) for listener in sockets or ()]  # type: ignore[misc]  # they are only closed
        self.started = True

    def _num_to_take(self) -> int:
        return self.limit.num_to_take(self.num_open_connections)

    @property
    def num_open_connections(self) -> int:
        return len(self.server_state.connections)

    @property
    def num_refused_connections(self) -> int:
        return self.limit.num_refused

    @property
    def has_unsent(self) -> bool:
        """Some client has not yet taken all that was written to it, be it by a response that has ended."""
        return any(connection.transport.get_write_buffer_size() for connection in self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Phase(enum.Enum):
    """What is being read from a connection. Each request leads from HEAD to BODY, an offer to upgrade once more by way of REPLAY; LINGER is the end."""

    HEAD = enum.auto()  #: of a request, be it begun or not
    BODY = enum.auto()  #: of a request whose head has been handled, be there one or not
    REPLAY = enum.auto()  #: a head that has been handled, which the parser needs once more
    LINGER = enum.auto()  #: nothing any more: the last answer has been given, though the client still sends


class _HeardOut:
    """The connection as an answer sees it: closed by the protocol, which hears a client out that is still sending."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class GuardedProtocol(HttpToolsProtocol):
    """One connection. An `ApiError` that is raised inside the parser makes it give up, and is the last answer."""

    _is_surplus = False
    _phase = Phase.HEAD
    _num_header_bytes = 0
    _num_header_lines = 0
    _has_refused = False  #: since something was last received
    _running: RequestResponseCycle | None = None
    _idle: Watchdog  #: of the time without a request
    _unread: Watchdog  #: of the time in which the client takes nothing

    def __init__(self, limit: ConnectionLimit, judge: Judge, **of_the_server: Any) -> None:
        super().__init__(**of_the_server)
        self._limit = limit
        self._judge = judge
        self._backlog = bytearray()  #: received while requests wait for their turn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle, self._unread = Watchdog(transport), Watchdog(transport)
        place = self._limit.place(len(self.connections))
        self._is_surplus = place == "surplus"
        if place == "beyond":
            self._write_error(too_many_connections())
            self.transport.close()
        else:
            self._idle.arm(self._header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.end()
        self._unread.end()
        # The base class would tell only the request that was parsed last, which may not be the one that runs.
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # the base class forgets it where the client broke off
        self.cycle = self._running = None  # type: ignore[assignment]  # they refer to this object as well

    # --- reading ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """While requests wait for their turn, what follows them waits unparsed. It is read all the same: who does not read does not see the client leave."""
        if self._phase is Phase.LINGER:
            return
        if self.pipeline:
            self._backlog += data
            if len(self._backlog) > MAX_BACKLOG_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._has_refused = False
        unfinished_bytes = len(data) if self._phase is Phase.HEAD else 0
        self._parse(data)
        if self._phase is Phase.HEAD:
            self._num_header_bytes += unfinished_bytes
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._give_up(headers_too_large(MAX_HEADER_LINES, MAX_HEADER_BYTES))
        if self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()
            self._idle.disarm()  # headers begun ahead of their turn are not late

    def _parse(self, data: bytes) -> None:
        """The parser stops where another protocol would begin after an `Upgrade`. None is offered here, so HTTP goes on."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if self._is_over:
                    return
                data = data[stop.args[0] :]
                self._resume_http()
            except httptools.HttpParserError as error:
                self._give_up(error.__context__)
                return

    def _resume_http(self) -> None:
        """The parser has skipped the body of the request. A new one is told how the body is framed, and reads it."""
        framing = self._framing_of_upgrade()
        if not framing:
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._phase = Phase.REPLAY
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % header for header in framing) + b"\r\n")
        self._phase = Phase.BODY

    def _framing_of_upgrade(self) -> list[tuple[bytes, bytes]]:
        """The headers that announce a body of a request which offers to upgrade; nothing for other requests."""
        if not self.parser.should_upgrade():
            return []
        return [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]

    # --- the parser's callbacks ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._phase is Phase.REPLAY:
            return
        if self._is_over:
            raise malformed_request()  # nobody hears it: nothing is begun after the last answer
        super().on_message_begin()
        self._num_header_bytes = self._num_header_lines = 0
        self._phase = Phase.HEAD
        self._idle.arm(self._header_timeout_s)
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort, SURPLUS_EXTENSION: self._is_surplus}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """Called for each part that arrives."""
        if self._phase is Phase.REPLAY:
            return
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise url_too_long(MAX_URL_BYTES)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for trailers as well."""
        if self._phase is Phase.REPLAY:
            return
        self._num_header_lines += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_lines > MAX_HEADER_LINES or self._num_header_bytes > MAX_HEADER_BYTES:
            raise headers_too_large(MAX_HEADER_LINES, MAX_HEADER_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._phase is Phase.REPLAY:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise malformed_request()
        self._phase = Phase.BODY
        self._idle.disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._framing_of_upgrade():
            super().on_message_complete()

    # --- writing ------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._is_over:
            return  # the answer to a request before it was the last
        cycle.keep_alive = cycle.keep_alive and not self._is_surplus
        self._running = cycle
        refusal = self._refusal(cycle)
        if refusal is None:
            cycle.transport = _HeardOut(self.transport, self._end)  # type: ignore[assignment]  # no more of it is used
            super()._start_asgi_task(cycle, app)
            return
        cycle.response_started = cycle.response_complete = True
        cycle.keep_alive = cycle.keep_alive and refusal.error.headers.get("Connection") != "close"
        self._write_error(refusal.error, keep_alive=cycle.keep_alive, request_id=refusal.request_id)
        if cycle.keep_alive:
            self.on_response_complete()
        elif self.pipeline or self._backlog or _announces_body(cycle):
            self._linger()
        else:
            self.transport.close()
            self._idle.arm(HEADER_TIMEOUT_S)  # for a client that does not take the answer
        cycle.on_response = _nothing  # as at the end of a task: the two would refer to each other for good

    def _end(self) -> None:
        """After the last answer, or in the middle of one that failed."""
        if self._is_over:
            return
        if self._running is not None and self._running.more_body and _announces_body(self._running):
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Says that this was all, and throws away what comes for a moment: a client that is still sending would lose the answer to a reset."""
        self._phase = Phase.LINGER
        self.pipeline.clear()
        self._backlog.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._idle.arm(LINGER_S)

    def _refusal(self, cycle: RequestResponseCycle) -> Refusal | None:
        """What the request is refused with at once, or None. Only one request of what was received last, and only if the client reads its
        answers: others are refused by a task, in their turn, so that a pipeline of them neither holds up others nor fills the write buffer."""
        if self._has_refused or self.flow.write_paused:
            return None
        refusal = self._judge(cycle.scope)  # type: ignore[arg-type]  # two names for one type
        self._has_refused = refusal is not None
        return refusal

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is Phase.LINGER:
            return
        if self.cycle.response_complete:
            self._idle.arm(HEADER_TIMEOUT_S)  # also for a body that nobody wanted to read, and which may never end
        if self._backlog and not self.pipeline and not self.transport.is_closing():
            backlog = bytes(self._backlog)
            self._backlog.clear()
            self.data_received(backlog)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.arm(WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        self._unread.disarm()
        super().resume_writing()

    def _give_up(self, cause: BaseException | None) -> None:
        """Answers what cannot be parsed any further, but only where no other response is being written, and none was the last."""
        if self._is_over:
            return
        running, error = self._running, cause if isinstance(cause, ApiError) else malformed_request()
        if running is None or running.response_complete:
            self._write_error(error)
            self._linger()
            return
        if not running.response_started:
            self._write_error(error)
        self.transport.close()

    def _write_error(self, error: ApiError, *, keep_alive: bool = False, request_id: str = "") -> None:
        """An answer to what has not become a request of the application's."""
        body = error.body
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        headers |= {} if keep_alive else {"Connection": "close"}
        headers |= {"X-Request-Id": request_id} if request_id else {}
        head = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
        date = b"".join(b"%s: %s\r\n" % header for header in self.server_state.default_headers)
        self.transport.write(STATUS_LINE[error.status] + date + head.encode() + b"\r\n" + body)

    @property
    def _is_over(self) -> bool:
        """No request is begun any more, and nothing answered."""
        return self._phase is Phase.LINGER or self.transport.is_closing()

    @property
    def _header_timeout_s(self) -> float:
        return SURPLUS_TIMEOUT_S if self._is_surplus else HEADER_TIMEOUT_S


def _announces_body(cycle: RequestResponseCycle) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in cycle.scope["headers"])
