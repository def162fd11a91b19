"""Every message that crosses a process border, grouped by direction; the unions stand at the end.

Rules. All structs are frozen and positional (``array_like``), for both ends come from one distribution; the
handshake (`Hello`) refuses anything else. Bulk integers travel as packed native int32 (`pack_ids` /
`unpack_ids`), bulk floats as packed native float32. No pickle anywhere. Everything to or from a worker, and
every message to a frontend, carries the scheduler's *epoch*: an older one is dropped and counted, never
asserted on. Requests from frontends are idempotent and carry none.

This module imports msgspec and nothing else of ours: it must not know any process.
"""

from __future__ import annotations

from array import array
from typing import Literal, NewType

import msgspec

SeqId = NewType("SeqId", int)
BlockId = NewType("BlockId", int)
SwapSlotId = NewType("SwapSlotId", int)
RowId = NewType("RowId", int)
PlanId = NewType("PlanId", int)

ProcessKind = Literal["frontend", "scheduler", "worker"]
FinishReason = Literal["stop", "length", "abort", "error"]
RowOutcome = Literal["accepted", "deferred", "failed"]
Tier = Literal["device", "arena"]
#: What becomes of a victim's blocks: all stay for now, some are copied to the arena, or some are dropped and computed again.
VictimKind = Literal["keep", "swap", "recompute"]
#: Why somebody yields: a running sequence grows, one wants to start or to come back, a seat is wanted, or it was asked for.
PreemptionReason = Literal["growth", "start", "seat", "forced"]

#: An id that stands for "none".
NONE = -1
NO_PLAN = PlanId(NONE)
NO_ROW = RowId(NONE)
#: An entry of a window group's block table whose positions lie behind the window: no step reads or writes it again.
BEHIND = -2


def pack_ids(ids: list[int] | array[int]) -> bytes:
    """Token, block or slot ids as packed native int32. Raises OverflowError outside int32."""
    return (ids if isinstance(ids, array) else array("i", ids)).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """The inverse of `pack_ids`. Raises ValueError if the length is no multiple of four."""
    ids = array("i")
    ids.frombytes(packed)
    return ids


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A member of one of the unions below: positional, tagged with its class name."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message: positional, untagged."""


# --- handshake -------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of either end of a zmq pair. A wrong token or version closes the pair."""

    token: bytes
    protocol_version: int
    kind: ProcessKind
    index: int
    incarnation: int

    def __repr__(self) -> str:
        return f"Hello({self.kind} {self.index}, incarnation {self.incarnation})"


# --- what a model's memory is made of ---------------------------------------------------------------------


class KvGroup(Record):
    """Decoder layers that share one block table: a sequence has as many tables as the model has groups, of one block size."""

    window: int = 0  #: positions that a position attends to, itself included; 0: all before it


# --- what a sequence asks for ----------------------------------------------------------------------------


class SamplingParams(Record):
    """How one sequence samples. Validated by the frontend; the worker still range-checks every index.

    Order: logit bias, penalties, mask of stop ids before `min_tokens`, divide by temperature, then
    min-p, top-k, top-p; the token is the argmax of what is left + Gumbel(seed, position, token id).
    """

    temperature: float = 1.0  #: below 1e-5: argmax, lowest id on a tie
    top_p: float = 1.0
    top_k: int = 0  #: 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  #: over prompt and output
    presence_penalty: float = 0.0  #: over output only
    frequency_penalty: float = 0.0  #: over output only
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = NONE  #: NONE: no logprobs; 0: only the chosen token's; k: the k best too
    min_tokens: int = 0  #: ids of `stop_token_ids` are masked before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  #: including the model's EOS ids, unless they are to be ignored


class Limits(Record):
    """When the core ends one sequence. EOS ids are already part of `SamplingParams.stop_token_ids`."""

    max_tokens: int  #: output tokens, at least 1
    max_queue_s: float = 0.0  #: seconds it may wait for its first slice; then it is rejected. 0: as long as it takes


