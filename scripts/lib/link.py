"""A simulated link between device and arena: two copy engines, each with a queue, sharing what the link carries.

Time moves only when `advance` is called, and everything in between is exact: a rate changes when one direction
becomes busy or idle, never halfway through a piece of the calculation. The rules of the worker hold here too: a
transfer never overtakes an earlier one of its block or slot, and one that a forward waits for goes before those
that nobody waits for. It counts bytes and seconds; it holds neither blocks nor slots.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pagemill.ids import NO_PLAN
from pagemill.messages.worker import Transfer
from scripts.lib.costs import LinkCost

#: What is left of a copy below this is rounding.
_NOTHING_BYTES = 1e-3


@dataclass
class Copy:
    """One transfer under way."""

    epoch: int  #: of the plan that ordered it
    transfer: Transfer
    bytes_left: float
    after: set[int]  #: ids of earlier ones that it must not overtake
    urgent: bool  #: a forward waits for it, or for one that must not overtake it
    seconds: float = 0.0  #: it was moving


class Link:
    """Transfers in, finished ones out. `now` is where `advance` has come to."""

    def __init__(self, cost: LinkCost, block_bytes: int) -> None:
        self.now = 0.0
        self._cost, self._block_bytes = cost, block_bytes
        self._under_way: dict[int, Copy] = {}  #: oldest first
        self._queues: dict[str, deque[Copy]] = {"arena": deque(), "device": deque()}  #: by where they go; urgent ones first, then oldest first
        self._last_of: dict[tuple[str, int], int] = {}  #: block or slot -> the newest transfer that names it

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._under_way

    def put(self, transfer: Transfer, epoch: int) -> None:
        """Queues one copy behind those it must not overtake."""
        names = ((transfer.from_tier, transfer.from_id), (transfer.to_tier, transfer.to_id))
        after = {last for name in names if (last := self._last_of.get(name)) is not None}
        self._last_of |= dict.fromkeys(names, transfer.transfer_id)
        size = self._block_bytes + self._rate_alone(transfer.to_tier) * self._cost.per_block_s
        copy = Copy(epoch, transfer, size, after, urgent=False)
        self._under_way[transfer.transfer_id] = copy
        self._queues[transfer.to_tier].append(copy)
        if transfer.needed_by != NO_PLAN:
            self._hurry(copy)
            for direction, queue in self._queues.items():
                self._queues[direction] = deque(sorted(queue, key=lambda copy: not copy.urgent))

    def num_busy(self) -> int:
        """How many directions are moving bytes."""
        return len(self._moving())

    def next_completion(self) -> float:
        """When the next copy ends if nothing is put before that; infinity if none is under way."""
        moving = self._moving()
        return self.now + min((copy.bytes_left / self._rate(copy, len(moving)) for copy in moving), default=math.inf)

    def advance(self, until: float) -> list[Copy]:
        """Lets time pass until `until`, which is no later than the next completion. Returns what has ended."""
        moving = self._moving()
        elapsed = until - self.now
        self.now = until
        ended = []
        for copy in moving:
            copy.bytes_left -= self._rate(copy, len(moving)) * elapsed
            copy.seconds += elapsed
            if copy.bytes_left <= _NOTHING_BYTES:
                ended.append(copy)
        for copy in ended:
            self._queues[copy.transfer.to_tier].popleft()
            del self._under_way[copy.transfer.transfer_id]
        return ended

    def _hurry(self, copy: Copy) -> None:
        """It goes first, with all it must not overtake."""
        copy.urgent = True
        for earlier in copy.after:
            if earlier in self._under_way and not self._under_way[earlier].urgent:
                self._hurry(self._under_way[earlier])

    def _moving(self) -> list[Copy]:
        """The first copy of each direction, unless it waits for one of the other."""
        return [queue[0] for queue in self._queues.values() if queue and self._under_way.keys().isdisjoint(queue[0].after)]

    def _rate(self, copy: Copy, num_moving: int) -> float:
        return self._rate_alone(copy.transfer.to_tier) * (self._cost.both_share if num_moving > 1 else 1.0)

    def _rate_alone(self, to_tier: str) -> float:
        return self._cost.out_bytes_s if to_tier == "arena" else self._cost.in_bytes_s
