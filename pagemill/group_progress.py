"""The progress of tensor-parallel ranks, each of which loads its share of one model, as the progress of one. Pure.

Ranks go through the same phases, not quite together. The group is in the phase of the last of them, and as far in it as
they are on average. Must not know what the phases are, nor how progress is shown.
"""

from __future__ import annotations

from pagemill.messages.control import Progress


def group_name(num_ranks: int) -> str:
    """What the workers together are called, for people."""
    return "worker 0" if num_ranks == 1 else f"workers 0-{num_ranks - 1}"


class GroupProgress:
    """What the ranks of the newest incarnation have said."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._incarnation = 0
        self._phases: list[str] = []  #: in the order in which any rank first reached them
        self._latest: dict[int, Progress] = {}  #: by rank, without those that have said nothing yet

    def add(self, rank: int, incarnation: int, progress: Progress) -> Progress:
        """One rank's report in, the group's out."""
        if incarnation != self._incarnation:
            self._incarnation, self._phases, self._latest = incarnation, [], {}
        if progress.phase not in self._phases:
            self._phases.append(progress.phase)
        self._latest[rank] = progress
        at_the_start = Progress(phase=self._phases[0], fraction=0.0, detail="")
        reports = [self._latest.get(other, at_the_start) for other in range(self._num_ranks)]
        phase = min((report.phase for report in reports), key=self._phases.index)
        behind = [report for report in reports if report.phase == phase]
        num_beyond = self._num_ranks - len(behind)
        slowest = min(behind, key=lambda report: report.fraction)
        is_common = all(report.detail == slowest.detail for report in reports)
        detail = slowest.detail if is_common or not slowest.detail else f"{slowest.detail}, the slowest of {self._num_ranks} ranks"
        return Progress(phase=phase, fraction=(num_beyond + sum(report.fraction for report in behind)) / self._num_ranks, detail=detail)
