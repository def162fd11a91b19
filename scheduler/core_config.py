"""The numbers a `SchedulerCore` is built from. Everything has a default, so a test builds a core in one line."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagemill.messages.sequences import KvGroup

Positive = Annotated[int, Meta(ge=1)]


class CoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one scheduler incarnation. Written at the head of an event log, so that a replay starts equal."""

    num_blocks: Positive = 1024
    block_size: Positive = 16
    groups: Annotated[tuple[KvGroup, ...], Meta(min_length=1)] = (KvGroup(),)  #: every block of every group has `block_size` tokens
    max_model_len: Positive = 8192
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 512
    max_num_queued: Positive = 4096  #: waiting sequences; more are rejected
    max_queued_tokens: Positive = 1 << 30  #: prompt tokens of all waiting sequences; more are rejected
    max_plans_in_flight: Annotated[int, Meta(ge=1, le=2)] = 1
    num_workers: Positive = 1
    scheduling_policy: str = "fcfs"
    prefix_caching: bool = True
    num_swap_slots: Annotated[int, Meta(ge=0)] = 0  #: of one block each; 0: preempted KV is always computed again
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    block_bytes: Positive = 1 << 20
    #: First rates for the planner, until transfers and steps have been measured.
    prefill_tok_s: float = 1000.0
    swap_out_bytes_s: float = 4e9
    swap_in_bytes_s: float = 4e9
    epoch: Positive = 1
    snapshot_interval_s: float = 0.1  #: at most one `StatsSnapshot` in this time while things change
    idle_snapshot_interval_s: float = 1.0
