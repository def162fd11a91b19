"""KV memory in use is KV memory that holds something: time-averaged waste, with long prompts cut into chunks."""

from __future__ import annotations

import pytest

from scripts.lib.occupancy import run_observed
from scripts.lib.simulation import SimulatedEngine, StepCost
from scripts.lib.workloads import mean_tokens, mixed_lengths

BLOCK_SIZE = 16


def engine_with_mixed_lengths(seed: int, *, num_requests: int = 60, cost: StepCost | None = None, num_blocks: int = 1024) -> SimulatedEngine:
    engine = SimulatedEngine(cost, check_invariants=True, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=256)
    requests = mixed_lengths(num_requests, seed, 2**15)
    assert mean_tokens(requests) == 400
    assert max(len(request.prompt_ids) for request in requests) == 2000
    for request in requests:
        engine.add(request.prompt_ids, max_tokens=request.num_output_tokens)
    return engine


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cost", [StepCost(1.0, 0.0), StepCost(0.0, 1.0)], ids=["by steps", "by tokens"])
def test_waste_is_at_most_one_fortieth_at_a_mean_of_400_tokens(seed: int, cost: StepCost) -> None:
    occupancy = run_observed(engine_with_mixed_lengths(seed, cost=cost))
    assert occupancy.kv_waste <= 0.025
    assert occupancy.num_running > 8  # the memory was in use


def test_waste_stays_small_while_memory_is_short() -> None:
    engine = engine_with_mixed_lengths(1, num_blocks=140)
    assert run_observed(engine).kv_waste <= 0.025
    assert engine.core.preemption.decisions.num_preempted("recompute") > 0


def test_no_sequence_ever_wastes_a_whole_block() -> None:
    engine = engine_with_mixed_lengths(3, num_requests=20)
    while engine.plan():
        for sequence in engine.core.queues.running:
            computed = sequence.num_computed_tokens + sequence.num_planned_tokens
            assert len(sequence.tables[0]) * BLOCK_SIZE - computed < BLOCK_SIZE
        engine.apply()
    engine.require_idle()
