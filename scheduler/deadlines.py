"""Until when sequences may wait to be started, and who has waited too long.

A deadline may be a day away, and most sequences are started or gone long before theirs: what is noted of those is thrown away as
soon as it outweighs the rest. Knows names and times only; when a sequence need not be started any more, the owner says so.
"""

from __future__ import annotations

import heapq

from pagemill.messages.sequences import SequenceKey

#: So many notes more than twice the sequences are kept before any is thrown away.
_SLACK = 64


class Deadlines:
    """A heap in which those that are gone stay for a while."""

    def __init__(self) -> None:
        self._until: dict[SequenceKey, float] = {}  #: of all that wait
        self._heap: list[tuple[float, SequenceKey]] = []  #: earliest first; means something only while `_until` says the same

    def __len__(self) -> int:
        """What is noted, of whomever."""
        return len(self._heap)

    def add(self, until: float, key: SequenceKey) -> None:
        self._until[key] = until
        heapq.heappush(self._heap, (until, key))

    def discard(self, key: SequenceKey) -> None:
        """It waits no more, if it did."""
        if self._until.pop(key, None) is not None and len(self._heap) > 2 * len(self._until) + _SLACK:
            self._heap = [(until, key) for key, until in self._until.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> list[SequenceKey]:
        """Those whose time is over, the earliest first. They wait no more."""
        due: list[SequenceKey] = []
        while self._heap and self._heap[0][0] <= now:
            until, key = heapq.heappop(self._heap)
            if self._until.get(key) == until:
                del self._until[key]
                due.append(key)
        return due
