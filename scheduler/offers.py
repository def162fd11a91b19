"""What sequences could give up for a purpose, at what price, and what came of it: what the planner weighs, and what is told of it.

An offer is made as things stand: once another has been taken, what is left is priced anew. So one sequence may be asked
several times for one purpose; `Asked` makes one story of that. Data only: who is asked, and which way is taken, is
decided in `preemption`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagemill.ids import SeqId
from pagemill.messages.decisions import VictimKind, VictimPrice
from scheduler.sequence import Sequence
from scheduler.swapping import Tail


@dataclass(slots=True)
class Offer:
    """What a sequence could give up for a purpose, and at what price."""

    sequence: Sequence
    tail: Tail
    was_running: bool
    num_without_copy: int = 0
    num_tokens: int = 0  #: to compute again if it is dropped
    swap_s: float | None = None
    recompute_s: float = 0.0
    kind: VictimKind = "keep"
    yielded: bool = False
    freed: int = 0

    @property
    def cheapest_s(self) -> float:
        return self.recompute_s if self.swap_s is None else min(self.swap_s, self.recompute_s)

    @property
    def price(self) -> float:
        """Seconds per freed block."""
        return self.cheapest_s / max(1, self.tail.num_freed)


class Asked:
    """Everybody who was looked at for one purpose, once each, in the order in which that happened first; and how things stood before anybody yielded."""

    def __init__(self, num_slots: int, backlog_bytes: int) -> None:
        self.num_slots = num_slots  #: that could be had
        self.backlog_bytes = backlog_bytes  #: queued on the link
        self._offers: dict[SeqId, Offer] = {}

    def looked_at(self, offers: Iterable[Offer]) -> None:
        """They were priced. Of one who is priced again the newest price is told."""
        self._offers |= {offer.sequence.seq_id: offer for offer in offers}

    def took(self, offer: Offer) -> None:
        """It was taken, if there was anything in it. Of one who had yielded before the first price is told, and all that its KV has freed."""
        before = self._offers.get(offer.sequence.seq_id)
        if before is None or not before.yielded:
            self._offers[offer.sequence.seq_id] = offer
            return
        if offer.tail.entries:
            before.freed = offer.freed + (before.freed if before.kind != "keep" else 0)
            before.kind = offer.kind

    @property
    def anybody_yielded(self) -> bool:
        return any(offer.yielded for offer in self._offers.values())

    def prices(self) -> list[VictimPrice]:
        """As they are told."""
        return [_price(offer) for offer in self._offers.values()]


def _price(offer: Offer) -> VictimPrice:
    return VictimPrice(
        request_id=offer.sequence.request_id,
        seq_id=offer.sequence.seq_id,
        was_running=offer.was_running,
        blocks=offer.tail.num_freed,
        blocks_to_copy=offer.num_without_copy,
        tokens=offer.num_tokens,
        swap_s=offer.swap_s,
        recompute_s=offer.recompute_s,
        yielded=offer.yielded,
        kind=offer.kind,
        freed=offer.freed,
    )
