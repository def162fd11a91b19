"""First come, first served: continuous batching in order of arrival."""

from __future__ import annotations

from scheduler.sequence import Order, Sequence


class Policy:
    NAME = "fcfs"
    READS_PRIORITY = False

    def key(self, sequence: Sequence) -> Order:
        return (0, sequence.order[1], sequence.seq_id)

    def admits(self, num_begun: int) -> bool:
        return True
