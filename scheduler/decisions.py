"""Decisions of the planner, kept in a ring with the prices they were made by, for whoever asks why.

Data only; `preemption` writes it, `GET /debug/preemptions` shows it.
"""

from __future__ import annotations

from collections import Counter, deque

from pagemill.messages.decisions import Decision, VictimKind

#: Newest decisions that are kept.
RING_SIZE = 1000


class Decisions:
    """The ring, and counts of what became of running sequences."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=RING_SIZE)
        self._num_recorded = 0
        self.preemptions: Counter[str] = Counter()  #: "kind/reason" -> sequences that stopped running

    @property
    def next_number(self) -> int:
        return self._num_recorded + 1

    def record(self, decision: Decision) -> None:
        self._num_recorded += 1
        self._ring.append(decision)
        self.preemptions.update(f"{victim.kind}/{decision.reason}" for victim in decision.victims if victim.was_running and victim.yielded)

    def newest(self, limit: int) -> list[Decision]:
        """At most `limit`, oldest first."""
        return list(self._ring)[-limit:] if limit > 0 else []

    def num_preempted(self, kind: VictimKind) -> int:
        """Sequences that stopped running and whose blocks went this way."""
        return sum(count for name, count in self.preemptions.items() if name.startswith(f"{kind}/"))
