"""Scheduler and workers: rows and plans one way, acknowledgements the other.

Everything carries the scheduler's epoch but `WorkerReady`, which is what a core is built from. The same bytes go to every
rank, and each rank answers for itself. `Hello` precedes everything and is dealt with by the channel.
"""

from __future__ import annotations

from typing import Literal

from pagemill.ids import PlanId, RowId, SeqId
from pagemill.messages.sequences import KvGroup, SamplingParams, TokenLogprobs
from pagemill.messages.wire import Message, Record

RowOutcome = Literal["accepted", "deferred", "failed"]
Tier = Literal["device", "arena"]


# --- scheduler -> worker ---------------------------------------------------------------------------------


class InstallRow(Message):
    """Makes a row: the worker's cached place for a running sequence. Sent once, before the first slice that names it.

    What the worker keeps per row is a pure function of what it was sent. A row number is reused only
    after every plan that names it is acknowledged; `version` tells its uses apart.
    """

    epoch: int
    row: RowId
    version: int
    seq_id: SeqId
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: bytes  #: packed int32: the whole known history, prompt first
    block_tables: tuple[bytes, ...]  #: packed int32, one per KV group


class Slice(Record, gc=False):
    """One row's share of a step: compute `num_tokens` positions from `start` on, then sample if `sample`.

    `new_token_ids` are appended to the row's history first (packed int32; usually the one token drawn in
    an earlier step). If `after_plan` is not NONE, the input is the token that plan drew for this row
    instead. `new_block_ids` extend the row's tables, one packed entry per KV group.
    """

    row: RowId
    version: int
    start: int
    num_tokens: int
    sample: bool
    new_token_ids: bytes
    after_plan: PlanId
    new_block_ids: tuple[bytes, ...]


class Transfer(Record, gc=False):
    """One block copied between tiers, closed by a `TransferDone` that names it.

    It copies what the plans before its own have left. A transfer never overtakes an earlier one of its block or
    its slot. A forward waits for it only if `needed_by` names its plan (NONE: no plan waits); then that forward
    may overwrite the block that was copied out, or read the one that arrives.
    """

    transfer_id: int
    from_tier: Tier
    from_id: int
    to_tier: Tier
    to_id: int
    needed_by: PlanId


class Plan(Message):
    """The order for one step, the same bytes to every rank. Closed by a `StepDone` with the same plan id.

    Without slices it only starts transfers. `StepDone` does not wait for transfers that no forward needs.
    """

    epoch: int
    plan_id: PlanId
    slices: tuple[Slice, ...]
    transfers: tuple[Transfer, ...]
    released_rows: tuple[RowId, ...]  #: rows the core will not name again in their current version


# --- worker -> scheduler ---------------------------------------------------------------------------------


class WorkerReady(Message):
    """Sent by each worker after loading and warming up: geometry and measured rates. The core is built from the minimum over ranks."""

    rank: int
    num_blocks: int
    block_size: int  #: tokens per block, in every KV group
    block_bytes: int
    max_model_len: int
    deterministic: bool  #: the start-up check passed and the mode is on
    weight_bytes: int
    prefill_tok_s: float  #: measured in warm-up
    num_swap_slots: int  #: of `block_bytes` each, mapped and resident; 0 without an arena
    swap_out_bytes_s: float  #: measured in warm-up, 0.0 without an arena
    swap_in_bytes_s: float
    groups: tuple[KvGroup, ...] = (KvGroup(),)  #: in the order of a row's block tables


class RowResult(Record):
    """The outcome of one sampling slice, or of any slice that failed. Slices not named here were computed and not sampled."""

    row: RowId
    version: int
    outcome: RowOutcome
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    error: str  #: from a fixed catalogue when failed, else ""


class StepDone(Message):
    """Acknowledges one plan."""

    epoch: int
    rank: int
    plan_id: PlanId
    results: tuple[RowResult, ...]
    #: By part, one after another: agree (on the plan, with other ranks), swap_wait (copies its forward waited for), prepare, forward,
    #: sample, and reduce, which is what forward and sample took together with other ranks and is no part of theirs.
    seconds: dict[str, float]


class TransferDone(Message):
    """Acknowledges transfers of one direction that ended alike. Each is complete when every rank has said so.

    `ok` is false if the copy failed: then what lies at its destination is not to be used. If a forward waited for it,
    this precedes the `StepDone` of that plan, whose results for the sequence are void then.
    """

    epoch: int
    rank: int
    transfer_ids: tuple[int, ...]
    ok: bool
    seconds: float  #: spent copying these


class RowMissing(Message):
    """A plan named a (row, version) this worker does not hold. The plan changed nothing; the core installs the row and plans again."""

    epoch: int
    rank: int
    plan_id: PlanId
    row: RowId
    version: int


SchedulerToWorker = InstallRow | Plan
WorkerToScheduler = WorkerReady | StepDone | TransferDone | RowMissing
