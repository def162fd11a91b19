"""What the core counts, and the snapshot others see of it.

Counters only grow within an epoch; gauges are read off queues and memory when a snapshot is due. Nothing
here decides anything.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from pagemill.messages.frontend import StatsSnapshot
from scheduler.core_config import CoreConfig
from scheduler.decisions import Decisions
from scheduler.events import Adopt
from scheduler.kv_memory import KvMemory
from scheduler.queues import Queues
from scheduler.slices import PlannedSlice
from scheduler.swapping import Swapping

#: Upper bounds of the histogram of tokens per step; the last bucket has no bound.
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_UNBOUNDED = 2**31 - 1
#: Upper bounds, in seconds, of the histogram of how long preempted sequences did not run.
RESUME_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))


@dataclass(slots=True)
class Counters:
    """Owned by the core; everything is counted from the start of the epoch."""

    num_plans: int = 0
    num_steps: int = 0  #: plans with slices that are acknowledged
    num_dropped: int = 0  #: messages of older epochs, or about what is no longer known
    tokens_computed: int = 0
    tokens_recomputed: int = 0
    tokens_generated: int = 0
    core_rebuilds: int = 0
    sequences_received: int = 0
    sequences_finished: dict[str, int] = field(default_factory=dict)  #: by finish reason, or "rejected"
    steps_with_tokens: dict[int, int] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    resume_seconds: dict[float, int] = field(default_factory=dict)
    resume_seconds_sum: float = 0.0
    changed: bool = True  #: something moved since the last snapshot
    last_snapshot: float = float("-inf")

    def count_plan(self, planned: list[PlannedSlice]) -> None:
        self.num_plans += 1
        self.changed = True
        if not planned:
            return
        num_tokens = sum(piece.num_tokens for piece in planned)
        self.tokens_computed += num_tokens
        index = bisect_left(STEP_TOKEN_BUCKETS, num_tokens)
        bound = STEP_TOKEN_BUCKETS[index] if index < len(STEP_TOKEN_BUCKETS) else _UNBOUNDED
        self.steps_with_tokens[bound] = self.steps_with_tokens.get(bound, 0) + 1

    def count_step(self, seconds: dict[str, float]) -> None:
        self.num_steps += 1
        for part, value in seconds.items():
            self.step_seconds[part] = self.step_seconds.get(part, 0.0) + value

    def count_resume(self, seconds: float) -> None:
        bound = RESUME_BUCKETS[bisect_left(RESUME_BUCKETS, seconds)]
        self.resume_seconds[bound] = self.resume_seconds.get(bound, 0) + 1
        self.resume_seconds_sum += seconds

    def adopt(self, event: Adopt) -> None:
        """What happened while there was no core is counted by the next."""
        self.core_rebuilds = event.core_rebuilds
        self.sequences_received += event.sequences_received
        self.sequences_finished |= event.sequences_finished

    def count_end(self, reason: str) -> None:
        self.sequences_finished[reason] = self.sequences_finished.get(reason, 0) + 1

    def is_snapshot_due(self, config: CoreConfig, now: float) -> bool:
        interval = config.snapshot_interval_s if self.changed else config.idle_snapshot_interval_s
        return now - self.last_snapshot >= interval


def slot_utilization(queues: Queues, memory: KvMemory) -> float:
    """Distinct positions that are computed, or are being computed, by the positions of all used blocks; 1.0 if none is used.

    Only the last blocks of sequences are not full, and those are never shared, so everything else of a used
    block is computed. A block behind a fence holds nothing that anybody can use.
    """
    num_positions = memory.pool.num_used * memory.block_size
    if num_positions == 0:
        return 1.0
    wasted = memory.pool.num_fenced * memory.block_size
    for sequence in (*queues.running, *queues.preempted):
        unused = len(sequence.tables[0]) * memory.block_size - sequence.num_computed_tokens - sequence.num_planned_tokens
        if unused:
            wasted += unused * (sum(table[len(table) - 1] >= 0 for table in sequence.tables) if sequence.num_absent else memory.num_groups)
    return (num_positions - wasted) / num_positions


def snapshot(
    config: CoreConfig, queues: Queues, memory: KvMemory, swapping: Swapping, decisions: Decisions, counters: Counters, num_suspects: int
) -> StatsSnapshot:
    """Gauges of this moment and counters so far."""
    pool, swap, rates = memory.pool, swapping.swap, swapping.transfers.rates
    return StatsSnapshot(
        epoch=config.epoch,
        steps=counters.num_steps,
        num_waiting=len(queues.waiting),
        num_running=len(queues.running),
        num_preempted=len(queues.preempted),
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_cached=pool.num_cached,
        blocks_used=pool.num_used,
        swap_slots_total=swap.total,
        swap_slots_free=swap.num_free,
        swap_slots_cached=swap.num_cached,
        swap_slots_held=swap.num_used,
        slot_utilization=slot_utilization(queues, memory),
        transfers_in_flight=len(swapping.transfers),
        preemptions=dict(decisions.preemptions),
        swapped_bytes={direction: rate.total_bytes for direction, rate in rates.items()},
        swap_seconds={direction: rate.total_seconds for direction, rate in rates.items()},
        tokens_moved=swapping.num_moved_tokens,
        early_copies=swapping.transfers.num_early_copies,
        resume_seconds=dict(counters.resume_seconds),
        resume_seconds_sum=counters.resume_seconds_sum,
        prefix_query_tokens=memory.num_query_tokens,
        prefix_hit_tokens=memory.num_hit_tokens,
        arena_hit_tokens=swapping.num_arena_hit_tokens,
        tokens_computed=counters.tokens_computed,
        tokens_recomputed=counters.tokens_recomputed,
        tokens_generated=counters.tokens_generated,
        steps_with_tokens=dict(counters.steps_with_tokens),
        step_seconds=dict(counters.step_seconds),
        dropped_messages=counters.num_dropped,
        sequences_received=counters.sequences_received,
        sequences_finished=dict(counters.sequences_finished),
        num_suspects=num_suspects,
        core_rebuilds=counters.core_rebuilds,
        # Those that wait have computed whole blocks, if any, and left behind what their windows have passed.
        blocks_dead=sum(memory.windows.num_dead_blocks(sequence) for sequence in (*queues.running, *queues.preempted)),
    )
