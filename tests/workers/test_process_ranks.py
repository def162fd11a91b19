"""The answers of several ranks: none of them begins what another has not, and all say the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from pagemill.arena_file import create_arena
from pagemill.messages.worker import RowMissing, SchedulerToWorker, StepDone, WorkerToScheduler
from tests.helpers.plans import copy_in, copy_out, install, piece, plan
from tests.helpers.ranks import close, load_ranks, together
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded
from workers.process import Worker

NUM_SLOTS = 6


@pytest.fixture(scope="module")
def loaded_ranks() -> Iterator[list[Loaded]]:
    ranks = load_ranks(tiny_checkpoint("llama"), 2, block_size=4, num_blocks=16)
    yield ranks
    close(ranks)


@pytest.fixture
def ranks(loaded_ranks: list[Loaded]) -> list[Worker]:
    for each in loaded_ranks:
        each.runner.reset()
    return [Worker(each.runner, rank, epoch=1) for rank, each in enumerate(loaded_ranks)]


def handled(ranks: Sequence[Worker], *messages: Sequence[SchedulerToWorker]) -> list[list[WorkerToScheduler]]:
    """All replies of each rank to the messages that it gets, of which there is an entry for each rank."""
    return together(lambda rank: [reply for message in messages[rank] for reply in ranks[rank].handle(message)], range(len(ranks)))


def test_all_ranks_acknowledge_a_plan_with_the_same_results(ranks: list[Worker]) -> None:
    row, step = install(0, [5, 6, 7], [1]), plan(piece(0, 0, 3))
    (first,), (second,) = handled(ranks, [row, step], [row, step])
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert (first.rank, second.rank) == (0, 1)
    assert first.results == second.results
    assert first.seconds["agree"] > 0


def test_a_row_that_one_rank_misses_is_missing_to_all_and_nothing_is_computed(ranks: list[Worker]) -> None:
    rows = [install(0, [5, 6, 7], [1]), install(1, [8, 9], [2])]
    work = plan(piece(0, 0, 3), piece(1, 0, 2), plan_id=4)
    (first,), (second,) = handled(ranks, [*rows, work], [rows[0], work])
    assert (first, second) == tuple(RowMissing(epoch=1, rank=rank, plan_id=work.plan_id, row=rows[1].row, version=1) for rank in (0, 1))
    rows = [install(0, [5, 6, 7], [1], version=2), install(1, [8, 9], [2], version=2)]
    again = plan(piece(0, 0, 3, version=2), piece(1, 0, 2, version=2), plan_id=5)
    (first,), (second,) = handled(ranks, [*rows, again], [*rows, again])
    assert isinstance(first, StepDone)
    assert [result.outcome for result in first.results] == ["accepted", "accepted"]


def test_of_a_plan_that_not_all_ranks_have_nothing_is_begun(ranks: list[Worker]) -> None:
    lonely, last = plan(plan_id=2, transfers=[copy_out(1, 0, 0, needed_by=2)]), plan(plan_id=3)
    (first,), (second,) = handled(ranks, [lonely, last], [last])
    assert isinstance(first, StepDone), "the transfer was begun"
    assert first.plan_id == 3
    assert isinstance(second, StepDone)
    assert [rank.num_dropped for rank in ranks] == [1, 0]


def test_what_a_plan_given_up_would_have_told_the_rows_is_told_anew(ranks: list[Worker]) -> None:
    row = install(0, [5, 6, 7], [1])
    lonely, last = plan(piece(0, 0, 2, sample=False), plan_id=2), plan(piece(0, 2, 1), plan_id=3)
    (first,), (second,) = handled(ranks, [row, lonely, last], [row, last])
    assert isinstance(first, RowMissing)
    assert isinstance(second, RowMissing)
    assert (first.plan_id, first.row, first.version) == (second.plan_id, second.row, second.version) == (3, 0, 1)


def test_no_rank_begins_before_all_have_parted_with_the_old_core(ranks: list[Worker], loaded_ranks: list[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have slots in common, what the old core ordered on one must be over before the new one's is begun on another."""
    order: list[str] = []

    def note(loaded: Loaded, name: str) -> None:
        method = getattr(loaded.runner.swapper, name)

        def noted(*arguments: object) -> object:
            order.append(name)
            return method(*arguments)

        monkeypatch.setattr(loaded.runner.swapper, name, noted)

    for loaded in loaded_ranks:
        note(loaded, "reset")
        note(loaded, "start")
    handled(ranks, [plan(epoch=2)], [plan(epoch=1), plan(epoch=2)])
    assert order == ["reset", "reset", "start", "start"]


def test_ranks_that_hold_the_same_kv_heads_swap_through_one_region() -> None:
    """Eight ranks, four KV heads: four regions, each written by one rank and read by two."""
    arena_fd = create_arena(4 * NUM_SLOTS * 4096)
    loaded = load_ranks(tiny_checkpoint("llama"), 8, arena_fd=arena_fd, block_size=4, num_blocks=16, swap_bytes=NUM_SLOTS * 4096)
    ranks = [Worker(each.runner, rank, epoch=1) for rank, each in enumerate(loaded)]
    prompt = [5, 6, 7, 8, 9]

    def tokens_after(*messages: SchedulerToWorker) -> set[tuple[int, ...]]:
        last = [replies[-1] for replies in handled(ranks, *[messages] * 8)]
        return {reply.results[0].token_ids for reply in last if isinstance(reply, StepDone)}

    try:
        (expected,) = tokens_after(install(0, prompt, [1, 2]), plan(piece(0, 0, 5)))
        handled(ranks, *[[plan(plan_id=2, transfers=[copy_out(1, 1, 3, needed_by=2), copy_out(2, 2, 0, needed_by=2)])]] * 8)
        written = {os.pread(arena_fd, loaded[0].ready.block_bytes, (region * NUM_SLOTS + 3) * 4096) for region in range(4)}
        assert len(written) == 4, "each region holds KV of heads of its own"
        assert written == {each.runner.kv_cache.blocks[1].numpy().tobytes() for each in loaded}
        back = [copy_in(3, 3, 9, needed_by=3), copy_in(4, 0, 8, needed_by=3)]
        assert tokens_after(install(0, prompt, [9, 8], version=2), plan(piece(0, 4, 1, version=2), plan_id=3, transfers=back)) == {expected}
    finally:
        os.close(arena_fd)
        close(loaded)
