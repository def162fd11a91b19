"""What the core is told and what it answers: messages from the wire, and these few that never leave the scheduler process.

They are structs like the others because the event log holds both: a log of what a core was told and answered replays to the
same effects. Must not know what the core makes of them.
"""

from __future__ import annotations

import msgspec

from pagemill.ids import BlockId, SwapSlotId
from pagemill.messages.control import Drain, PeerLost, PeerUp
from pagemill.messages.decisions import VictimKind
from pagemill.messages.frontend import AbortRequest, AddRequest, FinishRequest, StatsSnapshot, StepOutput
from pagemill.messages.sequences import SequenceKey
from pagemill.messages.wire import Message, Record
from pagemill.messages.worker import InstallRow, Plan, RowMissing, StepDone, TransferDone, WorkerReady


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

    @property
    def is_new(self) -> bool:
        """It was never started, by any scheduler: only then may it be refused for having waited too long."""
        return self.queue_s < 0 and not self.request.output_ids


class Adopt(Message):
    """The first event of a core that has had a predecessor: KV that has outlived it, and what was counted between the two."""

    blocks: tuple[tuple[BlockId, bytes], ...]  #: with their prefix keys
    swap_slots: tuple[tuple[SwapSlotId, bytes], ...]
    sequences_received: int = 0
    sequences_finished: dict[str, int] = msgspec.field(default_factory=dict)
    core_rebuilds: int = 0  #: 1 if the predecessor failed
    expendable_blocks: tuple[BlockId, ...] = ()  #: of `blocks` those that are the first to be overwritten


class Preempt(Message):
    """Makes a running sequence yield at the next turn, freeing `num_blocks` of its blocks (at most all it can). For tests and tools."""

    key: SequenceKey
    kind: VictimKind
    num_blocks: int


class Turn(Message):
    """The only event on which the core may emit a plan. Sent by the shell after it drained its sockets."""


class Distrust(Message):
    """An effect: what this rank answered cannot be reconciled with what another did. Neither is applied.

    The core asks nothing more of this group of workers, and believes nothing more that it says.
    """

    rank: int
    reason: str  #: one line for the operator


#: What `SchedulerCore.handle` takes and returns.
Event = (
    AddRequest | FinishRequest | AbortRequest | StepDone | TransferDone | RowMissing | WorkerReady | PeerUp | PeerLost | Drain | Revive | Adopt | Preempt | Turn
)
Effect = InstallRow | Plan | StepOutput | StatsSnapshot | Distrust
