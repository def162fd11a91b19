"""Transfers: each copied or refused, reported once, in an order that loses no bytes, and out of the forward's way."""

from __future__ import annotations

import gc
import select
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from pagemill.ids import NO_PLAN, PlanId
from pagemill.messages.worker import Transfer
from tests.helpers.copiers import DEADLINE_S, GatedCopier, StreamCopier
from tests.helpers.plans import copy_in, copy_out
from tests.helpers.swapper import NUM_BLOCKS, NUM_SLOTS, PLAN, arena, collect, pool
from workers.copiers import Copy, Places, ReadingCopier
from workers.swapper import Swapper
from workers.transfer_order import Direction


class Bench:
    """A swapper over small tables, and the copier that can be held up."""

    def __init__(self) -> None:
        self.cache, self.slots = pool(), arena()
        self.blocks = self.cache.blocks
        self.size = self.blocks.shape[1]
        self.copier = GatedCopier(self.blocks, self.slots[:, : self.size])
        self.swapper = Swapper(self.cache, self.slots, copier=self.copier)
        self.reports: dict[int, bool] = {}

    def hold_up(self, *transfers: Transfer) -> None:
        """Starts these and returns when a background thread has come to the closed gate with the first of them."""
        self.copier.gate.clear()
        assert self.swapper.start(transfers, PLAN) == 0.0
        assert self.copier.held_up.acquire(timeout=DEADLINE_S)

    def collect(self, count: int) -> dict[int, bool]:
        """What became of each transfer, when `count` have been reported in all."""
        collect(self.swapper, self.reports, count)
        return self.reports


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.copier.gate.set()
    bench.swapper.close()


def is_readable(swapper: Swapper) -> bool:
    return bool(select.select([swapper], [], [], 0)[0])


# --- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 4), (5, 3), (64, 2)])
@pytest.mark.parametrize("needed_by", [NO_PLAN, PLAN])
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype, head_dim: int, block_size: int, needed_by: PlanId) -> None:
    cache, slots = pool(dtype, head_dim, block_size), arena()
    before, slots_before = cache.blocks.clone(), slots.clone()
    swapper = Swapper(cache, slots)
    reports: dict[int, bool] = {}
    swapper.start([copy_out(1, 3, 5, needed_by=needed_by), copy_out(2, 0, 1, needed_by=needed_by)], PLAN)
    collect(swapper, reports, 2)
    cache.blocks[3].zero_()
    cache.blocks[0].zero_()
    swapper.start([copy_in(3, 5, 7, needed_by=needed_by), copy_in(4, 1, 0, needed_by=needed_by)], PLAN)
    collect(swapper, reports, 4)
    assert torch.equal(cache.blocks[[7, 0]], before[[3, 0]])
    assert torch.equal(cache.blocks[[1, 2, 4, 5, 6]], before[[1, 2, 4, 5, 6]])
    assert torch.equal(slots[[0, 2, 3, 4]], slots_before[[0, 2, 3, 4]])
    assert set(reports.values()) == {True}
    swapper.close()


@pytest.mark.parametrize("needed_by", [NO_PLAN, PLAN], ids=["background", "urgent"])
def test_ranks_with_slots_in_common_read_what_one_of_them_has_written(needed_by: PlanId) -> None:
    slots, reports = arena(), list[dict[int, bool]]([{}, {}])
    caches = [pool(), pool()]
    before = caches[0].blocks.clone()
    swappers = [Swapper(cache, slots, writes_slots=rank == 0) for rank, cache in enumerate(caches)]
    caches[1].blocks[6].zero_()  # would be seen if it were copied
    for swapper, report in zip(swappers, reports, strict=True):
        swapper.start([copy_out(1, 3, 5, needed_by=needed_by), copy_out(2, 6, 1, needed_by=needed_by)], PLAN)
        collect(swapper, report, 2)
    for swapper, report in zip(swappers, reports, strict=True):
        swapper.start([copy_in(3, 5, 7, needed_by=needed_by), copy_in(4, 1, 0, needed_by=needed_by)], PLAN)
        collect(swapper, report, 4)
        swapper.close()
    for cache in caches:
        assert torch.equal(cache.blocks[[7, 0]], before[[3, 6]])
    assert reports == [dict.fromkeys((1, 2, 3, 4), True)] * 2