class SequenceKey(Record, order=True):
    """The name of a sequence between a frontend and the scheduler. Adding one twice changes nothing."""

    frontend: int
    incarnation: int  #: of the frontend process
    request: int  #: the frontend's own counter
    choice: int  #: prompt index * n + choice of that prompt


# --- frontend -> scheduler -------------------------------------------------------------------------------


class AddRequest(Message):
    """One sequence to run. Answered by `SequenceOutput`s, the last of which has a finish reason.

    After a new scheduler a frontend sends it again with the outputs received so far; `arrival` keeps
    the order. Prefix keys are those of the prompt's full blocks, chained from `root` (`pagemill.keys`).
    """

    key: SequenceKey
    request_id: str  #: the public id, for logs and /debug/state
    prompt_ids: bytes  #: packed int32
    output_ids: bytes  #: packed int32, received so far
    sampling: SamplingParams
    limits: Limits
    seed: int  #: unsigned 64 bit; choice i of a request has its own
    priority: int  #: lower first
    arrival: float  #: seconds, wall clock
    root: bytes  #: 32 bytes: model fingerprint, adapter, cache domain; empty: keep out of the prefix cache
    prefix_keys: bytes  #: 32 bytes per full block of the prompt
    resubmitted: bool = False  #: taken once before, by a scheduler that is gone: no limit of a queue stands against it


class FinishRequest(Message):
    """The frontend found the end itself (a stop string): keep the first `keep` output tokens, free the rest.

    Not an abort: counts, cached blocks and later sessions see the kept tokens. No reply.
    """

    key: SequenceKey
    reason: FinishReason
    keep: int


class AbortRequest(Message):
    """The client went away. No reply; blocks are freed at once (behind the fence of a plan in flight)."""

    key: SequenceKey


class DebugStateQuery(Message):
    """Asks for a `DebugStateReply` with the same `query` number."""

    query: int


class DecisionsQuery(Message):
    """Asks for a `DecisionsReply` with the same `query` number: the newest `limit` decisions of the planner."""

    query: int
    limit: int


# --- scheduler -> frontend -------------------------------------------------------------------------------


class TokenLogprobs(Record, gc=False):
    """Of the raw logits, natural logarithm, finite (clamped at -9999.0)."""

    logprob: float  #: of the token drawn
    top_ids: bytes  #: packed int32, best first, lowest id first on a tie
    top_logprobs: bytes  #: packed float32


class SequenceOutput(Record):
    """New tokens of one sequence. `first_index` counts output tokens: lower is ignored, a gap is a fault."""

    key: SequenceKey
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  #: one per token, or none if not asked for
    finish_reason: FinishReason | None
    stop_token_id: int  #: the id that ended it (it is the last of token_ids), or NONE
    num_cached_tokens: int  #: prompt tokens that came from the prefix cache
    num_preemptions: int
    queue_s: float  #: seconds from arrival at the scheduler to the first slice
    error: str  #: from a fixed catalogue, "" if none


class Rejection(Record):
    """A sequence that will not run. `required` and `available` are tokens for the first two reasons and
    `queue_tokens`, sequences for `queue_full`, milliseconds for `queue_timeout`."""

    key: SequenceKey
    reason: Literal["exceeds_model_length", "exceeds_kv_cache", "queue_full", "queue_tokens", "queue_timeout", "draining", "invalid"]
    required: int
    available: int


class StepOutput(Message):
    """What one step (or one refusal) means for one frontend. At most one per frontend and `handle` batch."""

    frontend: int
    epoch: int
    outputs: tuple[SequenceOutput, ...]
    rejections: tuple[Rejection, ...]


