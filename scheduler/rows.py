"""Rows: the numbered places in which workers cache what they were told of a running sequence.

The core owns the numbers. A row is installed once with everything known, then extended by slices. Its
number is reused only when every plan that names it is acknowledged; the version tells its uses apart.
"""

from __future__ import annotations

import heapq

from pagemill.ids import NO_PLAN, NO_ROW, PlanId, RowId
from pagemill.messages.worker import InstallRow, Slice
from scheduler.sequence import Sequence
from scheduler.slices import PlannedSlice


class Rows:
    """Hands out row numbers, and turns planned slices into what workers must be told."""

    def __init__(self, epoch: int, num_groups: int) -> None:
        self._epoch = epoch
        self._no_blocks = (b"",) * num_groups
        self._free: list[int] = []  #: a heap: small numbers first
        self._num_rows = 0
        self._last_version = 0
        self._fenced: dict[RowId, PlanId] = {}
        self._released: list[RowId] = []  #: not yet told to the workers

    def install(self, sequence: Sequence) -> InstallRow:
        """Gives the sequence a row. The message must precede the plan that first names it."""
        if self._free:
            sequence.row = RowId(heapq.heappop(self._free))
        else:
            sequence.row = RowId(self._num_rows)
            self._num_rows += 1
        self._last_version += 1
        sequence.row_version = self._last_version
        sequence.num_sent_tokens = sequence.num_tokens
        sequence.num_sent_blocks = len(sequence.tables[0])
        return InstallRow(
            epoch=self._epoch,
            row=sequence.row,
            version=sequence.row_version,
            seq_id=sequence.seq_id,
            sampling=sequence.sampling,
            seed=sequence.seed,
            num_prompt_tokens=sequence.num_prompt_tokens,
            token_ids=sequence.token_ids.tobytes(),
            block_tables=tuple(table.packed() for table in sequence.tables),
        )

    def slice_of(self, planned: PlannedSlice) -> Slice:
        """The slice in the words of a row, with the tokens and blocks its workers do not know yet."""
        sequence = planned.sequence
        new_tokens = b""
        num_tokens = len(sequence.token_ids)
        if sequence.num_sent_tokens < num_tokens:
            new_tokens = sequence.token_ids[sequence.num_sent_tokens :].tobytes()
            sequence.num_sent_tokens = num_tokens
        if planned.after_plan != NO_PLAN:
            sequence.num_sent_tokens = planned.start + 1  # the workers take that one from their own row
        new_blocks = self._no_blocks
        num_blocks = len(sequence.tables[0].ids)
        if sequence.num_sent_blocks < num_blocks:
            new_blocks = tuple(table.packed(sequence.num_sent_blocks) for table in sequence.tables)
            sequence.num_sent_blocks = num_blocks
        return Slice(sequence.row, sequence.row_version, planned.start, planned.num_tokens, planned.sample, new_tokens, planned.after_plan, new_blocks)

    def release(self, sequence: Sequence, fence: PlanId) -> None:
        """Takes the row away; the number is free once plan `fence` is acknowledged."""
        row = sequence.row
        if row == NO_ROW:
            return
        sequence.row = NO_ROW
        self._released.append(row)
        if fence == NO_PLAN:
            heapq.heappush(self._free, row)
        else:
            self._fenced[row] = fence

    def acknowledge(self, plan: PlanId) -> None:
        """Lifts the fences of this plan and of all before it."""
        for row in [row for row, fence in self._fenced.items() if fence <= plan]:
            del self._fenced[row]
            heapq.heappush(self._free, row)

    def take_released(self, installed: list[InstallRow]) -> tuple[RowId, ...]:
        """Rows the workers may forget with the next plan; those it has just been given anew are not among them."""
        kept = {install.row for install in installed}
        released = tuple(sorted({row for row in self._released if row not in kept}))
        self._released.clear()
        return released

    def accounted(self) -> tuple[list[int], dict[RowId, PlanId], int]:
        """Free rows, fenced rows, and how many numbers there are: for invariants."""
        return sorted(self._free), dict(self._fenced), self._num_rows
