"""Transfers: ordered, budgeted, acknowledged by all ranks, and what they hold meanwhile."""

from __future__ import annotations

import pytest

from kvstore.block_pool import BlockPool
from kvstore.swap_space import SwapSpace
from pagemill.ids import NO_PLAN, BlockId, PlanId, SwapSlotId
from pagemill.messages.worker import TransferDone
from scheduler.core_config import CoreConfig
from scheduler.rates import LinkRate
from scheduler.transfers import Transfers
from tests.helpers.core_driver import CoreDriver
from tests.helpers.swapping import carry_out_all, finish_all, manual_driver, preempt, prompt, start

BLOCK = 1000


class Link:
    """Transfers over a pool and an arena of eight, one of each allocated per copy out."""

    def __init__(self, **config: object) -> None:
        self.pool, self.swap = BlockPool(8), SwapSpace(8)
        numbers: dict[str, object] = {"block_bytes": BLOCK, "swap_out_bytes_s": 80_000.0, "swap_in_bytes_s": 80_000.0}
        self.transfers = Transfers(CoreConfig(**numbers | config), self.pool, self.swap)  # type: ignore[arg-type]

    def order_out(self, *, early: bool = True) -> tuple[int, BlockId, SwapSlotId]:
        block, slot = self.pool.allocate(), self.swap.allocate()
        self.swap.index.insert(bytes([slot]), slot)
        transfer = self.transfers.order_out(block, slot, holds_block=early)
        if early:
            self.pool.release(block)
        else:
            self.pool.leave(block, transfer.transfer_id)
        self.swap.release(slot)
        return transfer.transfer_id, block, slot

    def done(self, *numbers: int, rank: int = 0, ok: bool = True, seconds: float = 0.0) -> int:
        complete, num_unknown = self.transfers.done(TransferDone(1, rank, numbers, ok, seconds))
        return len(complete) * 10 + num_unknown


def test_what_is_ordered_travels_with_the_next_plan_once_and_in_order() -> None:
    link = Link()
    numbers = [link.order_out()[0] for _ in range(3)]
    assert [transfer.transfer_id for transfer in link.transfers.take()] == numbers
    assert link.transfers.take() == ()
    assert len(link.transfers) == 3


def test_a_background_copy_is_needed_by_nobody_until_a_plan_overwrites_its_block() -> None:
    link = Link()
    first, second = link.order_out(early=False)[0], link.order_out(early=False)[0]
    link.transfers.make_urgent(second, PlanId(4))
    assert link.transfers.num_background("out") == 1
    link.transfers.make_urgent(second, PlanId(5))
    assert [(transfer.transfer_id, transfer.needed_by) for transfer in link.transfers.take()] == [(first, NO_PLAN), (second, PlanId(4))]
    link.done(first, second)
    assert link.transfers.num_background("out") == 0


def test_a_copy_is_done_when_every_rank_has_said_so_and_fails_if_one_of_them_failed() -> None:
    link = Link(num_workers=2)
    number, block, slot = link.order_out()
    assert link.done(number, rank=1, ok=False) == 0
    assert (link.pool.count(block), link.swap.is_filling(slot)) == (1, True)
    assert link.done(number) == 10
    assert (link.pool.num_free, link.swap.num_free) == (8, 8), "nobody may find what was not copied"


def test_a_slot_that_was_written_keeps_its_name() -> None:
    link = Link()
    number, _, slot = link.order_out()
    link.done(number)
    assert (link.swap.index.find(bytes([slot])), link.swap.num_cached) == (slot, 1)


def test_unknown_and_repeated_acknowledgements_are_counted_and_change_nothing() -> None:
    link = Link()
    number, _, _ = link.order_out()
    assert link.done(number, 99) == 11
    assert link.done(number) == 1
    assert link.pool.num_free == 8


