"""How fast this rank copies blocks out and in: measured at start-up, on real blocks and slots, beside nothing else.

The planner weighs swapping against computing again with these figures. Knows the swapper alone, so that what
is timed is what serving does.
"""

from __future__ import annotations

import select
from dataclasses import dataclass
from statistics import median

from pagemill.ids import PlanId
from pagemill.messages.worker import Tier, Transfer
from workers.swapper import Swapper
from workers.transfer_order import Direction

#: One round copies so many bytes, or as much as pool and arena hold.
_ROUND_BYTES = 64 * 2**20
_NUM_ROUNDS = 5
#: Nothing that works takes that long.
_DEADLINE_S = 30.0


class LinkFailed(Exception):
    """Blocks cannot be copied; the message is one sentence for the operator."""


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second each way; zero without an arena."""

    out_bytes_s: float
    in_bytes_s: float


def measure_link(swapper: Swapper, block_bytes: int) -> LinkRate:
    """Copies slots into blocks and back, each to where it came from. Raises LinkFailed.

    What lay in the blocks is lost. What lies in the slots stays, down to the bit and at every moment: when a worker is
    started in place of another, that is the KV of sequences which wait for it.
    """
    num_copied = min(swapper.num_blocks, swapper.num_slots, max(1, _ROUND_BYTES // block_bytes))
    if not num_copied:
        return LinkRate(0.0, 0.0)
    # In comes first, so that what goes out is what was there. Besides, memory never written is no memory yet: reading it would be too fast.
    _seconds(swapper, "in", num_copied)
    _seconds(swapper, "out", num_copied)
    rounds = [(_seconds(swapper, "out", num_copied), _seconds(swapper, "in", num_copied)) for _ in range(_NUM_ROUNDS)]
    out_s, in_s = (max(median(times), 1e-9) for times in zip(*rounds, strict=True))
    return LinkRate(num_copied * block_bytes / out_s, num_copied * block_bytes / in_s)


def _seconds(swapper: Swapper, direction: Direction, num_copied: int) -> float:
    """Spent copying so many blocks one way."""
    tiers: tuple[Tier, Tier] = ("device", "arena") if direction == "out" else ("arena", "device")
    transfers = [Transfer(number, tiers[0], number, tiers[1], number, needed_by=PlanId(0)) for number in range(num_copied)]
    swapper.start(transfers, PlanId(0))
    seconds, num_done = 0.0, 0
    while num_done < num_copied:
        if not select.select([swapper], [], [], _DEADLINE_S)[0]:
            raise LinkFailed(f"the swap arena cannot be used: copying {num_copied} blocks takes more than {_DEADLINE_S:.0f} s")
        for done in swapper.take_done():
            if not done.ok:
                raise LinkFailed(f"the swap arena cannot be used: copying blocks {direction} fails")
            seconds += done.seconds
            num_done += len(done.transfer_ids)
    return seconds
