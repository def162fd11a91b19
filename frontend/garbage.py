"""When this process looks for garbage that refers to itself: hardly ever, for a full look holds up everybody.

Requests leave none behind: what they are made of is freed when they end. Yet a look at all generations of objects takes
longer the more requests are open, a tenth of a second with thousands, and the interpreter would take one every few
seconds. So what has been loaded is set aside, the oldest generation is left out, and a full look is taken while nobody
waits, or when the last one is long ago: something may make such garbage all the same. Must not know what objects are.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from pagemill.telemetry import get_logger

#: The time from one full look to the next: while there are no requests, and while there are.
IDLE_INTERVAL_S = 60.0
LONGEST_INTERVAL_S = 900.0
#: A threshold that is never reached: the interpreter begins no full look by itself.
_NEVER = 1 << 30

log = get_logger("frontend.garbage")


class GarbageWatch:
    """One per process. `settle` begins it; `look` is called now and then."""

    def __init__(self, is_idle: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_idle = is_idle
        self._clock = clock
        self._last: float | None = None  #: None before `settle`: the interpreter looks when it likes

    def settle(self) -> None:
        """Called when everything is loaded: what exists now stays for good, and need not be looked at again."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._last = self._clock()

    def look(self) -> None:
        """A full look, if it is time for one."""
        if self._last is None:
            return
        begin = self._clock()
        if begin - self._last < (IDLE_INTERVAL_S if self._is_idle() else LONGEST_INTERVAL_S):
            return
        num_objects = gc.collect()
        self._last = self._clock()
        log.debug("garbage_collected", objects=num_objects, ms=round(1000 * (self._last - begin), 1))
