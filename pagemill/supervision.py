"""When to give up on a process, and when on repairing: patience and deaths, measured with a clock that is handed in.

Pure. Must not know what a process is, nor how one is ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

#: Deaths longer ago than this are forgiven.
WINDOW_S = 600.0
#: `Patience.exhausted` is to be asked at least this often.
TICK_S = 1.0
#: Who is this much later than a tick was stopped, as were perhaps all that it waits for.
_LATE_S = 2.0

Awaited = TypeVar("Awaited", bound=Hashable)


class RestartLimit:
    """Counts deaths, so that what is broken for good is not restarted for ever."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit  #: deaths within the window that are repaired
        self._clock = clock
        self._deaths: deque[float] = deque()  #: when, oldest first

    @property
    def num_deaths(self) -> int:
        """Within the window that ends now."""
        now = self._clock()
        while self._deaths and now - self._deaths[0] >= WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths)

    def allows_another(self) -> bool:
        """Notes a death and says whether it is to be repaired."""
        self._deaths.append(self._clock())
        return self.num_deaths <= self.limit

    def forgive(self, num_deaths: int) -> None:
        """The last of them are explained and do not count any more."""
        for _ in range(min(num_deaths, len(self._deaths))):
            self._deaths.pop()


class Attempts:
    """At something that fails for want of memory or the like, and may succeed in a while: again after a pause, though not for ever."""

    def __init__(self, pause_s: float, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._pause_s = pause_s
        self._clock = clock
        self._first_failure: float | None = None  #: since the last success
        self._next = float("-inf")

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def failed(self) -> bool:
        """Notes a failure, and says whether another attempt is to be made."""
        now = self._clock()
        self._next = now + self._pause_s
        if self._first_failure is None:
            self._first_failure = now
        return now - self._first_failure < self.limit_s

    def succeeded(self) -> None:
        self._first_failure = None


class Patience(Generic[Awaited]):
    """Who has kept us waiting for too long. One who was away himself cannot tell, and begins anew."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._since: dict[Awaited, float] = {}  #: who is waited for, in the order in which that began
        self._looked_at = clock()

    def begin(self, awaited: Awaited) -> None:
        """Waits for a sign from now on, if it does not already."""
        self._since.setdefault(awaited, self._clock())

    def renew(self, awaited: Awaited) -> None:
        """It gave a sign, and owes the next one."""
        if awaited in self._since:
            self._since[awaited] = self._clock()

    def renew_all(self) -> None:
        self._since = dict.fromkeys(self._since, self._clock())

    def end(self, awaited: Awaited) -> None:
        """It owes nothing more."""
        self._since.pop(awaited, None)

    def exhausted(self) -> list[Awaited]:
        """Those that gave no sign for longer than the limit."""
        now = self._clock()
        if now - self._looked_at > TICK_S + _LATE_S:
            self.renew_all()
        self._looked_at = now
        return [awaited for awaited, since in self._since.items() if now - since >= self.limit_s]
