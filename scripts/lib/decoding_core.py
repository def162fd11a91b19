"""A scheduler core without workers, whose sequences have all computed their prompts and decode from now on."""

from __future__ import annotations

from pagemill.ids import pack_ids, unpack_ids
from pagemill.keys import prefix_keys, root_key
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from pagemill.messages.worker import Plan, RowResult, StepDone
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.events import Turn


def decoding_core(num_sequences: int, context: int, block_size: int = 16) -> SchedulerCore:
    """`context` tokens each, with room for some hundred more."""
    num_blocks = num_sequences * (context // block_size + 40)
    core = SchedulerCore(
        CoreConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=2 * context + 10_000,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_sequences * context,
        )
    )
    root = root_key(b"model", b"", b"domain")
    for number in range(num_sequences):
        prompt = pack_ids([number * 7 % 1000 + 1, *range(context - 1)])
        keys = prefix_keys(root, unpack_ids(prompt), block_size)
        core.handle(AddRequest(SequenceKey(0, 1, number, 0), f"r{number}", prompt, b"", SamplingParams(), Limits(10_000), 1, 0, float(number), root, keys), 0.0)
    answer(core, next_plan(core, 0.0), 0)
    return core


def next_plan(core: SchedulerCore, now: float) -> Plan:
    (plan,) = [effect for effect in core.handle(Turn(), now) if isinstance(effect, Plan)]
    return plan


def answer(core: SchedulerCore, plan: Plan, step: int) -> None:
    """Each sequence has drawn a token."""
    results = tuple(RowResult(piece.row, piece.version, "accepted", (step % 1000,), (), "") for piece in plan.slices if piece.sample)
    core.handle(StepDone(plan.epoch, 0, plan.plan_id, results, {}), float(step))
