"""Time limits of a connection: it is dropped in time, unless its client is still taking what was written to it.

Must not know what is limited, nor what a connection says.
"""

from __future__ import annotations

import asyncio
import math

#: A timer may ring early by what a clock's numbers are rounded to.
_TICK_S = 0.001


class Watchdog:
    """One limit. It is armed and disarmed with every request and expires with few: so a timer that was set stays, and looks at the time when it rings."""

    __slots__ = ("_due", "_loop", "_num_unsent", "_timeout_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  #: the connection is dropped then; infinity while it is disarmed
        self._timeout_s = 0.0
        self._num_unsent = 0

    def arm(self, timeout_s: float) -> None:
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timeout_s = timeout_s
        self._due = self._loop.time() + timeout_s
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake)

    def disarm(self) -> None:
        self._due = math.inf

    def end(self) -> None:
        """The connection is gone."""
        self.disarm()
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        self._timer = None
        if self._due == math.inf:
            return
        if self._due - self._loop.time() > _TICK_S:
            self._timer = self._loop.call_at(self._due, self._wake)
        elif 0 < self._transport.get_write_buffer_size() < self._num_unsent:
            self.arm(self._timeout_s)
        else:
            self._transport.abort()
