"""Time averages over a run: how much of the KV memory in use holds nothing, and how many seats are taken.

A step is looked at while the worker has it, and counts as long as it took. Must not know where the engine's
clock comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.counters import slot_utilization
from scripts.lib.engine import Engine


@dataclass
class Occupancy:
    """Of one run; averages are by time unless they say otherwise."""

    num_steps: int = 0
    seconds: float = 0.0
    kv_waste: float = 0.0  #: 1 - distinct computed positions / (used blocks * block size)
    worst_kv_waste: float = 0.0  #: of any one step
    num_running: float = 0.0
    num_running_by_step: float = 0.0  #: averaged over steps, which is what a policy decides
    used_blocks: float = 0.0


def run_observed(engine: Engine) -> Occupancy:
    """Runs until every sequence has finished."""
    total = Occupancy()
    core = engine.core
    started = engine.clock()
    while engine.plan() or engine.transfers:
        if not engine.num_plans_in_flight:
            engine.wait()
            continue
        waste = 1.0 - slot_utilization(core.queues, core.memory)
        num_running, used_blocks = len(core.queues.running), core.memory.pool.num_used
        engine.apply()
        ended = engine.clock()
        elapsed, started = ended - started, ended
        total.num_steps += 1
        total.seconds += elapsed
        total.kv_waste += waste * elapsed
        total.worst_kv_waste = max(total.worst_kv_waste, waste)
        total.num_running += num_running * elapsed
        total.num_running_by_step += num_running
        total.used_blocks += used_blocks * elapsed
    engine.require_idle()
    for name in ("kv_waste", "num_running", "used_blocks"):
        setattr(total, name, getattr(total, name) / total.seconds)
    total.num_running_by_step /= total.num_steps
    return total