@pytest.mark.parametrize("needed_by", [NO_PLAN, PLAN], ids=["background", "urgent"])
def test_out_of_a_block_and_then_into_it_in_one_plan(bench: Bench, needed_by: PlanId) -> None:
    old_block, old_slot = bench.blocks[3].clone(), bench.slots[2].clone()
    bench.swapper.start([copy_out(1, 3, 5, needed_by=needed_by), copy_in(2, 2, 3)], PLAN)
    assert bench.collect(2) == {1: True, 2: True}
    assert torch.equal(bench.slots[5, : bench.size], old_block)
    assert torch.equal(bench.blocks[3], old_slot[: bench.size])


def test_into_a_block_and_then_out_of_it_in_one_plan(bench: Bench) -> None:
    old_slot = bench.slots[2].clone()
    bench.swapper.start([copy_in(1, 2, 3), copy_out(2, 3, 5, needed_by=PLAN), copy_out(3, 3, 4)], PLAN)
    assert bench.collect(3) == {1: True, 2: True, 3: True}
    assert torch.equal(bench.slots[5, : bench.size], old_slot[: bench.size])
    assert torch.equal(bench.slots[4, : bench.size], old_slot[: bench.size])


def test_a_forward_may_overwrite_what_was_copied_out_urgently(bench: Bench) -> None:
    before = bench.blocks.clone()
    waited = bench.swapper.start([copy_out(number, number, number, needed_by=PLAN) for number in range(4)], PLAN)
    bench.blocks.zero_()
    assert waited > 0.0
    assert bench.collect(4) == dict.fromkeys(range(4), True)
    assert torch.equal(bench.slots[:4, : bench.size], before[:4])


def test_a_device_keeps_the_forward_back_until_urgent_copies_are_over() -> None:
    cache, slots = pool(), arena()
    copier = StreamCopier(cache.blocks, slots)
    swapper = Swapper(cache, slots, copier=copier)
    draw = torch.Generator().manual_seed(3)
    reports: dict[int, bool] = {}
    for turn in range(100):
        before = cache.blocks.clone()
        swapper.start([copy_out(4 * turn + number, number, number, needed_by=PLAN) for number in range(4)], PLAN)
        copier.forward()
        cache.blocks.random_(0, 256, generator=draw)
        collect(swapper, reports, 4 * turn + 4)
        assert torch.equal(slots[:4, : cache.blocks.shape[1]], before[:4])
    assert copier.num_unfinished_when_held > 0, "the device was never behind, so nothing was shown"
    swapper.close()


# --- who waits for whom -----------------------------------------------------------------------------------


def test_a_forward_does_not_wait_for_what_is_copied_in_the_background(bench: Bench) -> None:
    bench.hold_up(*(copy_out(number, number, number) for number in range(5)))
    assert bench.swapper.take_done() == [], "nothing has been copied, and yet the caller is back"
    waited = bench.swapper.start([copy_out(9, 7, 5, needed_by=PLAN)], PLAN)
    assert waited > 0.0
    assert bench.copier.copied == [("here", "out", 7, 5)], "urgent copies pass the whole queue"
    assert [done.transfer_ids for done in bench.swapper.take_done()] == [[9]]
    bench.copier.gate.set()
    assert bench.collect(5) == dict.fromkeys(range(5), True)


def test_a_transfer_that_a_later_plan_needs_is_waited_for_then_and_not_before(bench: Bench) -> None:
    later = PlanId(PLAN + 1)
    bench.hold_up(copy_out(1, 1, 1, needed_by=later))
    assert bench.swapper.start([copy_out(2, 2, 2, needed_by=later)], PLAN) == 0.0
    assert bench.copier.copied == []
    never = threading.Event()

    def before_copy() -> None:
        if threading.current_thread() is threading.main_thread():
            bench.copier.gate.set()
        else:
            never.wait(0.05)  # a caller who does not wait is back by then

    bench.copier.before_copy = before_copy
    assert bench.swapper.start([], later) > 0.0
    assert sorted(bench.copier.copied) == [("background", "out", 1, 1), ("here", "out", 2, 2)]
    assert bench.swapper.start([], PlanId(later + 1)) == 0.0, "it is waited for once"
    assert bench.collect(2) == {1: True, 2: True}


def test_an_urgent_copy_takes_along_what_it_must_not_overtake_and_nothing_else(bench: Bench) -> None:
    bench.hold_up(copy_out(0, 7, 5))
    bench.swapper.start([copy_out(1, 1, 1), copy_out(2, 2, 2), copy_in(3, 2, 3)], PLAN)
    bench.swapper.start([copy_out(4, 3, 4, needed_by=PLAN)], PLAN)
    assert bench.copier.copied == [("here", "out", 2, 2), ("here", "in", 2, 3), ("here", "out", 3, 4)]
    bench.copier.gate.set()
    assert bench.collect(5) == dict.fromkeys(range(5), True)
    assert bench.copier.copied[3:] == [("background", "out", 7, 5), ("background", "out", 1, 1)]


