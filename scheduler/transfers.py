"""Transfers: copies between blocks and swap slots, from the order to the last rank's acknowledgement.

Each holds references on what it must not lose: an arriving block and the slot it comes from, a slot being
written, the block of an early copy. They are given back when the transfer is done, whatever became of the
sequence meanwhile, so an abort in the middle of a copy ends with every block and slot free. The link is
budgeted: what no forward waits for never queues up more than one step's worth of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstore.block_pool import BlockPool
from kvstore.swap_space import SwapSpace
from pagemill.ids import NO_PLAN, BlockId, PlanId, SwapSlotId
from pagemill.messages.worker import Transfer, TransferDone
from scheduler.core_config import CoreConfig
from scheduler.ranks import all_ranks, includes, without
from scheduler.rates import LinkRate
from scheduler.sequence import Sequence

Direction = Literal["out", "in"]

#: Of the bytes a link moves in one step, so much may be under way in the background.
_BUDGET_SHARE = 0.5
#: However long a step takes, no more than this; urgent copies must not queue behind it.
_MAX_BYTES_IN_FLIGHT = 256 << 20
#: Before the first step was measured.
_FIRST_STEP_S = 0.05
_STEP_WEIGHT = 0.2


@dataclass(slots=True)
class TransferInFlight:
    """One copy. `sequence`, `group` and `index` say for whom a block arrives."""

    transfer_id: int
    direction: Direction
    block: BlockId
    slot: SwapSlotId
    ranks_left: int  #: those that have not made it, as bits
    holds_block: bool
    needed_by: PlanId = NO_PLAN
    ok: bool = True
    seconds: float = 0.0  #: of the rank that took longest
    sequence: Sequence | None = None
    group: int = 0
    index: int = 0


class Transfers:
    """Owned by the core. Orders collect until the plan that carries them is complete."""

    def __init__(self, config: CoreConfig, pool: BlockPool, swap: SwapSpace) -> None:
        self.rates: dict[Direction, LinkRate] = {"out": LinkRate(config.swap_out_bytes_s), "in": LinkRate(config.swap_in_bytes_s)}
        self._pool, self._swap = pool, swap
        self._block_bytes, self._all_ranks = config.block_bytes, all_ranks(config.num_workers)
        self._ordered: list[TransferInFlight] = []  #: for the plan being built
        self._in_flight: dict[int, TransferInFlight] = {}  #: oldest first, ordered ones included
        self._num_in_flight: dict[Direction, int] = {"out": 0, "in": 0}
        self._num_background: dict[Direction, int] = {"out": 0, "in": 0}
        self._num_awaited: dict[Direction, int] = {"out": 0, "in": 0}
        self._next_id = 1
        self.num_early_copies = 0
        self.nothing_runs = False  #: no sequence runs, so no forward could be disturbed
        self.step_s = _FIRST_STEP_S  #: what a step takes, a moving average

    def __len__(self) -> int:
        return len(self._in_flight)

    def in_flight(self) -> list[TransferInFlight]:
        return list(self._in_flight.values())

    def num_background(self, direction: Direction) -> int:
        """Transfers under way that no forward waits for."""
        return self._num_background[direction]

    # --- ordering --------------------------------------------------------------------------------------

    def order_out(self, block: BlockId, slot: SwapSlotId, *, holds_block: bool) -> TransferInFlight:
        """Copies a block into a slot. `holds_block`: the copy is early, nobody may overwrite the block until it is done."""
        transfer = self._order("out", block, slot, holds_block)
        self._swap.fill(slot, transfer.transfer_id)
        self.num_early_copies += holds_block
        return transfer

    def order_in(self, slot: SwapSlotId, block: BlockId, sequence: Sequence, group: int, index: int) -> TransferInFlight:
        """Brings a slot's content into a block that the sequence already refers to."""
        transfer = self._order("in", block, slot, holds_block=True)
        self._swap.reference(slot)
        transfer.sequence, transfer.group, transfer.index = sequence, group, index
        return transfer

    def make_urgent(self, transfer_id: int, plan_id: PlanId) -> None:
        """The forward of the plan being built waits for the copy: it overwrites the block, or reads what arrives."""
        transfer = self._in_flight[transfer_id]
        if transfer.needed_by == NO_PLAN:
            transfer.needed_by = plan_id
            self._num_background[transfer.direction] -= 1
            self._num_awaited[transfer.direction] += 1

    def num_awaited(self, direction: Direction) -> int:
        """Copies that the forward of the plan being built waits for."""
        return self._num_awaited[direction]

    def take(self) -> tuple[Transfer, ...]:
        """What the plan being built carries, in order."""
        ordered = tuple(_message(transfer) for transfer in self._ordered)
        self._ordered.clear()
        self._num_awaited = {"out": 0, "in": 0}
        return ordered

    def budget(self, direction: Direction) -> int:
        """Blocks that may still be ordered in the background now; at least one while nothing is under way."""
        num_bytes: float = _MAX_BYTES_IN_FLIGHT
        if not self.nothing_runs:
            num_bytes = min(_BUDGET_SHARE * self.rates[direction].bytes_s * self.step_s, num_bytes)
        return max(1, int(num_bytes / self._block_bytes)) - self._num_background[direction]

    def backlog_bytes(self, direction: Direction) -> int:
        """What the link still has to move. Every price asks, so it is counted as it changes."""
        return self._block_bytes * self._num_in_flight[direction]

    # --- being done ------------------------------------------------------------------------------------

    def measure_step(self, seconds: float) -> None:
        if seconds > 0:
            self.step_s += _STEP_WEIGHT * (seconds - self.step_s)

    def done(self, event: TransferDone) -> tuple[list[TransferInFlight], int]:
        """Takes a rank's acknowledgement. Returns the transfers that are complete now, and how many ids meant nothing.

        Those are unknown, or this rank has said so before. The references that the transfers held are given back.
        """
        complete: list[TransferInFlight] = []
        num_unknown = 0
        for number in event.transfer_ids:
            transfer = self._in_flight.get(number)
            if transfer is None or not includes(transfer.ranks_left, event.rank):
                num_unknown += 1
                continue
            transfer.ranks_left = without(transfer.ranks_left, event.rank)
            transfer.ok = transfer.ok and event.ok
            transfer.seconds = max(transfer.seconds, event.seconds / len(event.transfer_ids))
            if not transfer.ranks_left:
                complete.append(transfer)
        self._measure(complete)
        for transfer in complete:
            self._close(transfer)
        return complete, num_unknown

    def _measure(self, complete: list[TransferInFlight]) -> None:
        for direction, rate in self.rates.items():
            group = [transfer for transfer in complete if transfer.direction == direction and transfer.ok]
            if group:
                rate.measure(len(group) * self._block_bytes, sum(transfer.seconds for transfer in group))

    def _close(self, transfer: TransferInFlight) -> None:
        del self._in_flight[transfer.transfer_id]
        self._num_in_flight[transfer.direction] -= 1
        if transfer.needed_by == NO_PLAN:
            self._num_background[transfer.direction] -= 1
        if transfer.direction == "out":
            if not transfer.ok and transfer.holds_block:
                self._pool.copied_in_vain(transfer.block)
            self._swap.filled(transfer.slot, ok=transfer.ok)
            self._pool.departed(transfer.block, transfer.transfer_id)
        else:
            if not transfer.ok:
                self._swap.distrust(transfer.slot)
            self._swap.release(transfer.slot)
        if transfer.holds_block:
            self._pool.release(transfer.block, oldest=transfer.direction == "out")

    def _order(self, direction: Direction, block: BlockId, slot: SwapSlotId, holds_block: bool) -> TransferInFlight:
        transfer = TransferInFlight(self._next_id, direction, block, slot, self._all_ranks, holds_block)
        self._next_id += 1
        self._ordered.append(transfer)
        self._in_flight[transfer.transfer_id] = transfer
        self._num_in_flight[direction] += 1
        self._num_background[direction] += 1
        if holds_block:
            self._pool.reference(block)
        return transfer


def _message(transfer: TransferInFlight) -> Transfer:
    if transfer.direction == "out":
        return Transfer(transfer.transfer_id, "device", transfer.block, "arena", transfer.slot, transfer.needed_by)
    return Transfer(transfer.transfer_id, "arena", transfer.slot, "device", transfer.block, transfer.needed_by)
