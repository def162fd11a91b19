"""Takes new connections from a listening socket, many in one turn of the event loop.

The event loop's own servers take one in a turn. When a crowd comes, or the processors are busy, turns are few, and
whoever has connected waits behind all others for the first sign of life. Here all that wait are taken, up to a number
that holds up nobody for long. Without descriptors a connection is closed at once, for nobody could serve it, and it
would keep the loop awake. Must not know what is said on a connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from pagemill.ids import NONE
from pagemill.telemetry import get_logger

#: Connections that are taken in one turn.
MAX_A_TURN = 256
#: How long nothing is accepted once no connection can be taken, nor even turned away.
PAUSE_S = 0.1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = get_logger("frontend.acceptor")


class Acceptor:
    """Accepts the connections of one listening socket, in the running event loop, until it is closed. It does not own the socket."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol], num_to_take: Callable[[], int] = lambda: MAX_A_TURN) -> None:
        self._listener = listener
        self._num_to_take = num_to_take  #: in a turn, if that is less than `MAX_A_TURN`
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None  #: nothing is taken until then
        self._num_turned_away = 0  #: that the log does not know of yet
        self._spare = _open_spare()  #: a descriptor that is given up for a moment to get rid of a connection
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Takes no more. Those that were taken are served."""
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        if self._spare != NONE:
            os.close(self._spare)
            self._spare = NONE

    async def wait_closed(self) -> None:
        """Returns when every connection that was taken has got its protocol."""
        await asyncio.gather(*self._tasks)

    def _accept(self) -> None:
        for _ in range(min(MAX_A_TURN, self._num_to_take())):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return  # nobody waits any more, or a sibling was faster
            except ConnectionAbortedError:
                continue  # it has gone already
            except OSError as error:
                if error.errno not in _EXHAUSTED or not self._turn_away():
                    self._rest(error)
                    return
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

    def _turn_away(self) -> bool:
        """Closes one waiting connection that there is no descriptor for. False if none waits, or if not even the spare descriptor is left."""
        if self._spare == NONE:
            self._spare = _open_spare()
        if self._spare == NONE:
            return False
        os.close(self._spare)
        try:
            self._listener.accept()[0].close()
        except OSError:  # nobody waits any more, or another thread took the descriptor
            return False
        else:
            self._num_turned_away += 1
            return True
        finally:
            self._spare = _open_spare()

    def _rest(self, error: OSError) -> None:
        """The listener would stay readable, and nothing can be done for whoever waits: the loop would spin."""
        log.warning("accepting_pauses", error=error.strerror, turned_away=self._num_turned_away)
        self._num_turned_away = 0
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def _open_spare() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return NONE
