"""Everything that must be true of a core between two events, re-derived from scratch.

Run after every event in tests and under --check-invariants. A breach raises `InvariantError` with the
story: what is wrong, and with which block or sequence. Nothing here mutates.
"""

from __future__ import annotations

from kvstore.block_table import blocks_for
from kvstore.id_pool import Id, IdPool
from pagemill.ids import BEHIND, NO_PLAN, NO_ROW, NONE, BlockId, SeqId, SwapSlotId
from pagemill.kv_groups import first_live_block
from scheduler.core import SchedulerCore
from scheduler.ranks import all_ranks
from scheduler.sequence import Sequence, Status

#: Of a sequence that no plan in flight names: tokens being computed, and being drawn.
_NONE_PLANNED = [0, 0]
_NO_KEYS: frozenset[bytes] = frozenset()


class InvariantError(Exception):
    """The core's books do not balance."""


def check(core: SchedulerCore) -> None:
    """Raises InvariantError on the first breach."""
    _check_queues(core)
    _check_sequences(core)
    # With hundreds of sequences waiting, most hold nothing, and this is what makes a check fast.
    holders = [sequence for sequence in core.queues if not _is_blank(sequence)]
    for sequence in holders:
        _check_tables(core, sequence)
    _check_blocks(core, holders)
    _check_slots(core, holders)
    _check_transfers(core, holders)
    _check_index(core, holders)
    _check_rows(core)
    _check_plans(core)


def _require(condition: bool, story: str, *details: object) -> None:
    """The story is told only if there is one: these checks run after every event."""
    if not condition:
        raise InvariantError(story.format(*details))


def _check_queues(core: SchedulerCore) -> None:
    queues = core.queues
    listed = list(queues)
    _require(len({sequence.seq_id for sequence in listed}) == len(listed), "a sequence is in two queues")
    _require({sequence.key for sequence in listed} == set(core.sequences), "queues and names disagree about who is alive")
    for status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED):
        queue = queues.of(status)
        for sequence in queue:
            if sequence.status is not status:
                raise InvariantError(f"{sequence!r} is in the queue of {status.value}")
            if core.sequences[sequence.key] is not sequence:
                raise InvariantError(f"{sequence!r} is not the one its name stands for")
        orders = [sequence.order for sequence in queue]
        _require(orders == sorted(orders), "the queue of {} is out of order", status.value)
    _require(len(queues.running) <= core.config.max_num_seqs, "{} run, more than max_num_seqs", len(queues.running))


def _check_sequences(core: SchedulerCore) -> None:
    planned: dict[int, list[int]] = {}
    for plan in core.plans:
        for slice_ in plan.slices:
            if slice_.counts():
                counts = planned.setdefault(slice_.piece.sequence.seq_id, [0, 0])
                counts[0] += slice_.piece.num_tokens
                counts[1] += slice_.piece.sample
    for sequence in core.queues:
        in_flight = planned.get(sequence.seq_id, _NONE_PLANNED)
        _require([sequence.num_planned_tokens, sequence.num_pending_tokens] == in_flight, "{!r}: plans in flight say {}", sequence, in_flight)
        _require(sequence.num_output_tokens >= 0, "{!r} lost prompt tokens", sequence)
        _require(sequence.num_output_tokens < sequence.limits.max_tokens, "{!r} should have ended", sequence)
        if sequence.status is Status.RUNNING:
            _require(not sequence.num_absent and not sequence.holds_weakly, "{!r} runs without all its KV", sequence)
        else:
            _require(sequence.holds_weakly and sequence.row == NO_ROW, "{!r} does not run, yet it has a row or strong references", sequence)


def _check_tables(core: SchedulerCore, sequence: Sequence) -> None:
    """Each entry is on the device, in the arena or behind the window, and there are as many as the positions need."""
    reached = sequence.num_computed_tokens + sequence.num_planned_tokens
    _require(reached <= sequence.num_tokens + sequence.num_pending_tokens, "{!r} computes more than it knows", sequence)
    num_absent = 0
    for group, table in enumerate(sequence.tables):
        wanted = blocks_for(reached, core.config.block_size)
        _require(len(table) == wanted, "{!r} holds {} blocks for {} positions", sequence, len(table), reached)
        away = {index for index, block in enumerate(table.ids) if block == NONE} if NONE in table.ids else set()
        num_absent += len(away)
        num_present = len(set(table.live())) - bool(away)
        _require(num_present == len(table) - table.num_behind - len(away), "{!r} names a block twice", sequence)
        away |= {index for in_group, index in sequence.arriving if in_group == group}
        _require(away == set(sequence.slots[group]), "{!r}: entries {} are away, slots are held for {}", sequence, away, sequence.slots[group])
    _require(sequence.num_absent == num_absent, "{!r} counts {} absent entries, there are {}", sequence, sequence.num_absent, num_absent)
    _check_windows(core, sequence)


