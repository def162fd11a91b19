"""A sequence: one stream of tokens with KV, the scheduler's unit of work, and its life.

A sequence has no prefill or decode phase: it has `num_tokens` known tokens, of which the KV of the first
`num_computed_tokens` exists, and each plan moves the second toward the first. Where its KV is belongs to
its blocks. This file holds data and the table of legal moves; what to do with it is decided elsewhere.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from enum import Enum

from kvstore.block_table import BlockTable
from pagemill.ids import NO_PLAN, NO_ROW, BlockId, PlanId, SeqId, SwapSlotId, num_ids, unpack_ids
from pagemill.keys import KEY_BYTES, block_key
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import SequenceKey
from scheduler.events import Suspicion


class Status(Enum):
    WAITING = "waiting"  #: never scheduled; may hold a prefix that is on its way from the arena
    RUNNING = "running"  #: holds blocks for what is computed, may be in a plan
    PREEMPTED = "preempted"  #: was running; its KV is on the device, in the arena, or to be computed again
    FINISHED = "finished"  #: holds nothing


#: Every legal move. Anything else is a fault of the core.
TRANSITIONS: frozenset[tuple[Status, Status]] = frozenset(
    {
        (Status.WAITING, Status.RUNNING),
        (Status.WAITING, Status.FINISHED),
        (Status.RUNNING, Status.PREEMPTED),
        (Status.RUNNING, Status.FINISHED),
        (Status.PREEMPTED, Status.RUNNING),
        (Status.PREEMPTED, Status.FINISHED),
    }
)


def in_group(key: bytes, group: int) -> bytes:
    """The same prefix has one block in each KV group."""
    return key if group == 0 else key + group.to_bytes(2, "little")


#: Urgency (lower first), arrival, sequence id: the total order of all sequences.
Order = tuple[int, float, int]


class Sequence:
    """One sequence. Invariants: num_computed <= num_tokens; only a RUNNING one holds a row.

    Where its KV is belongs to each block. Entry i of a table is a device block, or NONE; then `slots` has i: the
    block is in the arena. An arriving block is both, and `arriving` names the transfer. An entry that no position can read
    any more is BEHIND its group's window, and in neither place. A running sequence has
    all its blocks on the device and refers to them strongly; all others refer weakly and can be made to give up.
    """

    __slots__ = (
        "added_at",
        "arriving",
        "block_size",
        "drawn_in",
        "has_decoded",
        "has_prefilled",
        "holds_weakly",
        "key",
        "keys",
        "kv_version",
        "leaves_behind_at",
        "limits",
        "num_absent",
        "num_behind",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_emitted_tokens",
        "num_found_blocks",
        "num_highest_computed",
        "num_pending_tokens",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "num_sent_tokens",
        "order",
        "planned_in",
        "preempted_at",
        "priority",
        "queue_s",
        "request_id",
        "resumed_in_step",
        "root",
        "row",
        "row_version",
        "sampling",
        "seed",
        "seq_id",
        "slots",
        "status",
        "stop_ids",
        "suspicion",
        "tables",
        "token_ids",
        "waiting_since_step",
    )

    def __init__(self, seq_id: SeqId, request: AddRequest, *, now: float, block_size: int, num_groups: int) -> None:
        self.seq_id = seq_id
        self.key: SequenceKey = request.key
        self.request_id = request.request_id
        self.priority = request.priority
        self.sampling = request.sampling
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.limits = request.limits
        self.seed = request.seed
        self.added_at = now
        self.order: Order = (0, request.arrival, seq_id)  #: the policy replaces the urgency
        self.status = Status.WAITING

        self.token_ids = unpack_ids(request.prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(unpack_ids(request.output_ids))
        self.num_computed_tokens = 0  #: positions whose KV exists, on the device or in the arena
        self.num_planned_tokens = 0  #: positions being computed by plans in flight, beyond the computed
        self.num_pending_tokens = 0  #: tokens being drawn by plans in flight, beyond the known
        self.planned_in: PlanId = NO_PLAN  #: the last plan that names this sequence, NO_PLAN if it is acknowledged
        self.drawn_in: PlanId = NO_PLAN  #: the last plan that draws a token for it
        self.kv_version = 0  #: grows when positions in flight are given up: then their results do not advance it
        self.num_highest_computed = 0  #: what was ever computed: below it a position is computed again
        self.num_cached_tokens = 0  #: prompt tokens that came from the prefix cache
        self.num_preemptions = 0
        self.preempted_at = now  #: when it last yielded
        self.waiting_since_step = 0  #: since when it does not run
        self.resumed_in_step = -(2**31)  #: when it last came back, long ago if never
        self.num_emitted_tokens = num_ids(request.output_ids)  #: output tokens that its frontend has been sent
        self.has_prefilled = self.has_decoded = False  #: has completed a slice of several tokens, of a single one
        self.suspicion: Suspicion | None = None  #: a worker died while it computed some positions
        self.queue_s = -1.0  #: arrival here to the first slice, seconds; negative until then

        self.tables = [BlockTable() for _ in range(num_groups)]
        self.slots: list[dict[int, SwapSlotId]] = [{} for _ in range(num_groups)]  #: by block index, only of those not (yet) on the device
        self.arriving: dict[tuple[int, int], int] = {}  #: (group, block index) -> the transfer that brings it
        self.num_absent = 0  #: entries of `tables` that are NONE
        self.num_behind = 0  #: entries of `tables` that are BEHIND
        self.leaves_behind_at = 0  #: as soon as so many positions are computed, further entries may be
        self.num_found_blocks = 0  #: of the first blocks in each table the most that were ever taken over from others
        self.holds_weakly = True  #: its references to blocks are weak ones
        self.block_size = block_size
        self.root = request.root  #: empty: stays out of the prefix cache
        #: Keys of the first full blocks, extended on demand.
        self.keys = [request.prefix_keys[i : i + KEY_BYTES] for i in range(0, len(request.prefix_keys), KEY_BYTES)]

        self.row = NO_ROW
        self.row_version = 0
        self.num_sent_tokens = 0  #: tokens the workers' row knows
        self.num_sent_blocks = 0  #: blocks per table the workers' row knows

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left to plan: one for a decoding sequence."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens - self.num_planned_tokens

    @property
    def num_table_blocks(self) -> int:
        """Entries of all tables that are not behind a window."""
        return sum(len(table) for table in self.tables) - self.num_behind

    @property
    def num_device_blocks(self) -> int:
        """Blocks held on the device, over all groups; those on their way included."""
        return self.num_table_blocks - self.num_absent

    def entries_from_end(self, num_blocks: int) -> Iterator[tuple[int, int, BlockId]]:
        """(block index, group, entry) of the first `num_blocks` of each table, last ones first, but for those behind a window.

        What has passed all windows is not even looked at, however long the context is.
        """
        while num_blocks > 0:
            tables = [(group, table.ids, table.num_behind) for group, table in enumerate(self.tables) if table.num_behind < num_blocks]
            first = max((num_behind for _, _, num_behind in tables), default=num_blocks)
            for index in range(num_blocks - 1, first - 1, -1):
                for group, ids, _ in tables:
                    yield index, group, BlockId(ids[index])
            num_blocks = first if tables else 0

    @property
    def must_be_alone(self) -> bool:
        """A worker died at its next positions: they are computed in a plan of their own (`suspicion`)."""
        suspicion = self.suspicion
        return suspicion is not None and suspicion.alone and self.num_computed_tokens + self.num_planned_tokens >= suspicion.first

    @property
    def is_cacheable(self) -> bool:
        return bool(self.root)

    def block_key(self, block_index: int) -> bytes:
        """The prefix key of a full block of known tokens. Only for cacheable sequences."""
        while len(self.keys) <= block_index:
            start = len(self.keys) * self.block_size
            tokens: array[int] = self.token_ids[start : start + self.block_size]
            if len(tokens) < self.block_size:
                raise ValueError(f"block {block_index} of sequence {self.seq_id} is not full")
            self.keys.append(block_key(self.keys[-1] if self.keys else self.root, tokens))
        return self.keys[block_index]

    def copy_key(self, block_index: int, group: int) -> bytes:
        """The name of a full block's content in the arena. That of a sequence kept out of the prefix cache is its own alone."""
        if not self.root:
            return b"private" + struct.pack("<qqh", self.seq_id, block_index, group)
        return in_group(self.block_key(block_index), group)

    def move_to(self, status: Status) -> None:
        """The only way to change status. Raises on a move that is not in `TRANSITIONS`."""
        if (self.status, status) not in TRANSITIONS:
            raise ValueError(f"sequence {self.seq_id} ({self.request_id}) cannot go from {self.status.value} to {status.value}")
        self.status = status

    def __repr__(self) -> str:
        return (
            f"<sequence {self.seq_id} {self.status.value} tokens={self.num_tokens} computed={self.num_computed_tokens}"
            f"+{self.num_planned_tokens} blocks={self.num_table_blocks} row={self.row}>"
        )
