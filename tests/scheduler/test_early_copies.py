"""Copies ahead of need, and what they are good for: the second level of the prefix cache, and preemptions that need not copy."""

from __future__ import annotations

from array import array

import pytest

from pagemill.keys import KEY_BYTES, prefix_keys
from tests.helpers.core_driver import ROOT, CoreDriver
from tests.helpers.swapping import (
    SLOW_PREFILL,
    assert_nothing_held,
    carry_out_all,
    expected,
    finish_all,
    manual_driver,
    out_of,
    places,
    preempt,
    prompt,
    sequence_of,
    start,
)

# --- the second level of the prefix cache ----------------------------------------------------------------


def evict_a_prefix(driver: CoreDriver, tokens: list[int]) -> None:
    """One request with this prompt ends; another then wants every block."""
    start(driver, tokens, max_tokens=2)
    driver.run()
    start(driver, prompt(driver.core.memory.capacity_tokens() - 2, stem=9), max_tokens=2)
    driver.run()
    assert not driver.core.memory.pool.index.find_run(prefix_of(driver, tokens))


def prefix_of(driver: CoreDriver, tokens: list[int]) -> list[bytes]:
    keys = prefix_keys(ROOT, array("i", tokens), driver.core.config.block_size)
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def test_an_evicted_prefix_is_found_in_the_arena() -> None:
    driver = manual_driver(num_swap_slots=32)
    driver.auto_transfers = True
    evict_a_prefix(driver, prompt(13))
    key = start(driver, prompt(13), max_tokens=5, steps=0)
    before = driver.worker.num_positions
    driver.run()
    assert driver.core.swapping.num_arena_hit_tokens == 12
    assert driver.finished[key].num_cached_tokens == 12
    assert driver.worker.num_positions - before == 1 + 4
    assert driver.outputs[key] == expected(prompt(13), 5)


@pytest.mark.parametrize(("prefill_tok_s", "num_found"), [(SLOW_PREFILL, 12), (1e9, 0)])
def test_a_prefix_in_the_arena_is_fetched_only_if_that_is_cheaper_than_computing_it(prefill_tok_s: float, num_found: int) -> None:
    driver = manual_driver(num_swap_slots=32)
    driver.auto_transfers = True
    evict_a_prefix(driver, prompt(13))
    driver.core.prefill.per_token_s, driver.core.prefill.per_pair_s = 1 / prefill_tok_s, 0.0
    key = start(driver, prompt(13), max_tokens=5)
    driver.run()
    assert driver.core.swapping.num_arena_hit_tokens == num_found
    assert driver.outputs[key] == expected(prompt(13), 5)


def test_a_cached_slot_is_dropped_the_moment_a_sequence_needs_it() -> None:
    driver = manual_driver(num_swap_slots=3)
    driver.auto_transfers = True
    evict_a_prefix(driver, prompt(13))
    assert driver.core.swapping.swap.num_free == 0
    driver.auto_transfers = False
    key = start(driver, prompt(10, stem=5))
    carry_out_all(driver)
    assert len(out_of(preempt(driver, key))) == 3
    assert places(driver, key) == "aaa"
    assert driver.core.swapping.swap.num_used == 3


def test_nothing_is_saved_when_fetching_would_not_pay() -> None:
    driver = manual_driver(num_swap_slots=32, prefill_tok_s=1e9)
    driver.auto_transfers = True
    evict_a_prefix(driver, prompt(13))
    assert driver.core.swapping.swap.num_cached == 0


# --- copies ahead of need --------------------------------------------------------------------------------


def early_copies(driver: CoreDriver) -> int:
    return driver.core.swapping.transfers.num_early_copies


def test_early_copies_are_of_confirmed_blocks_only_and_the_last_ones_first() -> None:
    driver = manual_driver(num_blocks=8, num_swap_slots=32, max_num_seqs=2)
    start(driver, prompt(6), max_tokens=9)
    behind = start(driver, prompt(14, stem=1), max_tokens=9)
    driver.turn()
    table = list(sequence_of(driver, behind).tables[0])
    ordered = [transfer.from_id for plan in driver.plans for transfer in plan.transfers]
    assert ordered[: len(ordered)] == table[2::-1][: len(ordered)], "the fourth block of the last one is not full"
    assert ordered


@pytest.mark.parametrize(("num_blocks", "copies"), [(64, False), (9, True)])
def test_early_copies_are_made_only_below_the_low_water_mark(num_blocks: int, copies: bool) -> None:
    driver = manual_driver(num_blocks=num_blocks, num_swap_slots=32, max_num_seqs=2)
    driver.auto_transfers = True
    start(driver, prompt(6), max_tokens=4)
    start(driver, prompt(14, stem=1), max_tokens=4)
    driver.run()
    assert (early_copies(driver) > 0) == copies