def test_an_urgent_copy_waits_for_one_of_its_block_that_is_under_way(bench: Bench) -> None:
    old_slot = bench.slots[1].clone()
    bench.hold_up(copy_in(1, 1, 3))
    came_too_early = threading.Event()

    def before_copy() -> None:
        if threading.current_thread() is threading.main_thread():
            came_too_early.set()
        else:
            assert not came_too_early.wait(0.05), "overtaken"

    bench.copier.before_copy = before_copy
    bench.copier.gate.set()
    bench.swapper.start([copy_out(2, 3, 4, needed_by=PLAN)], PLAN)
    assert bench.copier.copied == [("background", "in", 1, 3), ("here", "out", 3, 4)]
    assert torch.equal(bench.slots[4, : bench.size], old_slot[: bench.size])
    assert bench.collect(2) == {1: True, 2: True}


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        copy_out(2, NUM_BLOCKS, 0),
        copy_out(2, -1, 0),
        copy_out(2, 0, NUM_SLOTS, needed_by=PLAN),
        copy_in(2, -1, 0),
        copy_in(2, NUM_SLOTS, 0),
        copy_in(2, 0, NUM_BLOCKS, needed_by=PLAN),
        Transfer(2, "device", 0, "device", 1, NO_PLAN),
        Transfer(2, "arena", 0, "arena", 1, NO_PLAN),
    ],
)
def test_what_does_not_exist_is_refused_and_counted_and_nothing_of_it_copied(bench: Bench, bad: Transfer) -> None:
    bench.swapper.start([copy_out(1, 5, 5), bad, copy_out(3, 4, 4)], PLAN)
    assert bench.collect(3) == {1: True, 2: False, 3: True}
    assert sorted(copied[1:] for copied in bench.copier.copied) == [("out", 4, 4), ("out", 5, 5)]
    assert bench.swapper.num_refused == 1


def test_without_an_arena_every_transfer_is_refused() -> None:
    swapper = Swapper(pool(), None)
    assert swapper.start([copy_out(1, 0, 0, needed_by=PLAN), copy_in(2, 0, 0)], PLAN) == 0.0
    reports: dict[int, bool] = {}
    collect(swapper, reports, 2)
    assert reports == {1: False, 2: False}
    assert swapper.num_slots == 0


def test_a_slot_must_hold_a_block() -> None:
    with pytest.raises(ValueError, match="does not hold a block"):
        Swapper(pool(), torch.zeros((4, 64), dtype=torch.uint8))


@pytest.mark.parametrize("needed_by", [NO_PLAN, PLAN], ids=["background", "urgent"])
def test_a_copy_that_fails_fails_alone(bench: Bench, needed_by: PlanId) -> None:
    before = bench.blocks.clone()
    bench.copier.faulty = {("out", 2, 2)}
    bench.swapper.start([copy_out(number, number, number, needed_by=needed_by) for number in range(5)], PLAN)
    assert bench.collect(5) == {0: True, 1: True, 2: False, 3: True, 4: True}
    assert torch.equal(bench.slots[[0, 1, 3, 4], : bench.size], before[[0, 1, 3, 4]])
    bench.copier.faulty = set()
    bench.swapper.start([copy_out(5, 2, 2)], PLAN)
    assert bench.collect(6)[5], "the thread and the places go on"


# --- reports ----------------------------------------------------------------------------------------------


def test_reports_are_grouped_by_direction_and_outcome(bench: Bench) -> None:
    bench.copier.faulty = {("in", 4, 4)}
    urgent = [copy_out(1, 0, 0, needed_by=PLAN), copy_in(2, 1, 1, needed_by=PLAN), copy_in(3, 4, 4, needed_by=PLAN), copy_out(4, 2, 2, needed_by=PLAN)]
    bench.swapper.start([*urgent, copy_in(5, 9, 9)], PLAN)
    done = {(one.direction, one.ok): one for one in bench.swapper.take_done()}
    assert {key: one.transfer_ids for key, one in done.items()} == {("in", False): [5, 3], ("out", True): [1, 4], ("in", True): [2]}
    assert all((one.seconds > 0) == one.ok for one in done.values())


