"""Who waits, who runs, who was preempted: three lists in the policy's order.

Every live sequence is in exactly one of them, the one its status names. This file moves sequences; it does
not decide.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.sequence import Sequence, Status


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


class Queues:
    """The lists are sorted by `Sequence.order`, smallest first."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_waiting_tokens = 0  #: prompt tokens of all that wait

    def of(self, status: Status) -> list[Sequence]:
        """The list of a status. Finished sequences are in none."""
        match status:
            case Status.WAITING:
                return self.waiting
            case Status.RUNNING:
                return self.running
            case Status.PREEMPTED:
                return self.preempted
            case Status.FINISHED:
                raise ValueError("finished sequences are in no queue")

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)
        self.num_waiting_tokens += sequence.num_prompt_tokens

    def move(self, sequence: Sequence, status: Status) -> None:
        """Changes the status and the list together."""
        queue = self.of(sequence.status)
        index = bisect_left(queue, sequence.order, key=_order)
        if index == len(queue) or queue[index] is not sequence:
            raise ValueError(f"{sequence!r} is not in the queue of its status")
        if sequence.status is Status.WAITING:
            self.num_waiting_tokens -= sequence.num_prompt_tokens
        sequence.move_to(status)
        del queue[index]
        if status is not Status.FINISHED:
            insort(self.of(status), sequence, key=_order)

    def head(self, admits: bool = True) -> Sequence | None:
        """The first unfinished sequence that may run (`admits`: waiting ones may): its claim is absolute, and it is never a victim."""
        queues = (self.running, self.preempted, self.waiting) if admits else (self.running, self.preempted)
        return min((queue[0] for queue in queues if queue), key=_order, default=None)

    def candidates(self) -> Iterator[Sequence]:
        """All that could start running, in order. Takes a copy, because starting one changes the lists."""
        return heapq.merge(list(self.preempted), list(self.waiting), key=_order)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.preempted
        yield from self.waiting
