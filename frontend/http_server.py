"""The HTTP server: uvicorn with httptools on an inherited listening socket, and the guards that it lacks.

Guards: header lines, their size and the time they take are bounded; a malformed request is answered in the API's error
shape; the application can drop a connection whose client does not read (`ABORT_EXTENSION`). Signals are left to the
launcher, proxies' headers are not believed.
This module must not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from frontend.app import ABORT_EXTENSION
from frontend.errors import ApiError

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADER_LINES = 100
HEADER_TIMEOUT_S = 30.0
KEEP_ALIVE_TIMEOUT_S = 30
#: After everything has been ended, connections get this long to take their last bytes.
SHUTDOWN_TIMEOUT_S = 3

_MALFORMED = ApiError(400, "malformed_request", "This is not a valid HTTP request.")
_TOO_LARGE = ApiError(431, "headers_too_large", f"The request has more than {MAX_HEADER_LINES} header lines or {MAX_HEADER_BYTES} bytes of them.")


class HttpServer(uvicorn.Server):
    """Serves until `should_exit` is set."""

    def __init__(self, application: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                http=GuardedProtocol,
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HeadersTooLargeError(Exception):
    """Raised inside the parser, which then gives up."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    _num_header_bytes = 0
    _num_header_lines = 0
    _reading_headers = True
    _headers_too_large = False
    _header_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_header_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_header_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        unfinished_bytes = len(data) if self._reading_headers else 0
        super().data_received(data)
        self._num_header_bytes += unfinished_bytes if self._reading_headers else 0
        if self._num_header_bytes > MAX_HEADER_BYTES and self._reading_headers and not self.transport.is_closing():
            self._headers_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_header_lines = 0
        self._reading_headers = True
        self._arm_header_deadline()
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for trailers as well."""
        self._num_header_lines += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_lines > MAX_HEADER_LINES or self._num_header_bytes > MAX_HEADER_BYTES:
            self._headers_too_large = True
            raise HeadersTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        self._disarm_header_deadline()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        error = _TOO_LARGE if self._headers_too_large else _MALFORMED
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(error.body)
        self.transport.write(STATUS_LINE[error.status] + head + error.body)
        self.transport.close()

    def _arm_header_deadline(self) -> None:
        self._disarm_header_deadline()
        self._header_deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _disarm_header_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