def test_early_copies_keep_to_the_budget_of_the_link() -> None:
    driver = manual_driver(num_blocks=7, num_swap_slots=32, max_num_seqs=2, swap_out_bytes_s=1.0)
    start(driver, prompt(6), max_tokens=20)
    start(driver, prompt(14, stem=1), max_tokens=20, steps=6)
    assert len(driver.core.swapping.transfers) == 1


def test_a_block_is_not_overwritten_while_its_early_copy_is_under_way() -> None:
    driver = manual_driver(num_blocks=6, num_swap_slots=32)
    start(driver, prompt(14), max_tokens=1)
    driver.turn()
    early = [transfer.from_id for plan in driver.plans for transfer in plan.transfers]
    assert early, "blocks that nobody refers to are saved before they are wanted"
    pool = driver.core.memory.pool
    taken = [pool.allocate() for _ in range(pool.num_obtainable)]
    assert not {*early} & {*taken}
    for block in taken:
        pool.release(block)


@pytest.mark.parametrize("num_slots", [1, 2, 5, 64])
def test_an_idle_engine_comes_to_rest(num_slots: int) -> None:
    driver = manual_driver(num_blocks=6, num_swap_slots=num_slots)
    driver.auto_transfers = True
    for stem in range(4):
        start(driver, prompt(9, stem), max_tokens=4)
        driver.run()
    num_plans = len(driver.plans)
    for _ in range(50):
        driver.turn()
        driver.answer()
        driver.tell_transfers()
    assert len(driver.plans) - num_plans <= 2
    driver.turn()
    assert not driver.in_flight
    assert_nothing_held(driver)


@pytest.mark.parametrize("num_distrusted", [2, 3, 4])
def test_an_idle_engine_comes_to_rest_where_hardly_any_slot_is_trusted(num_distrusted: int) -> None:
    """What is copied into the others must not push out what has just been copied there."""
    driver = manual_driver(num_blocks=6, num_swap_slots=4)
    swap = driver.core.swapping.swap
    for slot in [swap.allocate() for _ in range(num_distrusted)]:
        swap.distrust(slot)
        swap.release(slot)
    driver.auto_transfers = True
    for stem in range(4):
        start(driver, prompt(9, stem), max_tokens=4)
        driver.run(limit=100)
    for _ in range(10):
        driver.turn()
        assert not driver.in_flight
    assert_nothing_held(driver)


def test_an_idle_engine_whose_early_copies_fail_tries_each_once_and_comes_to_rest() -> None:
    driver = manual_driver(num_blocks=6, num_swap_slots=64)
    driver.auto_transfers = True
    driver.worker.cannot_copy = lambda transfer: transfer.to_tier == "arena"
    for stem in range(4):
        start(driver, prompt(9, stem), max_tokens=4)
        driver.run(limit=50)
    num_copies = early_copies(driver)
    assert num_copies > 0
    for _ in range(10):
        driver.turn()
        assert not driver.in_flight
    assert early_copies(driver) == num_copies
    assert driver.core.swapping.swap.num_free == 64, "nothing is named that was not copied"


def test_a_block_with_another_content_is_copied_early_though_the_copy_of_the_former_failed() -> None:
    driver = manual_driver(num_blocks=6, num_swap_slots=64)
    driver.auto_transfers = True
    driver.worker.cannot_copy = lambda transfer: transfer.to_tier == "arena"
    start(driver, prompt(9), max_tokens=4)
    driver.run(limit=50)
    num_plans, failed = len(driver.plans), {transfer.from_id for plan in driver.plans for transfer in plan.transfers}
    assert failed
    driver.worker.cannot_copy = lambda transfer: False
    start(driver, prompt(21, stem=1), max_tokens=3)
    driver.run(limit=50)
    assert failed & {transfer.from_id for plan in driver.plans[num_plans + 1 :] for transfer in plan.transfers}


def test_an_early_copy_saves_the_later_preemption_its_bytes() -> None:
    driver = manual_driver(num_blocks=9, num_swap_slots=32, max_num_seqs=2)
    driver.auto_transfers = True
    start(driver, prompt(6), max_tokens=20)
    behind = start(driver, prompt(14, stem=1), max_tokens=20, steps=3)
    table = list(sequence_of(driver, behind).tables[0])
    copied = {transfer.from_id for plan in driver.plans for transfer in plan.transfers} & set(table)
    assert copied
    driver.auto_transfers = False
    assert {*out_of(preempt(driver, behind))} & {*table} == {*table} - copied
    assert places(driver, behind) == "a" * len(table)
    finish_all(driver)
    assert driver.outputs[behind] == expected(prompt(14, stem=1), 20, 36)
