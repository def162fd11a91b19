"""What the planner decided and why: shown by GET /debug/preemptions and told by `pagemill explain`.

Fields have names on the wire, for these structs are also shown as JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: What becomes of a victim's blocks: all stay for now, some are copied to the arena, or some are dropped and computed again.
VictimKind = Literal["keep", "swap", "recompute"]
#: Why somebody yields: a running sequence grows, one wants to start or to come back, a seat is wanted, or it was asked for.
PreemptionReason = Literal["growth", "start", "seat", "forced"]


class VictimPrice(msgspec.Struct, frozen=True):
    """One sequence the planner looked at. Prices are seconds; a way that is not open has the price null."""

    request_id: str
    seq_id: int
    was_running: bool  #: false: preempted before, and what it still held was asked for
    blocks: int  #: it could free for this purpose
    blocks_to_copy: int  #: of these, not in the arena yet
    tokens: int  #: to compute again if they are dropped
    swap_s: float | None
    recompute_s: float | None
    yielded: bool  #: false: it was looked at and left alone
    kind: VictimKind  #: which way its blocks went, or would have gone
    freed: int  #: blocks it gave up


class Decision(msgspec.Struct, frozen=True):
    """Why somebody had to yield, who could have, at what price, and who did. Shown as JSON."""

    number: int  #: counts from 1 in an epoch
    at_s: float  #: the scheduler's clock, seconds, any origin
    step: int
    reason: PreemptionReason
    request_id: str  #: for whom
    seq_id: int
    blocks_wanted: int
    out_bytes_s: float  #: the measured rates that the prices come from
    in_bytes_s: float
    prefill_tok_s: float  #: near the start of a prompt; longer contexts cost more
    backlog_bytes: int  #: queued on the link when it was decided
    block_bytes: int
    swap_slots_left: int  #: free or droppable, before anybody yielded
    victims: list[VictimPrice]
