"""What becomes of a plan's answers: tokens, progress, ends and failures of the sequences it named.

Results that arrive for a preempted sequence are applied: its tokens always, what it computed unless it has given that
up since. A failure concerns its sequence and the KV that it has computed, which nobody else is to find. Which plan an
answer is about, and whether all ranks have given it, is the core's business.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block_table import blocks_for
from pagemill.ids import NO_PLAN, NONE
from pagemill.messages.sequences import FinishReason, SequenceKey
from pagemill.messages.worker import RowResult
from scheduler.counters import Counters
from scheduler.kv_memory import KvMemory
from scheduler.outputs import Outputs
from scheduler.plans import PlanInFlight, SliceInFlight
from scheduler.rows import Rows
from scheduler.sequence import Sequence, Status
from scheduler.slices import PlannedSlice
from scheduler.suspicion import Suspects
from scheduler.swapping import Swapping


class Results:
    """Works on the core's own parts. `plans` is the core's list of plans in flight, `longest` how many tokens any one sequence may have."""

    def __init__(
        self,
        memory: KvMemory,
        swapping: Swapping,
        rows: Rows,
        suspects: Suspects,
        plans: list[PlanInFlight],
        counters: Counters,
        outputs: Outputs,
        *,
        longest: int,
        on_end: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self.current: SequenceKey | None = None  #: the sequence whose result is being applied
        self._longest, self._on_end = longest, on_end
        self._memory, self._swapping, self._rows, self._suspects = memory, swapping, rows, suspects
        self._plans, self._counters, self._outputs = plans, counters, outputs

    def apply(self, slice_: SliceInFlight, result: RowResult | None) -> None:
        """One slice's outcome. A sequence preempted meanwhile keeps its new tokens, and what it computed unless it gave that up."""
        piece = slice_.piece
        sequence = piece.sequence
        self.current = sequence.key
        error = _error_of(piece, result)
        if error:
            self._outputs.emit(sequence, sequence.num_output_tokens, (), "error", error=error)
            self._distrust(sequence)
            self._on_end(sequence, "error")
            return
        deferred = result is not None and result.outcome == "deferred"
        if slice_.counts():
            if not deferred:
                self._advance(sequence, piece.start + piece.num_tokens)
                if piece.num_tokens > 1:
                    sequence.has_prefilled = True
                else:
                    sequence.has_decoded = True
                if sequence.suspicion is not None:
                    self._suspects.lift(sequence)
            elif piece.after_plan == NO_PLAN:
                # No token was drawn, so the last position is computed again for its logits.
                self._advance(sequence, piece.start + piece.num_tokens - 1)
            if deferred:
                self.give_back_unused(sequence)
        if piece.sample and result is not None and not deferred and piece.start + piece.num_tokens == sequence.num_tokens:
            self._append(sequence, result)

    def _distrust(self, sequence: Sequence) -> None:
        """It failed: its KV may be the reason, so nobody else is to find it."""
        for table in sequence.tables:
            for block in table:
                if block >= 0:
                    self._memory.pool.index.remove(block)
        self._memory.forget_behind(sequence)
        self._swapping.forget_copies(sequence)

    def give_back_unused(self, sequence: Sequence) -> None:
        """What is planned beyond the computed is not going to be: the row has heard of it, so it is installed anew."""
        self.void_slices(sequence)
        sequence.kv_version += 1
        sequence.num_planned_tokens = sequence.num_pending_tokens = 0
        self._rows.release(sequence, sequence.planned_in)
        if sequence.status is Status.RUNNING:
            self._memory.shrink(sequence, sequence.num_computed_tokens, sequence.planned_in)
        else:
            size = self._memory.block_size
            self._swapping.truncate(sequence, blocks_for(sequence.num_computed_tokens, size) * size)

    def _advance(self, sequence: Sequence, num_computed_tokens: int) -> None:
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens = num_computed_tokens
        if before < sequence.num_highest_computed:
            self._counters.tokens_recomputed += max(0, min(sequence.num_highest_computed, num_computed_tokens) - before)
        if num_computed_tokens > sequence.num_highest_computed:
            sequence.num_highest_computed = num_computed_tokens
        self._memory.confirm(sequence, before)
        if num_computed_tokens >= sequence.leaves_behind_at:
            self._memory.leave_behind(sequence, num_computed_tokens)

    def _append(self, sequence: Sequence, result: RowResult) -> None:
        """Takes over the tokens drawn, up to the first that ends the sequence."""
        first_index = sequence.num_output_tokens
        reason: FinishReason | None = None
        taken = 0
        for token in result.token_ids:
            sequence.token_ids.append(token)
            taken += 1
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                break
        self._counters.tokens_generated += taken
        stop_id = result.token_ids[taken - 1] if reason == "stop" else NONE
        self._outputs.emit(sequence, first_index, result.token_ids[:taken], reason, result=result, stop_id=stop_id)
        if reason is not None:
            self._on_end(sequence, reason)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.stop_ids and sequence.num_output_tokens >= sequence.sampling.min_tokens:
            return "stop"
        if sequence.num_output_tokens >= sequence.limits.max_tokens or sequence.num_tokens >= self._longest:
            return "length"
        return None

    def void_slices(self, sequence: Sequence) -> None:
        """A plan was not carried out for this sequence: neither can those be that follow it."""
        for plan in self._plans:
            for slice_ in plan.slices:
                slice_.is_void = slice_.is_void or slice_.piece.sequence is sequence


def _error_of(piece: PlannedSlice, result: RowResult | None) -> str:
    """Why a slice failed, "" if it did not. Sampling without a token is a failure too: such a sequence would never move again."""
    if result is not None and result.outcome == "failed":
        return result.error or "failed"
    has_outcome = result is not None and (result.outcome == "deferred" or result.token_ids)
    return "" if has_outcome or not piece.sample else "no token"
