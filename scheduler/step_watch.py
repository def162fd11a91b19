"""Watches plans in flight: a step that takes longer than its tokens can explain means that its worker hangs.

Plans are carried out one after the other, so only the oldest is on the clock. Pure: whoever asks brings the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagemill.messages import Plan, PlanId


@dataclass(slots=True)
class _Watched:
    plan_id: PlanId
    num_tokens: int
    ranks_left: set[int]


class StepWatch:
    """One for each incarnation of the worker group."""

    def __init__(self, timeout_s: float, timeout_s_per_token: float, num_ranks: int) -> None:
        self._timeout_s, self._timeout_s_per_token = timeout_s, timeout_s_per_token
        self._num_ranks = num_ranks
        self._plans: deque[_Watched] = deque()  #: oldest first
        self._since = 0.0  #: when the oldest could begin

    def sent(self, plan: Plan, now: float) -> None:
        if not self._plans:
            self._since = now
        num_tokens = sum(piece.num_tokens for piece in plan.slices)
        self._plans.append(_Watched(plan.plan_id, num_tokens, set(range(self._num_ranks))))

    def answered(self, plan_id: PlanId, rank: int, now: float) -> None:
        """A rank has done the plan, or said that it cannot. Unknown plans are passed over."""
        for watched in self._plans:
            if watched.plan_id == plan_id:
                watched.ranks_left.discard(rank)
        while self._plans and not self._plans[0].ranks_left:
            self._plans.popleft()
            self._since = now

    def clear(self) -> None:
        """Nobody is going to answer any more, or it does not matter."""
        self._plans.clear()

    def late(self, now: float) -> tuple[list[int], float]:
        """Ranks that are past the deadline of the oldest plan, and for how many seconds it has been on the clock."""
        if not self._plans:
            return [], 0.0
        oldest, seconds = self._plans[0], now - self._since
        limit_s = self._timeout_s + self._timeout_s_per_token * oldest.num_tokens
        return (sorted(oldest.ranks_left), seconds) if seconds > limit_s else ([], seconds)
