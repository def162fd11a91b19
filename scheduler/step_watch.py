"""Watches plans and copies in flight: a step that takes longer than its tokens can explain means that its worker hangs.

Plans are carried out one after the other, so only the oldest is on the clock. Copies are many and short, so as long as
any is under way some must end within the time of an empty step; but a worker tells of them between steps only, and makes
none of a plan before its turn. Pure: whoever asks brings the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagemill.ids import PlanId
from pagemill.messages.worker import Plan, TransferDone

#: Whoever has not looked for so long was stopped himself.
_AWAY_S = 10.0


@dataclass(slots=True)
class _Watched:
    plan_id: PlanId
    num_tokens: int
    ranks_left: set[int]


@dataclass(slots=True)
class _WatchedCopy:
    plan_id: PlanId
    ranks_left: set[int]  #: that have not made it


class StepWatch:
    """One for each incarnation of the worker group."""

    def __init__(self, timeout_s: float, timeout_s_per_token: float, num_ranks: int) -> None:
        self._timeout_s, self._timeout_s_per_token = timeout_s, timeout_s_per_token
        self._num_ranks = num_ranks
        self._plans: deque[_Watched] = deque()  #: oldest first
        self._since = 0.0  #: when the oldest could begin
        self._answered_at = 0.0  #: when all ranks had done a plan last
        self._copies: dict[int, _WatchedCopy] = {}  #: by transfer, oldest plan first
        self._num_tokens_left = 0  #: of plans that nobody waits for any more, and which the workers may still be computing
        self._looked_at: float | None = None
        self._copied_at = 0.0  #: when one of them ended last, or the first could begin

    def sent(self, plan: Plan, now: float) -> None:
        if not self._plans:
            self._since = now
        num_tokens = sum(piece.num_tokens for piece in plan.slices) + self._num_tokens_left
        self._num_tokens_left = 0
        self._plans.append(_Watched(plan.plan_id, num_tokens, set(range(self._num_ranks))))
        if plan.transfers and not self._copies:
            self._copied_at = now
        for transfer in plan.transfers:
            self._copies[transfer.transfer_id] = _WatchedCopy(plan.plan_id, set(range(self._num_ranks)))

    def answered(self, plan_id: PlanId, rank: int, now: float) -> None:
        """A rank has done the plan, or said that it cannot. Unknown plans are passed over."""
        for watched in self._plans:
            if watched.plan_id == plan_id:
                watched.ranks_left.discard(rank)
        while self._plans and not self._plans[0].ranks_left:
            self._plans.popleft()
            self._since = self._answered_at = now
            oldest_copy = next(iter(self._copies.values()), None)
            if oldest_copy is not None and oldest_copy.plan_id > plan_id:
                self._copied_at = now

    def copied(self, done: TransferDone, now: float) -> None:
        """A rank has made copies, or could not. Unknown ones are passed over."""
        self._copied_at = now
        for transfer_id in done.transfer_ids:
            copy = self._copies.get(transfer_id)
            if copy is not None:
                copy.ranks_left.discard(done.rank)
                if not copy.ranks_left:
                    del self._copies[transfer_id]

    def clear(self, *, still_computing: bool = False) -> None:
        """Nobody is going to answer any more, or it does not matter. `still_computing`: the next plan has to wait for these."""
        self._num_tokens_left = self._num_tokens_left + sum(watched.num_tokens for watched in self._plans) if still_computing else 0
        self._plans.clear()
        self._copies.clear()

    def late(self, now: float) -> tuple[list[int], str]:
        """Ranks that are past the deadline of the oldest plan, or make no copies; and what they have not done.

        To be asked every second: one who was away himself, because everything was stopped, gives everybody more time.
        """
        if self._looked_at is not None and now - self._looked_at > _AWAY_S:
            self._since = self._copied_at = now
        self._looked_at = now
        if self._plans:
            oldest, seconds = self._plans[0], now - self._since
            if seconds > self._timeout_s + self._timeout_s_per_token * oldest.num_tokens:
                return _told(oldest.ranks_left, f"did not complete a step in {seconds:.0f} s")
        seconds = (self._answered_at if self._plans else now) - self._copied_at
        if self._copies and seconds > self._timeout_s:
            ranks = {rank for copy in self._copies.values() for rank in copy.ranks_left}
            return _told(ranks, f"did not copy a block in {seconds:.0f} s")
        return [], ""


def _told(ranks: set[int], reason: str) -> tuple[list[int], str]:
    """Of several ranks one may hang, and the others wait for it in the middle of a step: which one it is cannot be seen from here."""
    late = sorted(ranks)
    return late, reason if len(late) == 1 else f"{reason}, like ranks {', '.join(map(str, late))} together, of which one may keep the others waiting"