def test_the_descriptor_is_readable_exactly_while_something_is_done(bench: Bench) -> None:
    assert not is_readable(bench.swapper)
    bench.hold_up(copy_out(1, 1, 1))
    assert not is_readable(bench.swapper)
    bench.copier.gate.set()
    assert select.select([bench.swapper], [], [], DEADLINE_S)[0], "who sleeps is woken"
    assert bench.collect(1) == {1: True}
    assert not is_readable(bench.swapper)


# --- ends -------------------------------------------------------------------------------------------------


def test_a_reset_waits_for_what_is_under_way_and_forgets_the_rest(bench: Bench) -> None:
    slots_before = bench.slots.clone()
    bench.hold_up(copy_out(1, 1, 1))
    bench.swapper.start([copy_out(2, 2, 2), copy_out(3, 3, 3)], PLAN)
    reset = threading.Thread(target=bench.swapper.reset)
    reset.start()
    bench.copier.before_copy = lambda: reset.join(0.05)  # the copy ends after a reset that does not wait for it
    bench.copier.gate.set()
    reset.join(DEADLINE_S)
    assert [copied[1:] for copied in bench.copier.copied] == [("out", 1, 1)]
    assert bench.swapper.take_done() == []
    assert not is_readable(bench.swapper)
    bench.copier.before_copy = lambda: None
    bench.swapper.start([copy_out(1, 4, 4)], PLAN)
    assert bench.collect(1) == {1: True}
    assert torch.equal(bench.slots[2:4], slots_before[2:4])


def swap_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("swap ")}


def test_closing_ends_the_threads_and_closing_twice_is_harmless() -> None:
    before = swap_threads()
    swapper = Swapper(pool(), arena())
    assert len(swap_threads() - before) == 1
    swapper.start([copy_out(number, number, number) for number in range(5)], PLAN)
    swapper.close()
    swapper.close()
    assert swap_threads() == before
    assert swapper.take_done() == []


def test_the_threads_end_with_a_swapper_that_nobody_holds_any_more() -> None:
    before = swap_threads()
    swapper = Swapper(pool(), arena())
    assert swap_threads() != before
    del swapper
    gc.collect()
    assert swap_threads() == before


# --- threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes_slots", [True, False])
def test_each_thread_goes_to_the_device_before_it_does_anything_else_there(writes_slots: bool) -> None:
    calls: list[tuple[str, str]] = []

    class NotingCopier(StreamCopier):
        def enter_thread(self) -> None:
            calls.append((threading.current_thread().name, "enter"))

        def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
            calls.append((threading.current_thread().name, "start"))
            return super().start(direction, places, mark)

    cache, slots = pool(), arena()
    copier = NotingCopier(cache.blocks, slots)
    swapper = Swapper(cache, slots, copier=copier if writes_slots else ReadingCopier(copier))
    swapper.start([copy_out(1, 3, 5), copy_in(2, 4, 6)], PLAN)
    collect(swapper, {}, 2)
    swapper.close()
    assert [call for name, call in calls if name == "swap in"] == ["enter", "start"]
    assert [call for name, call in calls if name == "swap out"] == (["enter", "start"] if writes_slots else ["enter"])


def test_a_thread_that_cannot_go_to_the_device_is_told_of() -> None:
    class LostCopier(StreamCopier):
        def enter_thread(self) -> None:
            raise RuntimeError("no such device")

    cache, slots = pool(), arena()
    swapper = Swapper(cache, slots, copier=LostCopier(cache.blocks, slots))
    assert select.select([swapper], [], [], DEADLINE_S)[0]
    with pytest.raises(RuntimeError, match="a thread that copies blocks has ended"):
        swapper.take_done()
    swapper.close()


def test_a_thread_that_ends_is_told_instead_of_copies_that_nobody_hears_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise SystemExit("no more")

    monkeypatch.setattr(bench.copier, "start", end)
    bench.swapper.start([copy_out(1, 3, 5)], PLAN)
    assert select.select([bench.swapper], [], [], DEADLINE_S)[0], "an idle worker was not woken"
    with pytest.raises(RuntimeError, match="a thread that copies blocks has ended") as raised:
        bench.swapper.take_done()
    assert isinstance(raised.value.__cause__, SystemExit)
    with pytest.raises(RuntimeError):  # the copy that it waits for will never be over
        bench.swapper.start([copy_out(2, 3, 4, needed_by=PLAN)], PLAN)
    with pytest.raises(RuntimeError):
        bench.swapper.reset()
