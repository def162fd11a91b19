"""Copies that fail: what they were for is computed again, nobody is held up or finds rubbish, and their slots are used last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill.ids import SwapSlotId
from pagemill.messages.worker import Transfer, TransferDone
from scheduler.events import Preempt
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import slot_of
from tests.helpers.swapping import (
    SLOW_LINK,
    assert_nothing_held,
    carry_out_all,
    come_back_at_once,
    expected,
    finish_all,
    let_back,
    manual_driver,
    places,
    preempt,
    prompt,
    sequence_of,
    start,
)


def test_a_copy_out_that_fails_means_computing_again_from_there_and_nothing_leaks() -> None:
    driver = manual_driver()
    key = start(driver, prompt(14))
    preempt(driver, key)
    third = next(transfer for transfer in driver.worker.transfers if transfer.to_id == sequence_of(driver, key).slots[0][2])
    driver.worker.carry_out(third, 1, ok=False)
    driver.tell_transfers()
    assert sequence_of(driver, key).num_computed_tokens == 8
    assert places(driver, key) == "aa"
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(14), 20)
    assert_nothing_held(driver)


def test_a_copy_in_that_fails_means_computing_again_from_there_and_nothing_leaks() -> None:
    driver = manual_driver(prefix_caching=False, swap_in_bytes_s=SLOW_LINK)
    key = start(driver, prompt(14))
    preempt(driver, key)
    carry_out_all(driver)
    let_back(driver)
    driver.turn()
    assert places(driver, key) == ">>>>"
    sequence = sequence_of(driver, key)
    second = next(transfer for transfer in driver.worker.transfers if transfer.to_id == sequence.tables[0][1])
    driver.worker.carry_out(second, 1, ok=False)
    driver.tell_transfers()
    assert (sequence.num_computed_tokens, places(driver, key)) == (4, ">")
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(14), 20)
    assert_nothing_held(driver)


@pytest.mark.parametrize("fails", ["out", "in"])
def test_the_slot_of_a_copy_that_failed_is_the_last_to_be_used_again(fails: str) -> None:
    driver = manual_driver(num_swap_slots=6, swap_in_bytes_s=SLOW_LINK)
    first = start(driver, prompt(14))
    preempt(driver, first)
    slot = sequence_of(driver, first).slots[0][3]
    driver.worker.cannot_copy = lambda transfer: slot_of(transfer) == slot and (transfer.to_tier == "arena") == (fails == "out")
    carry_out_all(driver)
    finish_all(driver)
    assert driver.outputs[first] == expected(prompt(14), 20)
    assert driver.core.swapping.swap.is_distrusted(slot)
    driver.auto_transfers = False
    second = start(driver, prompt(21, stem=3))
    written = [transfer.to_id for transfer in preempt(driver, second)]
    assert (len(written), written[-1]) == (6, slot), "after the free ones, and after those that hold copies which nobody needs"
    finish_all(driver)
    assert driver.outputs[second] == expected(prompt(21, stem=3), 20)
    assert_nothing_held(driver)


class Counting(dict[int, SwapSlotId]):
    """The slots of a sequence, and how many of them have been looked at one by one."""

    num_seen = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            Counting.num_seen += 1
            yield index

    def items(self) -> Iterator[tuple[int, SwapSlotId]]:  # type: ignore[override]
        return ((index, self[index]) for index in self)


@pytest.mark.parametrize("fails", ["out", "in"])
def test_a_batch_of_failures_costs_a_look_or_two_at_each_slot_and_not_one_for_each_failure(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = manual_driver(num_blocks=64, num_swap_slots=64, max_num_seqs=3, prefix_caching=False, swap_in_bytes_s=4e8)
    keys = [start(driver, prompt(40, stem)) for stem in range(3)]
    for key in keys:
        driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    while driver.answer():
        pass
    if fails == "in":
        carry_out_all(driver)
        monkeypatch.setattr(driver.core.swapping.transfers, "budget", lambda direction: 64)
        driver.turn()
    num_slots = sum(len(sequence_of(driver, key).slots[0]) for key in keys)
    assert num_slots == len(driver.worker.transfers) >= 30
    for key in keys:
        slots = sequence_of(driver, key).slots
        slots[0] = Counting(slots[0])
    while driver.worker.transfers:
        driver.worker.carry_out(driver.worker.transfers[0], 1, ok=False)
    Counting.num_seen = 0
    driver.core.handle(TransferDone(1, 0, tuple(number for done in driver.worker.done for number in done.transfer_ids), False, 1e-3), driver.now)
    driver.worker.done.clear()
    assert {sequence_of(driver, key).num_computed_tokens for key in keys} == {0}
    assert num_slots <= Counting.num_seen <= 2 * num_slots
    finish_all(driver)
    assert [driver.outputs[key] for key in keys] == [expected(prompt(40, stem), 20) for stem in range(3)]
    assert_nothing_held(driver)


def test_a_copy_that_a_forward_waited_for_and_that_failed_voids_what_was_computed_on_it() -> None:
    driver = manual_driver(prefix_caching=False)
    driver.worker.fail_copy = lambda transfer: transfer.to_tier == "device"
    key, _ = come_back_at_once(driver)
    num_known = len(driver.outputs[key])
    driver.answer()
    assert len(driver.outputs[key]) == num_known
    assert sequence_of(driver, key).num_computed_tokens == 0
    driver.worker.fail_copy = lambda transfer: False
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(14), 20)
    assert driver.core.swapping.swap.num_used == 0


def cannot_be_read(transfer: Transfer) -> bool:
    return transfer.from_tier == "arena"


def slots_outlived(driver: CoreDriver) -> set[SwapSlotId]:
    """Those in which the next scheduler would find KV."""
    adopt = driver.adoptable()
    assert adopt is not None
    return {slot for slot, _ in adopt.swap_slots}


def num_copies_in(driver: CoreDriver) -> int:
    return sum(cannot_be_read(transfer) for plan in driver.plans for transfer in plan.transfers)


@pytest.mark.parametrize("swap_in_bytes_s", [4e9, SLOW_LINK])
@pytest.mark.parametrize("num_plans", [1, 2])
def test_what_can_never_be_read_is_tried_once_and_computed_again(swap_in_bytes_s: float, num_plans: int) -> None:
    driver = manual_driver(prefix_caching=False, swap_in_bytes_s=swap_in_bytes_s, max_plans_in_flight=num_plans)
    driver.worker.cannot_copy = cannot_be_read
    key = start(driver, prompt(14))
    preempt(driver, key)
    carry_out_all(driver)
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(14), 20)
    assert num_copies_in(driver) <= 4
    assert_nothing_held(driver)
    assert driver.core.swapping.swap.num_cached == 0, "nobody is to find what cannot be read"


def test_a_prefix_that_cannot_be_read_is_forgotten_by_whoever_may_ask_for_it_and_holds_nobody_up() -> None:
    driver = manual_driver(num_blocks=12, num_swap_slots=32, max_num_seqs=2)
    driver.auto_transfers = True
    for stem in (0, 5):  # the second one's blocks take the place of the first one's
        start(driver, prompt(40, stem), max_tokens=2)
        driver.run()
    saved = slots_outlived(driver)
    driver.worker.cannot_copy = cannot_be_read
    asking, behind = (driver.add([*prompt(40)[:length], 1, 2], max_tokens=3) for length in (24, 4))
    driver.turn()
    tried = {transfer.from_id for transfer in driver.plans[-1].transfers if cannot_be_read(transfer)}
    assert tried
    assert tried <= saved
    driver.tell_transfers()
    assert not slots_outlived(driver) & tried, "not even by the next scheduler"
    driver.run(limit=50)
    assert driver.outputs[asking] == expected([*prompt(24), 1, 2], 3)
    assert driver.outputs[behind] == expected([*prompt(4), 1, 2], 3)
    assert_nothing_held(driver)


def test_of_two_that_wait_for_one_slot_that_cannot_be_read_both_compute_again_and_the_slot_is_free() -> None:
    driver = manual_driver(max_num_seqs=3, swap_in_bytes_s=SLOW_LINK)
    keys = [driver.add([*prompt(8), *prompt(3, stem)], max_tokens=9, priority=1) for stem in (3, 4)]
    for _ in range(2):
        driver.step()
    driver.add(prompt(78, stem=7), max_tokens=1, priority=0)
    driver.step()
    carry_out_all(driver)
    sequences = [sequence_of(driver, key) for key in keys]
    slot = sequences[0].slots[0][0]
    assert sequences[1].slots[0][0] == slot
    while not driver.worker.transfers:
        driver.step()
    copy = next(transfer for transfer in driver.worker.transfers if transfer.from_id == slot)
    driver.worker.carry_out(copy, 1, ok=False)
    driver.tell_transfers()
    assert [(sequence.num_computed_tokens, sequence.slots[0]) for sequence in sequences] == [(0, {}), (0, {})]
    others = [transfer for transfer in driver.core.swapping.transfers.in_flight() if transfer.slot == slot]
    assert driver.core.swapping.swap.count(slot) == len(others)
    finish_all(driver)
    for key, stem in zip(keys, (3, 4), strict=True):
        assert driver.outputs[key] == expected([*prompt(8), *prompt(3, stem)], 9, 80)
    assert_nothing_held(driver)
