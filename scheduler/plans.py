"""Plans in flight: what was ordered and not yet acknowledged by all ranks.

Row and KV version are noted with each slice, because a sequence may lose its row, or give up what is being computed,
before the answer comes. Every rank answers every plan, and all must say the same: which rows drew which tokens, or which
row is missing. Logprobs need not be equal bit for bit, the text of an error tells nothing new, and times are each rank's own.
"""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from pagemill.ids import PlanId, RowId
from pagemill.messages.worker import RowMissing, RowOutcome, RowResult, StepDone
from scheduler.ranks import without
from scheduler.slices import PlannedSlice

#: What ranks must agree on of one row.
_Fate = tuple[RowId, int, RowOutcome, tuple[int, ...]]


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
    """Complete when no rank is left. Results are those of rank 0, times those of the slowest."""

    plan_id: PlanId
    slices: list[SliceInFlight]
    ranks_left: int  #: those that have not answered, as bits
    is_alone: bool = False  #: a suspect has it to itself
    first: StepDone | RowMissing | None = None  #: the answer that the others are compared with
    results: dict[tuple[RowId, int], RowResult] = {}
    seconds: dict[str, float] = {}  #: by part, each of the rank that took longest for it
    step_s: float = 0.0  #: all parts together, of the rank that took longest
    computing_s: float = 0.0  #: without what it waited for copies

    def take(self, answer: StepDone | RowMissing) -> str:
        """Takes the answer of a rank that is left. Returns how it differs from the others', "" if it does not."""
        if self.first is None:
            self.first = answer
        elif difference := _difference(self.first, answer):
            return f"answers differ: rank {answer.rank} and rank {self.first.rank} disagree about {difference} of plan {self.plan_id}"
        self.ranks_left = without(self.ranks_left, answer.rank)
        if isinstance(answer, StepDone):
            if answer.rank == 0:
                self.results = {(result.row, result.version): result for result in answer.results}
            for part, seconds in answer.seconds.items():
                self.seconds[part] = max(seconds, self.seconds.get(part, 0.0))
            step_s = sum(answer.seconds.values())
            self.step_s = max(self.step_s, step_s)
            self.computing_s = max(self.computing_s, step_s - answer.seconds.get("swap_wait", 0.0))
        return ""


def _difference(one: StepDone | RowMissing, other: StepDone | RowMissing) -> str:
    """What two ranks disagree about, "" if they do not."""
    if isinstance(one, RowMissing) or isinstance(other, RowMissing):
        are_equal = isinstance(one, RowMissing) and isinstance(other, RowMissing) and (one.row, one.version) == (other.row, other.version)
        return "" if are_equal else "the missing row"
    for first, second in zip_longest(one.results, other.results):
        if first is None or second is None:
            return "the number of results"
        if _fate(first) != _fate(second):
            return f"row {first.row}"
    return ""


def _fate(result: RowResult) -> _Fate:
    return (result.row, result.version, result.outcome, result.token_ids)
