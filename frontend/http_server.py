"""The HTTP server: uvicorn with httptools on an inherited listening socket, and the guards that it lacks.

Guards: connections are bounded in number; header lines, their size and the time they take are bounded, and so is the time
in which a client takes or sends nothing at all; a malformed request is answered in the API's error shape; a client that
leaves is noticed whatever it sent ahead; an offer to upgrade is passed over; the application can drop a connection whose
client does not read (`ABORT_EXTENSION`), and knows which is one too many (`SURPLUS_EXTENSION`). What it refuses for the
head of a request is answered while that is parsed, without a task. Signals are left to the launcher, proxies' headers are
not believed.
This module must not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from frontend.errors import ApiError, too_many_connections
from frontend.watchdog import Watchdog

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
MAX_BACKLOG_BYTES = 1024 * 1024
#: After everything has been ended, connections get this long to take their last bytes.
SHUTDOWN_TIMEOUT_S = 3

_MALFORMED = ApiError(400, "malformed_request", "This is not a valid HTTP request.")
_TOO_LARGE = ApiError(431, "headers_too_large", f"The request has more than {MAX_HEADER_LINES} header lines or {MAX_HEADER_BYTES} bytes of them.")

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HeadersTooLargeError(Exception):
    """Raised inside the parser, which then gives up."""


class TooManyPipelinedError(Exception):
    """Raised inside the parser, which then gives up."""


class ConnectionOverError(Exception):
    """Raised inside the parser, which then gives up: nothing is begun after the last answer."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    _is_surplus = False
    _num_header_bytes = 0
    _num_header_lines = 0
    _reading_headers = True
    _headers_too_large = False
    _replaying = False  #: a head that has been handled is parsed once more
    _is_lingering = False  #: the last answer has been given, though the client still sends
    _has_refused = False  #: since something was last received
    _running: RequestResponseCycle | None = None
    _backlog = b""
    _idle: Watchdog  #: of the time without a request
    _unread: Watchdog  #: of the time in which the client takes nothing

    def __init__(self, limit: ConnectionLimit, judge: Judge, **of_the_server: Any) -> None:
        super().__init__(**of_the_server)
        self._limit = limit
        self._judge = judge

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

    # --- reading ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """While requests wait for their turn, what follows them waits unparsed. It is read all the same: who does not read does not see the client leave."""
        if self._is_lingering:
            return
        if self.pipeline:
            self._backlog += data
            if len(self._backlog) > MAX_BACKLOG_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._has_refused = False
        unfinished_bytes = len(data) if self._reading_headers else 0
        self._parse(data)
        self._num_header_bytes += unfinished_bytes if self._reading_headers else 0
        if self._num_header_bytes > MAX_HEADER_BYTES and self._reading_headers and not self.transport.is_closing():
            self._headers_too_large = True
            self.send_400_response("")
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
                data = data[stop.args[0] :]
                self._resume_http()
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _resume_http(self) -> None:
        """The parser has skipped the body of the request. A new one is told how the body is framed, and reads it."""
        framing = self._framing_of_upgrade()
        if not framing:
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % header for header in framing) + b"\r\n")
        self._replaying = False

    def _framing_of_upgrade(self) -> list[tuple[bytes, bytes]]:
        """The headers that announce a body of a request which offers to upgrade; nothing for other requests."""
        if not self.parser.should_upgrade():
            return []
        return [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]

    # --- the parser's callbacks ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        if self._is_over:
            raise ConnectionOverError
        super().on_message_begin()
        self._num_header_bytes = self._num_header_lines = 0
        self._reading_headers = True
        self._idle.arm(self._header_timeout_s)
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort, SURPLUS_EXTENSION: self._is_surplus}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for trailers as well."""
        if self._replaying:
            return
        self._num_header_lines += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_lines > MAX_HEADER_LINES or self._num_header_bytes > MAX_HEADER_BYTES:
            self._headers_too_large = True
            raise HeadersTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise TooManyPipelinedError
        self._reading_headers = False
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

    def _linger(self) -> None:
        """Says that this was all, and throws away what comes for a moment: a client that is still sending would lose the answer to a reset."""
        self._is_lingering = True
        self.pipeline.clear()
        self._backlog = b""
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
        if self._is_lingering:
            return
        if self.cycle.response_complete:
            self._idle.arm(HEADER_TIMEOUT_S)  # also for a body that nobody wanted to read, and which may never end
        if self._backlog and not self.pipeline and not self.transport.is_closing():
            backlog, self._backlog = self._backlog, b""
            self.data_received(backlog)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.arm(WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        self._unread.disarm()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Written only where no other response is being written, and none was the last."""
        if self._is_over:
            return
        if self._running is None or self._running.response_complete or not self._running.response_started:
            self._write_error(_TOO_LARGE if self._headers_too_large else _MALFORMED)
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
        return self._is_lingering or self.transport.is_closing()

    @property
    def _header_timeout_s(self) -> float:
        return SURPLUS_TIMEOUT_S if self._is_surplus else HEADER_TIMEOUT_S


def _announces_body(cycle: RequestResponseCycle) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in cycle.scope["headers"])
