"""The core as operators see it in GET /debug/state: names, counts and whether the books balance."""

from __future__ import annotations

from pagemill.messages import BlockCounts, DebugState, InvariantReport, SequenceState, SwapSlotCounts
from scheduler.core import SchedulerCore
from scheduler.invariants import InvariantError, check


def debug_state(core: SchedulerCore) -> DebugState:
    """A picture of this moment; checks every invariant for it."""
    pool, swap = core.memory.pool, core.swapping.swap
    return DebugState(
        epoch=core.config.epoch,
        steps=core.counters.num_steps,
        plans_in_flight=len(core.plans),
        sequences=[
            SequenceState(
                request_id=sequence.request_id,
                seq_id=sequence.seq_id,
                status=sequence.status.value,
                num_tokens=sequence.num_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                blocks=sequence.num_device_blocks,
                swap_slots=sum(len(slots) for slots in sequence.slots),
                preemptions=sequence.num_preemptions,
            )
            for sequence in core.queues
        ],
        blocks=BlockCounts(total=pool.num_blocks, free=pool.num_free, cached=pool.num_cached, used=pool.num_used),
        swap_slots=SwapSlotCounts(total=swap.total, free=swap.num_free, cached=swap.num_cached, held=swap.num_used),
        invariants=_report(core),
    )


def _report(core: SchedulerCore) -> InvariantReport:
    try:
        check(core)
    except InvariantError as error:
        return InvariantReport(ok=False, error=str(error))
    return InvariantReport(ok=True, error=None)
