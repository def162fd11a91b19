"""The state of a scheduler core without its accidents: two cores of one key behave alike from here on.

Blocks, slots, plans and transfers are renamed in the order in which they are met, and what only the workers see
(rows, what they were sent) or only people do (counters, decisions, prices of the past) is left out. Time is
left out too, so a core is only comparable in this way while its patience is out of play (see `model_check`).
Content that nobody will ask for again is like any other of that kind: an *outlook* says what may be asked for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any

import msgspec

from kvstore.id_pool import IdPool
from pagemill.ids import NO_PLAN, NONE
from scheduler.core import SchedulerCore
from scheduler.sequence import Sequence

#: More preemptions of one sequence make no difference to the planner.
_MANY_PREEMPTIONS = 3


@dataclass(frozen=True)
class Outlook:
    """What is going to matter to a core. Whoever knows nothing of the future expects everything."""

    wanted: Container[bytes] | None = None  #: keys of blocks that live sequences and those to come may have; None: any
    saves: bool = True  #: cached blocks may be copied before they are overwritten, whether or not anybody will want them

    def is_wanted(self, key: bytes | None) -> bool:
        return self.saves or self.wanted is None or key in self.wanted

    def name(self, key: bytes | None) -> bytes:
        """What tells a place with this key from others: nothing, where nobody asks for it."""
        return b"" if key is None else key if self.is_wanted(key) else b"unwanted"


def state_key(core: SchedulerCore, outlook: Outlook = Outlook()) -> bytes:
    """Equal for states that differ only in names, in the past, and in what does not matter any more."""
    return blake2b(_encode(list(_parts(core, outlook))), digest_size=12).digest()


_encode = msgspec.msgpack.Encoder().encode


class _Names:
    """Numbers in the order in which they are met."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def __call__(self, number: int) -> int:
        return number if number < 0 else self.of.setdefault(number, len(self.of))


def _parts(core: SchedulerCore, outlook: Outlook) -> Iterator[Any]:
    blocks, slots, transfers = _Names(), _Names(), _Names()
    memory, swapping = core.memory, core.swapping
    next_plan, has_windows = core._next_plan_id, any(group.window for group in core.config.groups)
    yield core._next_seq_id
    for sequence in core.queues:
        yield _sequence(sequence, blocks, slots, transfers, next_plan, has_windows)
    for plan in core.plans:
        yield [plan.plan_id - next_plan, plan.ranks_left]
        for slice_ in plan.slices:
            piece = slice_.piece
            if piece.sequence.key not in core.sequences:
                continue  # whatever is answered is dropped; what it holds back is a fence
            after = piece.after_plan - next_plan if piece.after_plan != NO_PLAN else 0
            yield [piece.sequence.seq_id, piece.start, piece.num_tokens, piece.sample, after, slice_.counts(), slice_.is_void]
    for transfer in swapping.transfers.in_flight():
        owner = transfer.sequence.seq_id if transfer.sequence is not None else 0
        is_wanted = transfer.sequence is not None and transfer.sequence.arriving.get((transfer.group, transfer.index)) == transfer.transfer_id
        yield [
            transfers(transfer.transfer_id),
            transfer.direction,
            blocks(transfer.block),
            slots(transfer.slot),
            transfer.holds_block,
            transfer.needed_by - next_plan if transfer.needed_by != NO_PLAN else 0,
            transfer.ranks_left,
            transfer.ok,
            [owner, transfer.group, transfer.index] if is_wanted else 0,
        ]
    yield sorted((key, sequence.seq_id) for key, sequence in memory.announced().items())
    yield list(_pool(memory.pool, blocks, next_plan, outlook))
    yield [[blocks(block), transfers(number)] for block, number in memory.pool._left.items()]
    yield [[blocks(block), transfers(number)] for number, block in memory.pool.copied()]
    yield [[memory.pool.num_strong_to_free(block), memory.pool.was_copied_in_vain(block)] for block in blocks.of]  # type: ignore[arg-type]
    yield list(_pool(swapping.swap, slots, next_plan, outlook, num_taken_first=_num_unwanted_first(swapping.swap, outlook)))
    yield [[slots(slot), transfers(number)] for slot, number in swapping.swap.filling().items()]
    yield [swapping.swap.num_last_resort, [swapping.swap.is_distrusted(slot) for slot in slots.of]]  # type: ignore[arg-type]


def _sequence(sequence: Sequence, blocks: _Names, slots: _Names, transfers: _Names, next_plan: int, has_windows: bool) -> list[Any]:
    return [
        sequence.seq_id,
        sequence.status.value,
        sequence.num_tokens,
        sequence.num_computed_tokens,
        sequence.num_planned_tokens,
        sequence.num_pending_tokens,
        sequence.planned_in - next_plan if sequence.planned_in != NO_PLAN else 0,
        sequence.drawn_in - next_plan if sequence.num_pending_tokens else 0,
        sequence.holds_weakly,
        sequence.row == NONE,
        0 if sequence.is_cacheable else sequence.num_highest_computed,
        min(sequence.num_preemptions, _MANY_PREEMPTIONS),
        sequence.num_found_blocks if has_windows else 0,
        [[blocks(block) for block in table] for table in sequence.tables],
        [[[index, slots(slot)] for index, slot in held.items()] for held in sequence.slots],
        sorted((place, transfers(number)) for place, number in sequence.arriving.items()),
    ]


def _num_unwanted_first(pool: IdPool[Any], outlook: Outlook) -> int:
    """Cached ones that will be overwritten before all others, and asked for by nobody."""
    return sum(1 for _ in takewhile(lambda number: not outlook.is_wanted(pool.index.key_of(number)), pool._cached))


def _pool(pool: IdPool[Any], names: _Names, next_plan: int, outlook: Outlook, num_taken_first: int = 0) -> Iterator[Any]:
    """Free ones are as good as each other, and so are the first of the cached ones if told so; the others and fenced ones come in their order."""
    yield len(pool._free) + num_taken_first
    yield [[names(number), is_expendable and outlook.saves] for number, is_expendable in islice(pool._cached.items(), num_taken_first, None)]
    yield [[names(number), fence - next_plan] for number, fence in pool._fenced.items()]
    yield [[pool.count(number), outlook.name(pool.index.key_of(number))] for number in names.of]
