"""The core as operators see it in GET /debug/state: names, counts and whether the books balance."""

from __future__ import annotations

from pagemill.ids import num_ids
from pagemill.messages.debug_state import BlockCounts, DebugState, InvariantReport, SequenceState, SwapSlotCounts
from scheduler.core import SchedulerCore
from scheduler.events import Revive
from scheduler.invariants import InvariantError, check
from scheduler.keeper import CoreKeeper
from scheduler.sequence import Status


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


def debug_state_without_core(keeper: CoreKeeper) -> DebugState:
    """Sequences wait for workers, and there is nothing else."""
    return DebugState(
        epoch=keeper.epoch,
        steps=0,
        plans_in_flight=0,
        sequences=[_held(number, revive) for number, revive in enumerate(keeper.held(), start=1)],
        blocks=BlockCounts(total=0, free=0, cached=0, used=0),
        swap_slots=SwapSlotCounts(total=0, free=0, cached=0, held=0),
        invariants=InvariantReport(ok=True, error=None),
    )


def _held(number: int, revive: Revive) -> SequenceState:
    num_tokens = num_ids(revive.request.prompt_ids) + num_ids(revive.request.output_ids)
    return SequenceState(
        request_id=revive.request.request_id,
        seq_id=number,
        status=Status.WAITING.value if revive.queue_s < 0 else Status.PREEMPTED.value,
        num_tokens=num_tokens,
        num_computed_tokens=0,
        num_cached_tokens=revive.num_cached_tokens,
        blocks=0,
        swap_slots=0,
        preemptions=revive.num_preemptions,
    )


def _report(core: SchedulerCore) -> InvariantReport:
    try:
        check(core)
    except InvariantError as error:
        return InvariantReport(ok=False, error=str(error))
    return InvariantReport(ok=True, error=None)
