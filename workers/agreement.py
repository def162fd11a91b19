"""Ranks carry out the same plans, or none: before each one they show each other what they have.

A scheduler can die between two sends, so a plan may reach one rank and not another, and who computed it alone would wait
for the others for ever. Each rank shows how far it has come: the scheduler it has met, the epoch, the plan. If all are
equally far they go on. Those behind give up what they have and read on; those ahead wait until the others have come:

    rank 0   scheduler 0, plan 17   scheduler 0, plan 17          (given up)           scheduler 1
    rank 1   scheduler 0, plan 17   scheduler 1: 17 was never read here   (waits)      scheduler 1

With the plan goes what a rank lacks to carry it out, so that all give the same answer. One rank agrees with itself at
no cost. Must not know what plans are made of or how they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.ids import NO_PLAN, NO_ROW, NONE, PlanId, RowId
from workers.parallel import TensorParallel

#: A row that is named by its number and version.
NamedRow = tuple[RowId, int]
#: How far a rank has come: (incarnation of its scheduler, epoch, plan). Later ones are greater.
_Progress = tuple[int, int, int]


@dataclass(frozen=True)
class Agreed:
    """All ranks have the same plan."""

    missing: NamedRow | None  #: held by some rank not at all: then nobody carries the plan out


class Agreement:
    """One rank's part in it. Every call returns when the other ranks have called, and raises PeerRankLost when one cannot any more."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._incarnation = NONE  #: of the scheduler met last

    def on_scheduler(self, incarnation: int) -> bool:
        """Whether all ranks have met this scheduler; False: another one has met a later one, of which this rank will hear as well."""
        self._incarnation = incarnation
        return self._compare((incarnation, NONE, NO_PLAN), None) is not None

    def on_plan(self, epoch: int, plan_id: PlanId, missing: NamedRow | None) -> Agreed | None:
        """None: the plan is to be given up, for not all ranks will ever have it. `missing` is a row that this rank lacks for it."""
        return self._compare((self._incarnation, epoch, plan_id), missing)

    def _compare(self, progress: _Progress, missing: NamedRow | None) -> Agreed | None:
        if self._parallel.size == 1:
            return Agreed(missing)
        shown = torch.tensor([*progress, *(missing or (NO_ROW, NONE))], dtype=torch.int64)
        while True:
            ranks = [tuple(rank) for rank in self._parallel.exchange(shown).tolist()]
            if max(rank[:3] for rank in ranks) > progress:
                return None
            if all(rank[:3] == progress for rank in ranks):
                return Agreed(next(((RowId(row), version) for *_, row, version in ranks if row != NO_ROW), None))
