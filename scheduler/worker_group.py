"""What the ranks of a group report becomes the numbers of one core, which asks the same of every rank.

Ranks hold parts of one model. What a block is must be the same on all of them, or they do not belong together; of what
there is and how fast it goes, the least over ranks counts. Pure: must not know how reports arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.config import SchedulerConfig
from pagemill.messages.worker import WorkerReady
from scheduler.core_config import CoreConfig

#: Fields of `WorkerReady` that are equal on ranks of one group.
_EQUAL = ("block_size", "block_bytes", "groups", "deterministic")


class RanksDiffer(Exception):
    """They do not belong together; the message is one line for the operator."""


def core_config(config: SchedulerConfig, reports: Mapping[int, WorkerReady]) -> CoreConfig:
    """A core for the workers that reported this, by rank. Raises RanksDiffer."""
    ranks = sorted(reports)
    ready = [reports[rank] for rank in ranks]
    for name in _EQUAL:
        _require_equal(name, {rank: getattr(reports[rank], name) for rank in ranks})
    return CoreConfig(
        num_blocks=min(report.num_blocks for report in ready),
        block_size=ready[0].block_size,
        groups=ready[0].groups,
        max_model_len=min(report.max_model_len for report in ready),
        # With more, those who come first would take every step, and the others hold KV for nothing.
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued=config.max_num_queued,
        max_queued_tokens=config.max_queued_tokens,
        max_plans_in_flight=config.max_plans_in_flight,
        num_swap_slots=min(report.num_swap_slots for report in ready),
        preemption=config.preemption,
        block_bytes=ready[0].block_bytes,
        prefill_tok_s=min(report.prefill_tok_s for report in ready),
        swap_out_bytes_s=min(report.swap_out_bytes_s for report in ready),
        swap_in_bytes_s=min(report.swap_in_bytes_s for report in ready),
        num_workers=len(ready),
        scheduling_policy=config.scheduling_policy,
        prefix_caching=config.prefix_caching,
    )


def _require_equal(name: str, found: Mapping[int, object]) -> None:
    ranks_with: dict[str, list[str]] = {}
    for rank, value in found.items():
        ranks_with.setdefault(str(value), []).append(str(rank))
    if len(ranks_with) > 1:
        stories = [f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for value, ranks in ranks_with.items()]
        raise RanksDiffer(f"the workers do not belong together: {name} is {' but '.join(stories)}")
