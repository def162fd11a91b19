"""By the request's priority, lower first, then by arrival. A lower one takes seats and blocks from higher ones."""

from __future__ import annotations

from scheduler.sequence import Order, Sequence


class Policy:
    NAME = "priority"
    READS_PRIORITY = True

    def key(self, sequence: Sequence) -> Order:
        return (sequence.priority, sequence.order[1], sequence.seq_id)

    def admits(self, num_begun: int) -> bool:
        return True
