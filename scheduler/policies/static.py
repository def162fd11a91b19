"""Static batching, for comparison: a new batch starts only when the last one has ended.

Rows leave the batch as they finish, so this is the honest opponent of continuous batching, not a straw man.
"""

from __future__ import annotations

from scheduler.sequence import Order, Sequence


class Policy:
    NAME = "static"
    READS_PRIORITY = False

    def key(self, sequence: Sequence) -> Order:
        return (0, sequence.order[1], sequence.seq_id)

    def admits(self, num_begun: int) -> bool:
        return num_begun == 0