def test_a_rank_that_says_it_twice_or_is_none_does_not_stand_in_for_another() -> None:
    link = Link(num_workers=3)
    number, block, _ = link.order_out()
    assert link.done(number, rank=2) == 0
    assert link.done(number, rank=2) == 1
    assert [link.done(number, rank=rank) for rank in (-1, 3, 2**62)] == [1, 1, 1]
    assert link.done(number, number, rank=0) == 1
    assert link.pool.count(block) == 1
    assert link.done(number, number, rank=1) == 11
    assert link.pool.num_free == 8


def test_the_budget_is_half_of_what_the_link_moves_in_a_step_less_what_is_under_way() -> None:
    link = Link()
    for _ in range(200):
        link.transfers.measure_step(0.11)
    assert link.transfers.budget("out") == 4  # 80 blocks a second, steps of 0.11 s
    numbers = [link.order_out()[0] for _ in range(3)]
    assert (link.transfers.budget("out"), link.transfers.budget("in")) == (1, 4)
    link.done(*numbers)
    assert link.transfers.budget("out") == 4


def test_a_slow_link_moves_one_block_at_a_time_and_never_none() -> None:
    link = Link(swap_out_bytes_s=1.0)
    assert link.transfers.budget("out") == 1
    number = link.order_out()[0]
    assert link.transfers.budget("out") == 0
    link.done(number)
    assert link.transfers.budget("out") == 1


def test_a_long_step_does_not_let_more_than_256_mib_queue_up() -> None:
    link = Link(block_bytes=1 << 20, swap_in_bytes_s=1e12)
    link.transfers.measure_step(1000.0)
    assert link.transfers.budget("in") == 256


def test_an_urgent_copy_is_backlog_but_takes_no_budget() -> None:
    link = Link(swap_out_bytes_s=1.0)
    number = link.order_out(early=False)[0]
    link.transfers.make_urgent(number, PlanId(1))
    assert (link.transfers.budget("out"), link.transfers.backlog_bytes("out"), link.transfers.backlog_bytes("in")) == (1, BLOCK, 0)


def test_rates_follow_what_ranks_report_and_failed_copies_tell_nothing() -> None:
    link = Link(num_workers=2)
    numbers = [link.order_out()[0] for _ in range(2)]
    link.done(*numbers, rank=0, seconds=0.1)
    link.done(*numbers, rank=1, seconds=0.4)  # the slower rank counts
    rate = link.transfers.rates["out"]
    assert rate.total_bytes == 2 * BLOCK
    assert rate.total_seconds == pytest.approx(0.4)
    failed = link.order_out()[0]
    link.done(failed, rank=0, ok=False, seconds=9.0)
    link.done(failed, rank=1, seconds=9.0)
    assert rate.total_bytes == 2 * BLOCK


def test_bringing_back_a_long_context_takes_the_link_a_share_of_each_step_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkRate, "measure", lambda *measured: None)  # the fake worker's copies take no time
    driver = manual_driver(num_blocks=40, num_swap_slots=40, max_num_seqs=2, prefix_caching=False, swap_in_bytes_s=float(6 << 20) / 0.05)
    other = start(driver, prompt(6, stem=3), max_tokens=40)
    long = start(driver, prompt(60), max_tokens=4)
    preempt(driver, long)
    carry_out_all(driver)
    while driver.answer():
        pass
    urgent = next(key for key, sequence in driver.core.sequences.items() if sequence.priority < 0)
    driver.abort(urgent)
    under_way = []
    while driver.core.sequences[long].num_absent:
        driver.turn()
        under_way.append(len(driver.worker.transfers))
        driver.answer()
        carry_out_all(driver)
    assert max(under_way) == 3  # half of the six blocks that the link moves in the 0.05 s of a step not yet measured
    assert len(driver.outputs[other]) >= len(under_way), "it drew a token in each of these steps"
    finish_all(driver)
    assert_all_free(driver)


def assert_all_free(driver: CoreDriver) -> None:
    assert (driver.core.memory.pool.num_used, driver.core.swapping.swap.num_used) == (0, 0)
