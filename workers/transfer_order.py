"""Which transfers may start: never one before an earlier one of its block or its swap slot.

Every block and every slot has a line of the copies that name it, in the order they were given; a copy may
start when it is first in both its lines, and leaves them when it is over. So what was listed as "out of
block 3, then into block 3" happens in that order, and copies that share nothing may pass each other.
Knows no bytes, threads or devices: whoever uses it holds a lock.

    given      out 3->7    out 4->8    in 9->3        line of block 3:  out 3->7, in 9->3
    may start     yes         yes        no           until out 3->7 is over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

#: Out: from the pool to the arena. In: back.
Direction = Literal["out", "in"]
BOTH: tuple[Direction, ...] = ("out", "in")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One block to copy. Compared by identity: an id that is sent twice is two jobs."""

    transfer_id: int
    direction: Direction
    block_id: int
    swap_slot_id: int
    needed_by: int  #: the plan whose forward waits for it, or NONE
    is_urgent: bool  #: that is the plan it came with: whoever runs the forward copies it himself
    mark: object  #: of the copier: what was computed before it

    @property
    def places(self) -> tuple[int, int]:
        """(from, to)."""
        return (self.block_id, self.swap_slot_id) if self.direction == "out" else (self.swap_slot_id, self.block_id)


_Line = deque[Job]


class TransferOrder:
    """Jobs from when they are given until they are over."""

    def __init__(self) -> None:
        #: Not started, oldest first.
        self._waiting: dict[Job, None] = {}
        self._blocks: dict[int, _Line] = {}
        self._slots: dict[int, _Line] = {}

    def __len__(self) -> int:
        """How many wait to start."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether all are over."""
        return not self._blocks

    def has_started(self, job: Job) -> bool:
        return job not in self._waiting

    def is_over(self, job: Job) -> bool:
        return job not in self._blocks.get(job.block_id, ())

    def add(self, job: Job) -> None:
        self._waiting[job] = None
        self._blocks.setdefault(job.block_id, deque()).append(job)
        self._slots.setdefault(job.swap_slot_id, deque()).append(job)

    def start(self, directions: Collection[Direction], limit: int) -> list[Job]:
        """Jobs to copy together in the background, at most `limit`: the oldest that may start and those like it behind it."""
        return self._start((job for job in self._waiting if not job.is_urgent and job.direction in directions), limit)

    def start_any_of(self, jobs: Sequence[Job]) -> list[Job]:
        """Of these, urgent or not, those to copy together now: all of one direction that may start, whatever stands between them.

        Where a sequence comes as another goes, the two directions take turns, and a forward waits for all. Empty if none
        may start: what is ahead of them is not over.
        """
        free = [job for job in jobs if job in self._waiting and self._is_first(job)]
        return self._start((job for job in free if job.direction == free[0].direction), len(free))

    def with_those_ahead(self, jobs: Iterable[Job]) -> list[Job]:
        """These and all that must be over before them, which have not started yet, oldest first."""
        wanted: set[Job] = set()
        unseen = [job for job in jobs if job in self._waiting]
        while unseen:
            job = unseen.pop()
            if job not in wanted:
                wanted.add(job)
                unseen += (other for other in self._ahead_of(job) if other in self._waiting)
        return [job for job in self._waiting if job in wanted] if wanted else []

    def finish(self, jobs: Iterable[Job]) -> None:
        """These are over, well or not."""
        for job in jobs:
            for lines, number in ((self._blocks, job.block_id), (self._slots, job.swap_slot_id)):
                lines[number].popleft()
                if not lines[number]:
                    del lines[number]

    def drop_waiting(self) -> None:
        """Forgets those that have not started."""
        dropped, self._waiting = self._waiting, {}
        for lines in (self._blocks, self._slots):
            for number, line in list(lines.items()):
                lines[number] = deque(job for job in line if job not in dropped)
                if not lines[number]:
                    del lines[number]

    def _start(self, candidates: Iterable[Job], limit: int) -> list[Job]:
        batch: list[Job] = []
        for job in candidates:
            if self._is_first(job) and (not batch or job.direction == batch[0].direction):
                batch.append(job)
            elif batch:
                break
            if len(batch) == limit:
                break
        for job in batch:
            del self._waiting[job]
        return batch

    def _is_first(self, job: Job) -> bool:
        return all(line[0] is job for line in self._lines(job))

    def _lines(self, job: Job) -> tuple[_Line, _Line]:
        return self._blocks[job.block_id], self._slots[job.swap_slot_id]

    def _ahead_of(self, job: Job) -> Iterator[Job]:
        for line in self._lines(job):
            for other in line:
                if other is job:
                    break
                yield other
