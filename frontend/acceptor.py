"""Takes new connections from a listening socket, many in one turn of the event loop.

The event loop's own servers take one in a turn. When a crowd comes, or the processors are busy, turns are few, and
whoever has connected waits behind all others for the first sign of life. Here all that wait are taken, up to a number
that holds up nobody for long. Without descriptors a connection is closed at once, for nobody could serve it, and it
would keep the loop awake. Must not know what is said on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

from pagemill.messages import NONE
from pagemill.telemetry import get_logger

#: Connections that are taken in one turn.
MAX_A_TURN = 256
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = get_logger("frontend.acceptor")


class Acceptor:
    """Of one listening socket, in the running event loop, until it is closed; the socket is its owner's."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare = _open_spare()  #: a descriptor that is given up for a moment to get rid of a connection
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Takes no more. Those that were taken are served."""
        self._loop.remove_reader(self._listener.fileno())
        if self._spare != NONE:
            os.close(self._spare)

    async def wait_closed(self) -> None:
        """Until those that were taken have got their protocol."""
        await asyncio.gather(*self._tasks)

    def _accept(self) -> None:
        for _ in range(MAX_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return  # nobody waits any more, or a sibling was faster
            except OSError as error:  # of that connection, unless there is no descriptor left
                if error.errno in _EXHAUSTED:
                    self._turn_away()
                continue
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:  # it has gone already
            log.debug("connection_lost_at_once", error=type(error).__name__)
            connection.close()

    def _turn_away(self) -> None:
        """One connection that there is no descriptor for."""
        if self._spare != NONE:
            os.close(self._spare)
        with contextlib.suppress(OSError):  # nobody waits any more, or another thread was faster
            self._listener.accept()[0].close()
        self._spare = _open_spare()


def _open_spare() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return NONE