def _is_blank(sequence: Sequence) -> bool:
    """It has computed and plans nothing, holds neither blocks nor slots, and counts none."""
    if sequence.num_computed_tokens or sequence.num_planned_tokens or sequence.num_absent or sequence.num_behind or sequence.arriving:
        return False
    for table in sequence.tables:
        if table.ids or table.num_behind:
            return False
    return not any(sequence.slots)


def _check_windows(core: SchedulerCore, sequence: Sequence) -> None:
    """What a window has left behind is given up, to the block; all that positions to come look back to is there."""
    size, num_computed = core.config.block_size, sequence.num_computed_tokens
    for group, table in zip(core.config.groups, sequence.tables, strict=True):
        is_prefix = table.ids.count(BEHIND) == table.num_behind and all(block == BEHIND for block in table.ids[: table.num_behind])
        _require(is_prefix, "{!r}: not the first {} entries are behind the window, as counted", sequence, table.num_behind)
        wanted = first_live_block(group, num_computed // size * size, size)
        _require(table.num_behind >= wanted, "{!r} keeps {} blocks behind a window", sequence, wanted - table.num_behind)
        _require(table.num_behind <= wanted, "{!r} lacks {} blocks that a window reaches", sequence, table.num_behind - wanted)
    num_behind = sum(table.num_behind for table in sequence.tables)
    _require(sequence.num_behind == num_behind, "{!r} counts {} entries behind windows, there are {}", sequence, sequence.num_behind, num_behind)


def _check_blocks(core: SchedulerCore, holders: list[Sequence]) -> None:
    pool = core.memory.pool
    references, weak = [0] * pool.num_blocks, [0] * pool.num_blocks
    for sequence in holders:
        for table in sequence.tables:
            for number in table.ids:
                if number >= 0:
                    references[number] += 1
                    weak[number] += sequence.holds_weakly
    for transfer in core.swapping.transfers.in_flight():
        references[transfer.block] += transfer.holds_block
    for _, number in pool.copied():
        references[number] += 1
    places = _places(pool)
    _check_places(pool, references, places)
    loose = {sequence.seq_id for sequence in holders if sequence.holds_weakly and sequence.num_device_blocks}
    _require({sequence.seq_id for sequence in core.memory.loose_holders()} == loose, "not those that hold blocks and do not run are known for it")
    _require(pool.weak_counts() == weak, "weak references are counted wrongly")
    num_reclaimable = sum(0 < count == loose for count, loose in zip(references, weak, strict=True))
    _require(pool.num_reclaimable == num_reclaimable, "{} blocks are said to be reclaimable, {} are", pool.num_reclaimable, num_reclaimable)
    _require(pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks, "free + cached + used is not the total")
    _require(pool.num_leaving == 0, "blocks are still leaving though the plan is complete")
    idle = not core.plans and not len(core.swapping.transfers)
    _require(not idle or pool.num_fenced == 0, "blocks stay behind a fence though nothing is in flight")


def _check_places(pool: IdPool[Id], references: list[int], places: list[str]) -> None:
    """Each id is counted as often as it is referred to, and what its place says fits its count and its key."""
    noun, indexed = pool.NOUN, set(pool.index.entries().values())
    for number, (count, counted, place) in enumerate(zip(references, pool.counts(), places, strict=True)):
        if counted != count:
            raise InvariantError(f"{noun} {number} counts {counted} references, there are {count}")
        if (count > 0) != (place == "referenced"):
            raise InvariantError(f"{noun} {number} is {place} with {count} references")
        if place == "cached" and number not in indexed:
            raise InvariantError(f"{noun} {number} is cached without a key")
        if place == "free" and number in indexed:
            raise InvariantError(f"{noun} {number} is free with a key")


def _check_slots(core: SchedulerCore, holders: list[Sequence]) -> None:
    swap = core.swapping.swap
    references = [0] * swap.total
    for sequence in holders:
        for slots in sequence.slots:
            for slot in slots.values():
                references[slot] += 1
    transfers = core.swapping.transfers.in_flight()
    for transfer in transfers:
        references[transfer.slot] += 1
    _check_places(swap, references, _places(swap))
    writers = {transfer.slot: transfer.transfer_id for transfer in transfers if transfer.direction == "out"}
    _require(swap.filling() == writers, "filling slots {} are not those being written {}", swap.filling(), writers)


def _check_transfers(core: SchedulerCore, holders: list[Sequence]) -> None:
    transfers = core.swapping.transfers
    in_flight = transfers.in_flight()
    waited_for = [transfer.ranks_left for transfer in in_flight]
    _require(all(0 < ranks <= all_ranks(core.config.num_workers) for ranks in waited_for), "a transfer waits for nobody, or for ranks that are none")
    slots_read = [transfer.slot for transfer in in_flight if transfer.direction == "in"]
    slots_written = [transfer.slot for transfer in in_flight if transfer.direction == "out"]
    _require(not set(slots_read) & set(slots_written), "a slot is read while it is being written")
    _require(len(set(slots_written)) == len(slots_written), "a slot is written twice at once")
    blocks_written = [transfer.block for transfer in in_flight if transfer.direction == "in"]
    _require(len(set(blocks_written)) == len(blocks_written), "a block is brought in twice at once")
    running = {number for sequence in core.queues.running for table in sequence.tables for number in table.ids}
    too_late = {transfer.block for transfer in in_flight if transfer.direction == "in" and transfer.needed_by == NO_PLAN}
    _require(not running & too_late, "a running sequence uses a block that is still arriving, and no forward waits for it")
    oldest = core.plans[0].plan_id if core.plans else core._next_plan_id
    overdue = [transfer.transfer_id for transfer in in_flight if NO_PLAN != transfer.needed_by < oldest]
    _require(not overdue, "plans are done, and of the copies {} that they waited for nothing is known", overdue)
    for direction in ("out", "in"):
        this_way = [transfer for transfer in in_flight if transfer.direction == direction]
        background = sum(transfer.needed_by == NO_PLAN for transfer in this_way)
        _require(transfers.num_background(direction) == background, "transfers in the background are counted wrongly")
        _require(transfers.backlog_bytes(direction) == len(this_way) * core.config.block_bytes, "what is queued on the link is counted wrongly")
    for sequence in holders:
        named = {transfer.transfer_id for transfer in in_flight if transfer.sequence is sequence and transfer.direction == "in"}
        _require(set(sequence.arriving.values()) <= named, "{!r} waits for transfers that nobody carries out", sequence)


def _places(pool: IdPool[BlockId] | IdPool[SwapSlotId]) -> list[str]:
    try:
        return pool.places()
    except ValueError as error:
        raise InvariantError(str(error)) from error


def _check_index(core: SchedulerCore, holders: list[Sequence]) -> None:
    index = core.memory.pool.index
    for key, block in index.entries().items():
        if index.key_of(block) != key:
            raise InvariantError(f"block {block} and its key disagree")
    for sequence in holders:
        num_full = sequence.num_computed_tokens // core.config.block_size
        for group, table in enumerate(sequence.tables):
            for block_index, number in enumerate(table.ids[:num_full]):
                indexed = index.key_of(BlockId(number)) if number >= 0 else None
                right = indexed is None or (sequence.is_cacheable and indexed == sequence.copy_key(block_index, group))
                _require(right, "{!r}: block {} holds another prefix", sequence, block_index)
    announced: dict[SeqId, set[bytes]] = {}
    for key, sequence in core.memory.announced().items():
        _require(sequence.status is Status.RUNNING, "{!r} does not run, yet others wait for its blocks", sequence)
        announced.setdefault(sequence.seq_id, set()).add(key)
    for sequence in core.queues.running if announced else ():
        has = sequence.keys[: sequence.num_computed_tokens // core.config.block_size]
        _require(announced.get(sequence.seq_id, _NO_KEYS).isdisjoint(has), "others wait for what {!r} has", sequence)


def _check_rows(core: SchedulerCore) -> None:
    free, fenced, num_rows = core.rows.accounted()
    held = [sequence.row for sequence in core.queues.running if sequence.row != NO_ROW]
    balanced = sorted([*free, *fenced, *held]) == list(range(num_rows))
    _require(balanced, "of {} rows {} are free, {} fenced, {} held", num_rows, free, sorted(fenced), sorted(held))


def _check_plans(core: SchedulerCore) -> None:
    _require(len(core.plans) <= core.config.max_plans_in_flight, "too many plans in flight")
    for plan in core.plans:
        _require(0 < plan.ranks_left <= all_ranks(core.config.num_workers), "plan {} waits for nobody, or for ranks that are none", plan.plan_id)
        num_tokens = sum(slice_.piece.num_tokens for slice_ in plan.slices)
        _require(num_tokens <= core.config.max_num_batched_tokens, "plan {} has {} tokens", plan.plan_id, num_tokens)
        names = [slice_.row for slice_ in plan.slices]
        _require(len(set(names)) == len(names), "plan {} names a row twice", plan.plan_id)
