"""What GET /debug/state shows. Fields have names on the wire, for these structs are also shown as JSON."""

from __future__ import annotations

import msgspec


class SequenceState(msgspec.Struct, frozen=True):
    """One live sequence in `DebugState` (these few structs are named fields, for they are shown as JSON)."""

    request_id: str
    seq_id: int
    status: str
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    blocks: int
    swap_slots: int
    preemptions: int


class BlockCounts(msgspec.Struct, frozen=True):
    """free + cached + used = total, always."""

    total: int
    free: int
    cached: int
    used: int


class SwapSlotCounts(msgspec.Struct, frozen=True):
    """free + cached + held = total, always."""

    total: int
    free: int
    cached: int
    held: int


class InvariantReport(msgspec.Struct, frozen=True):
    ok: bool
    error: str | None


class DebugState(msgspec.Struct, frozen=True):
    """The body of GET /debug/state."""

    epoch: int
    steps: int
    plans_in_flight: int
    sequences: list[SequenceState]
    blocks: BlockCounts
    swap_slots: SwapSlotCounts
    invariants: InvariantReport
