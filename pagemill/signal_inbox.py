"""The signals that concern a launcher, received without interrupting what it is doing.

SIGINT and SIGTERM ask for the end, SIGHUP for a reload; unless a terminal sent it that is gone, whose server is to end with
it. Must not know what is ended or reloaded.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from types import FrameType, TracebackType

#: Signals this close together are one.
SAME_SIGNAL_S = 0.3


class SignalInbox:
    """Deaf once its context is left."""

    def __init__(self) -> None:
        self.endings: list[signal.Signals] = []  #: those that ask for the end, in order
        self._received_at = 0.0  #: when the last of them arrived
        self._reload_asked = False
        self._terminal = sys.stderr.fileno() if sys.stderr.isatty() else None  #: a file descriptor
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
        # A server started by nohup ignores SIGHUP and must go on doing so.
        hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        self._numbers = [signal.SIGINT, signal.SIGTERM, *hangup]
        for number in self._numbers:
            signal.signal(number, self._note)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number in self._numbers:  # everything has ended, and with the exit code that was asked for
            signal.signal(number, signal.SIG_IGN)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal has arrived."""
        return self._reader.fileno()

    def drain(self) -> None:
        try:
            while self._reader.recv(64):
                pass
        except BlockingIOError:
            pass

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        asked, self._reload_asked = self._reload_asked, False
        return asked

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and not self._terminal_is_gone():
            self._reload_asked = True
            return
        # `timeout`, a shell and a process manager may each pass on one and the same signal.
        now = time.monotonic()
        if not self.endings or now - self._received_at > SAME_SIGNAL_S:
            self.endings.append(signal.Signals(number))
            self._received_at = now

    def _terminal_is_gone(self) -> bool:
        if self._terminal is None:
            return False
        hangup = select.poll()
        hangup.register(self._terminal, 0)  # hang-up is always reported
        return bool(hangup.poll(0))
