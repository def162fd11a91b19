"""Everything that must be true of a core between two events, re-derived from scratch.

Run after every event in tests and under --check-invariants. A breach raises `InvariantError` with the
story: what is wrong, and with which block or sequence. Nothing here mutates.
"""

from __future__ import annotations

from kvstore.block_table import blocks_for
from pagemill.messages import NO_ROW, BlockId
from scheduler.core import SchedulerCore
from scheduler.sequence import Sequence, Status


class InvariantError(Exception):
    """The core's books do not balance."""


def check(core: SchedulerCore) -> None:
    """Raises InvariantError on the first breach."""
    _check_queues(core)
    _check_sequences(core)
    _check_blocks(core)
    _check_index(core)
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
            _require(sequence.status is status, "{!r} is in the queue of {}", sequence, status.value)
            _require(core.sequences[sequence.key] is sequence, "{!r} is not the one its name stands for", sequence)
        orders = [sequence.order for sequence in queue]
        _require(orders == sorted(orders), "the queue of {} is out of order", status.value)
    _require(len(queues.running) <= core.config.max_num_seqs, "{} run, more than max_num_seqs", len(queues.running))


def _check_sequences(core: SchedulerCore) -> None:
    planned: dict[int, int] = {}
    for plan in core.plans:
        for piece, row, version in plan.slices:
            if (piece.sequence.row, piece.sequence.row_version) == (row, version):
                planned[piece.sequence.seq_id] = planned.get(piece.sequence.seq_id, 0) + piece.num_tokens
    for sequence in core.queues:
        in_flight = planned.get(sequence.seq_id, 0)
        _require(sequence.num_planned_tokens == in_flight, "{!r}: plans in flight say {}", sequence, in_flight)
        _require(sequence.num_prompt_tokens <= sequence.num_tokens, "{!r} lost prompt tokens", sequence)
        _require(sequence.num_output_tokens < sequence.limits.max_tokens, "{!r} should have ended", sequence)
        if sequence.status is Status.RUNNING:
            _check_running(core, sequence)
        else:
            empty = sequence.num_table_blocks == 0 and sequence.num_computed_tokens == 0 and sequence.row == NO_ROW
            _require(empty, "{!r} does not run and holds something", sequence)


def _check_running(core: SchedulerCore, sequence: Sequence) -> None:
    reached = sequence.num_computed_tokens + sequence.num_planned_tokens
    _require(reached <= sequence.num_tokens, "{!r} computes more than it knows", sequence)
    for table in sequence.tables:
        wanted = blocks_for(reached, core.config.block_size)
        _require(len(table) == wanted, "{!r} holds {} blocks for {} positions", sequence, len(table), reached)
        _require(len(set(table.ids)) == len(table), "{!r} names a block twice", sequence)


def _check_blocks(core: SchedulerCore) -> None:
    pool = core.memory.pool
    references = [0] * pool.num_blocks
    for sequence in core.queues.running:
        for table in sequence.tables:
            for number in table.ids:
                references[number] += 1
    try:
        places = pool.places()
    except ValueError as error:
        raise InvariantError(str(error)) from error
    for number, (count, place) in enumerate(zip(references, places, strict=True)):
        block = BlockId(number)
        _require(pool.count(block) == count, "block {} counts {} references, tables hold {}", block, pool.count(block), count)
        _require((count > 0) == (place == "referenced"), "block {} is {} with {} references", block, place, count)
        _require(place != "cached" or block in pool.index, "block {} is cached without a key", block)
        _require(place != "free" or block not in pool.index, "block {} is free with a key", block)
    _require(pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks, "free + cached + used is not the total")
    _require(bool(core.plans) or pool.num_fenced == 0, "blocks stay behind a fence though no plan is in flight")


def _check_index(core: SchedulerCore) -> None:
    index = core.memory.pool.index
    for key, block in index.entries().items():
        _require(index.key_of(block) == key, "block {} and its key disagree", block)
    for sequence in core.queues.running:
        for block_index in range(sequence.num_computed_tokens // core.config.block_size):
            indexed = index.key_of(sequence.tables[0][block_index])
            right = indexed is None or (sequence.is_cacheable and indexed == sequence.block_key(block_index))
            _require(right, "{!r}: block {} holds another prefix", sequence, block_index)
    for sequence in core.memory.announced().values():
        _require(sequence.status is Status.RUNNING, "{!r} does not run, yet others wait for its blocks", sequence)


def _check_rows(core: SchedulerCore) -> None:
    free, fenced, num_rows = core.rows.accounted()
    held = [sequence.row for sequence in core.queues.running if sequence.row != NO_ROW]
    balanced = sorted([*free, *fenced, *held]) == list(range(num_rows))
    _require(balanced, "of {} rows {} are free, {} fenced, {} held", num_rows, free, sorted(fenced), sorted(held))


def _check_plans(core: SchedulerCore) -> None:
    _require(len(core.plans) <= core.config.max_plans_in_flight, "too many plans in flight")
    for plan in core.plans:
        num_tokens = sum(piece.num_tokens for piece, _, _ in plan.slices)
        _require(0 < num_tokens <= core.config.max_num_batched_tokens, "plan {} has {} tokens", plan.plan_id, num_tokens)
        names = [row for _, row, _ in plan.slices]
        _require(len(set(names)) == len(names), "plan {} names a row twice", plan.plan_id)