class SchedulerReady(Message):
    """Sent once per epoch to each frontend, when all workers are ready. From here on requests are computed.

    After a restart of workers, or of the core in place, the scheduler still knows its sequences. A frontend that has met a new
    scheduler sends it what it is waiting for again.
    """

    epoch: int
    max_model_len: int  #: tokens, prompt and output together; the frontend validates with this, not its own guess
    block_size: int
    num_blocks: int
    num_swap_slots: int
    max_num_seqs: int
    deterministic: bool
    worker_incarnation: int = 0  #: of the workers that are ready: a frontend that has heard of their end takes no heart from it
    groups: tuple[KvGroup, ...] = (KvGroup(),)  #: as in `WorkerReady`


class StatsSnapshot(Message):
    """Gauges and counters of the core. Counters only grow within an epoch. Sent after steps, at most every 100 ms, and when idle every second."""

    epoch: int
    steps: int
    num_waiting: int
    num_running: int
    num_preempted: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int  #: unreferenced but indexed
    blocks_used: int  #: the rest; free + cached + used = total
    swap_slots_total: int
    swap_slots_free: int
    swap_slots_cached: int
    swap_slots_held: int
    slot_utilization: float  #: distinct computed positions / (used blocks * block size); 1.0 when none is used
    transfers_in_flight: int
    preemptions: dict[str, int]  #: "kind/reason" -> how many; the words are those of `Decision`
    swapped_bytes: dict[str, int]  #: copied so far, by direction: "out" to the arena, "in" to the device
    swap_seconds: dict[str, float]  #: time spent copying, by direction, of the slowest rank
    tokens_moved: int  #: positions swapped in or out on behalf of preempted sequences
    early_copies: int  #: blocks copied out ahead of need
    resume_seconds: dict[float, int]  #: preemption to running again: upper bucket bound -> how many, buckets separate and sparse
    resume_seconds_sum: float
    prefix_query_tokens: int
    prefix_hit_tokens: int  #: from the device
    arena_hit_tokens: int  #: from the arena
    tokens_computed: int  #: positions computed, recomputed ones included
    tokens_recomputed: int
    tokens_generated: int
    steps_with_tokens: dict[int, int]  #: plans by tokens: upper bucket bound -> how many, buckets separate and sparse
    step_seconds: dict[str, float]  #: cumulative, by part: schedule, worker parts, wait
    dropped_messages: int  #: older epochs, unknown names, frames that do not decode
    sequences_received: int  #: taken, rejected and resubmitted ones included
    #: By finish reason; "rejected" for those that did not run, "handed_on" for those that the next core receives. In every
    #: snapshot, received = finished + waiting + running + preempted.
    sequences_finished: dict[str, int]
    num_suspects: int  #: sequences that run alone, because a worker died while it computed them
    core_rebuilds: int  #: 1 if this epoch began because the core had failed, else 0
    blocks_dead: int = 0  #: of `blocks_used` those that sequences hold although no window reaches them any more
    #: `AddRequest`s that had come from the frontend that this is sent to, since its channel exists. Of what it has sent beyond
    #: these nothing is counted here yet.
    requests_heard: int = 0


class SequenceState(msgspec.Struct, frozen=True):
    """One live sequence in `DebugState` (these few structs are named fields, for they are shown as JSON)."""

    request_id: str
    seq_id: int
    status: str
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    blocks: int
    swap_slots: int
    preemptions: int


class BlockCounts(msgspec.Struct, frozen=True):
    """free + cached + used = total, always."""

    total: int
    free: int
    cached: int
    used: int


class SwapSlotCounts(msgspec.Struct, frozen=True):
    """free + cached + held = total, always."""

    total: int
    free: int
    cached: int
    held: int


class InvariantReport(msgspec.Struct, frozen=True):
    ok: bool
    error: str | None


class DebugState(msgspec.Struct, frozen=True):
    """The body of GET /debug/state."""

    epoch: int
    steps: int
    plans_in_flight: int
    sequences: list[SequenceState]
    blocks: BlockCounts
    swap_slots: SwapSlotCounts
    invariants: InvariantReport


