"""Frontend and scheduler: requests one way, their tokens and the scheduler's condition the other.

Requests are idempotent and carry no epoch, so a frontend that meets a new scheduler sends them again. All that comes back
carries one. `Hello` precedes everything and is dealt with by the channel.
"""

from __future__ import annotations

from typing import Literal

from pagemill.messages.debug_state import DebugState
from pagemill.messages.decisions import Decision
from pagemill.messages.sequences import FinishReason, KvGroup, Limits, SamplingParams, SequenceKey, TokenLogprobs
from pagemill.messages.wire import Message, Record

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


class DebugStateReply(Message):
    """Answers the `DebugStateQuery` with the same number."""

    query: int
    state: DebugState


class DecisionsReply(Message):
    """Answers the `DecisionsQuery` with the same number. Oldest first."""

    query: int
    now_s: float  #: the scheduler's clock, as `Decision.at_s`
    decisions: list[Decision]


FrontendToScheduler = AddRequest | FinishRequest | AbortRequest | DebugStateQuery | DecisionsQuery
SchedulerToFrontend = SchedulerReady | StepOutput | StatsSnapshot | DebugStateReply | DecisionsReply
