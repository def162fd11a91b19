"""Plans in flight: what was ordered and not yet acknowledged by all ranks.

Data only. Row and KV version are noted with each slice, because a sequence may lose its row, or give up what is
being computed, before the answer comes.
"""

from __future__ import annotations

import msgspec

from pagemill.messages import PlanId, RowId, RowResult
from scheduler.slices import PlannedSlice


class SliceInFlight(msgspec.Struct, gc=False):
    """A slice, the row it was sent to, and the sequence's KV version then."""

    piece: PlannedSlice
    row: RowId
    row_version: int
    kv_version: int
    is_void: bool = False  #: a plan before it was not carried out, so neither can this be: its results mean nothing

    def counts(self) -> bool:
        """The positions it computes are still wanted."""
        return self.piece.sequence.kv_version == self.kv_version


class PlanInFlight(msgspec.Struct):
    """Complete when no rank is left. Results are those of rank 0."""

    plan_id: PlanId
    slices: list[SliceInFlight]
    ranks_left: int
    results: dict[tuple[RowId, int], RowResult] = {}
    seconds: dict[str, float] = {}
    is_alone: bool = False  #: a suspect has it to itself