class DebugStateReply(Message):
    """Answers the `DebugStateQuery` with the same number."""

    query: int
    state: DebugState


class VictimPrice(msgspec.Struct, frozen=True):
    """One sequence the planner looked at. Prices are seconds; a way that is not open has the price null."""

    request_id: str
    seq_id: int
    was_running: bool  #: false: preempted before, and what it still held was asked for
    blocks: int  #: it could free for this purpose
    blocks_to_copy: int  #: of these, not in the arena yet
    tokens: int  #: to compute again if they are dropped
    swap_s: float | None
    recompute_s: float | None
    yielded: bool  #: false: it was looked at and left alone
    kind: VictimKind  #: which way its blocks went, or would have gone
    freed: int  #: blocks it gave up


class Decision(msgspec.Struct, frozen=True):
    """Why somebody had to yield, who could have, at what price, and who did. Shown as JSON."""

    number: int  #: counts from 1 in an epoch
    at_s: float  #: the scheduler's clock, seconds, any origin
    step: int
    reason: PreemptionReason
    request_id: str  #: for whom
    seq_id: int
    blocks_wanted: int
    out_bytes_s: float  #: the measured rates that the prices come from
    in_bytes_s: float
    prefill_tok_s: float  #: near the start of a prompt; longer contexts cost more
    backlog_bytes: int  #: queued on the link when it was decided
    block_bytes: int
    swap_slots_left: int  #: free or droppable, before anybody yielded
    victims: list[VictimPrice]


class DecisionsReply(Message):
    """Answers the `DecisionsQuery` with the same number. Oldest first."""

    query: int
    now_s: float  #: the scheduler's clock, as `Decision.at_s`
    decisions: list[Decision]


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


# --- launcher <-> children (control socketpair; one frame, one message) ----------------------------------


class Start(Message):
    """First control frame to a child. Carries secrets, which therefore never stand on a command line."""

    kind: ProcessKind
    index: int
    incarnation: int
    epoch: int  #: schedulers: their first epoch, above all of earlier incarnations; others: 0, older than any
    token: bytes
    config: msgspec.Raw  #: msgpack of the child's own config struct (`pagemill.config`)
    listen_fd: int  #: frontends: the bound listening socket, else NONE
    arena_fd: int = NONE  #: workers: the memfd of the swap arena, NONE without one
    directory_fd: int = NONE  #: schedulers: the memfd of the KV directory (`kvstore.kv_directory`)
    injections: tuple[str, ...] = ()  #: faults to inject, for tests (`pagemill.injection`)
    rendezvous: str = ""  #: workers that are several: the file through which the ranks of this incarnation find each other

    def __repr__(self) -> str:
        return f"Start({self.kind} {self.index}, incarnation {self.incarnation}, epoch {self.epoch})"


class PeerUp(Message):
    """A peer exists at this address (the scheduler binds it, the others connect). Also an event of the core."""

    kind: ProcessKind
    index: int
    incarnation: int
    address: str


class PeerReady(Message):
    """Launcher to scheduler: this worker has loaded, lately or for a former scheduler, and owes its `WorkerReady` without further delay."""

    kind: ProcessKind
    index: int
    incarnation: int


class PeerLost(Message):
    """A peer is gone. Also an event of the core. Frontends hear of every process, for their 503."""

    kind: ProcessKind
    index: int
    incarnation: int
    reason: str = ""  #: how it ended, one line for the operator; not for clients


class Drain(Message):
    """Finish and exit: no new work; what still runs after `timeout_s` is ended. Also an event of the core."""

    timeout_s: float


class Reload(Message):
    """Launcher to child: its config anew, of which it takes over what may change at run time."""

    config: msgspec.Raw  #: as in `Start`

    def __repr__(self) -> str:
        return "Reload(...)"


class Alive(Message):
    """Child to launcher, every second, from its main loop: it gets on. A worker's forwards are watched by the scheduler instead."""


class Stuck(Message):
    """Scheduler to launcher: this peer does not do its work (a step past its deadline, numbers that are none). It is to be replaced."""

    kind: ProcessKind
    index: int
    incarnation: int
    reason: str  #: one line for the operator


class Explained(Message):
    """Scheduler to launcher: this many of the last deaths had a cause that is found and ended. They say nothing of the server's own health."""

    num_deaths: int


class Progress(Message):
    """Child to launcher, which passes it on to frontends for their 503 and shows it."""

    phase: str  #: "fetch", "weights", "prepare", "warmup", ...
    fraction: float  #: 0 to 1
    detail: str


class Ready(Message):
    """Child to launcher: this process can do its work. `detail` is one line for the operator."""

    detail: str
    worker_incarnation: int = NONE  #: schedulers: of the workers it has met; without them it is not ready any more


class Failed(Message):
    """Child to launcher before a non-zero exit: the one line an operator needs."""

    message: str


# --- events and effects that exist only inside the scheduler process -------------------------------------


class Suspicion(Record):
    """A worker died while it computed these positions of a sequence, which may or may not have been the cause.

    It is lifted when they have been computed.
    """

    first: int
    end: int
    alone: bool  #: they are computed in plans of their own from now on
    deaths_alone: int = 0  #: of workers, while nothing else was computed
    deaths: int = 1  #: of workers, in all


class Revive(Message):
    """A sequence of a former core, with what it has been through. Precedes all other events of a core but `Adopt`."""

    request: AddRequest  #: with all tokens that its frontend was sent
    added_at: float  #: on the scheduler's clock
    queue_s: float  #: negative: never started
    num_cached_tokens: int
    num_preemptions: int
    has_prefilled: bool  #: it has completed a slice of several tokens,
    has_decoded: bool  #: and one of a single token
    suspicion: Suspicion | None


class Adopt(Message):
    """The first event of a core that has had a predecessor: KV that has outlived it, and what was counted between the two."""

    blocks: tuple[tuple[BlockId, bytes], ...]  #: with their prefix keys
    swap_slots: tuple[tuple[SwapSlotId, bytes], ...]
    sequences_received: int = 0
    sequences_finished: dict[str, int] = {}
    core_rebuilds: int = 0  #: 1 if the predecessor failed
    expendable_blocks: tuple[BlockId, ...] = ()  #: of `blocks` those that are the first to be overwritten


class Distrust(Message):
    """An effect: what this rank answered cannot be reconciled with what another did. Neither is applied.

    The core asks nothing more of this group of workers, and believes nothing more that it says.
    """

    rank: int
    reason: str  #: one line for the operator


class Turn(Message):
    """The only event on which the core may emit a plan. Sent by the shell after it drained its sockets."""


class Preempt(Message):
    """Makes a running sequence yield at the next turn, freeing `num_blocks` of its blocks (at most all it can). For tests and tools."""

    key: SequenceKey
    kind: VictimKind
    num_blocks: int


# `Hello` precedes each of these on every channel and is dealt with there (`pagemill.channels`).
FrontendToScheduler = AddRequest | FinishRequest | AbortRequest | DebugStateQuery | DecisionsQuery
SchedulerToFrontend = SchedulerReady | StepOutput | StatsSnapshot | DebugStateReply | DecisionsReply
SchedulerToWorker = InstallRow | Plan
WorkerToScheduler = WorkerReady | StepDone | TransferDone | RowMissing
LauncherToChild = Start | PeerUp | PeerReady | PeerLost | Drain | Reload | Progress
ChildToLauncher = Progress | Ready | Failed | Alive | Stuck | Explained

#: What `SchedulerCore.handle` takes and returns.
Event = (
    AddRequest | FinishRequest | AbortRequest | StepDone | TransferDone | RowMissing | WorkerReady | PeerUp | PeerLost | Drain | Revive | Adopt | Preempt | Turn
)
Effect = InstallRow | Plan | StepOutput | StatsSnapshot | Distrust
