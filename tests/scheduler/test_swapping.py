"""Swapping: what goes to the arena and comes back, block by block, whatever happens meanwhile."""

from __future__ import annotations

import pytest

from pagemill.ids import NONE
from scheduler.events import Preempt
from scheduler.sequence import Status
from tests.helpers.swapping import (
    SLOW_LINK,
    assert_nothing_held,
    carry_out_all,
    come_back_at_once,
    expected,
    finish_all,
    let_back,
    manual_driver,
    out_of,
    places,
    preempt,
    prompt,
    sequence_of,
    start,
)

# --- what goes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "left"), [(1, "dda"), (2, "daa"), (100, "aaa")])
def test_blocks_go_from_the_end_and_no_more_than_are_wanted(num_blocks: int, left: str) -> None:
    driver = manual_driver()
    key = start(driver, prompt(10))
    table = list(sequence_of(driver, key).tables[0])
    ordered = preempt(driver, key, num_blocks=num_blocks)
    assert places(driver, key) == left
    assert out_of(ordered) == [block for block, place in zip(table, left, strict=True) if place == "a"][::-1]


def test_the_partly_filled_last_block_and_generated_tokens_go_too() -> None:
    driver = manual_driver()
    key = start(driver, prompt(6), steps=4)
    sequence = sequence_of(driver, key)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 9)
    preempt(driver, key)
    assert places(driver, key) == "aaa"
    assert (sequence.num_computed_tokens, driver.core.swapping.num_moved_tokens) == (9, 9)
    carry_out_all(driver)
    let_back(driver)
    before = driver.worker.num_positions
    driver.auto_transfers = True
    driver.run()
    assert driver.outputs[key] == expected(prompt(6), 20)
    assert driver.worker.num_positions - before == 6 + 20 - 1 - 9, "nothing was computed again"


def test_blocks_that_a_running_sequence_shares_stay() -> None:
    driver = manual_driver(max_num_seqs=2)
    first = start(driver, prompt(13))
    second = start(driver, [*prompt(8), *prompt(5, stem=2)])
    preempt(driver, second)
    assert places(driver, second) == "ddaa"
    assert places(driver, first) == "dddd"
    finish_all(driver)
    assert driver.outputs[second] == expected([*prompt(8), *prompt(5, stem=2)], 20)


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_running_sequence_refers_to_is_never_asked_for(shared: bool) -> None:
    driver = manual_driver(max_num_seqs=2)
    start(driver, prompt(13))
    second = start(driver, [*prompt(8), *prompt(5, stem=2)])
    preempt(driver, second, "keep")
    tail = driver.core.swapping.tail(sequence_of(driver, second), 100, {}, shared=shared)
    assert (tail.entries, tail.num_freed) == ([(3, 0), (2, 0)], 2)


def test_what_two_that_do_not_run_share_is_given_up_only_when_both_are_asked_for_it() -> None:
    driver = manual_driver(max_num_seqs=2)
    keys = [start(driver, [*prompt(8), *prompt(5, stem)]) for stem in (2, 3)]
    for key in keys:
        preempt(driver, key, "keep")
        while driver.answer():
            pass
    sequence, tail = sequence_of(driver, keys[1]), driver.core.swapping.tail
    assert tail(sequence, 100, {}).entries == [(3, 0), (2, 0)]
    assert tail(sequence, 100, {}, shared=True).entries == [(3, 0), (2, 0), (1, 0), (0, 0)]
    assert tail(sequence, 100, {}, shared=True).num_freed == 2
    assert tail(sequence, 100, dict.fromkeys(sequence.tables[0])).entries == [], "nor what the needy one is going to adopt"


def test_what_came_back_leaves_a_clean_copy_that_is_not_copied_again() -> None:
    driver = manual_driver()
    key = start(driver, prompt(10))
    assert len(out_of(preempt(driver, key))) == 3
    carry_out_all(driver)
    let_back(driver)
    while sequence_of(driver, key).status is not Status.RUNNING:
        driver.step()
        carry_out_all(driver)
    assert driver.core.swapping.swap.num_cached == 2, "the partly filled block has no name, so its copy is gone"
    again = preempt(driver, key)
    assert len(out_of(again)) == 1
    assert places(driver, key) == "aaa"
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(10), 20)
    assert_nothing_held(driver)


@pytest.mark.parametrize("num_slots", [0, 2])
def test_a_full_arena_means_computing_again(num_slots: int) -> None:
    driver = manual_driver(num_swap_slots=num_slots, preemption="swap")
    key = start(driver, prompt(10))
    assert not out_of(preempt(driver, key))
    (decision,) = driver.core.preemption.decisions.newest(1)
    assert (decision.victims[0].kind, decision.victims[0].swap_s) == ("recompute", None)
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(10), 20)


def test_held_slots_are_never_taken_from_a_preempted_sequence() -> None:
    driver = manual_driver(num_swap_slots=4, max_num_seqs=2)
    first, second = start(driver, prompt(10, 1)), start(driver, prompt(10, 2))
    preempt(driver, second)
    held = dict(sequence_of(driver, second).slots[0])
    carry_out_all(driver)
    while driver.answer():
        pass
    preempt(driver, first)
    assert driver.core.preemption.decisions.newest(1)[0].victims[0].kind == "recompute", "one slot is left, three would be needed"
    assert (places(driver, second), sequence_of(driver, second).slots[0]) == ("aaa", held)
    finish_all(driver)
    assert [driver.outputs[key] for key in (first, second)] == [expected(prompt(10, stem), 20) for stem in (1, 2)]


# --- two that share --------------------------------------------------------------------------------------


def test_two_that_yield_together_hold_one_slot_for_each_block_they_share_and_whoever_needs_them_does_not_wait_for_the_copy() -> None:
    driver = manual_driver(num_blocks=12, max_num_seqs=3)
    common = prompt(8)
    keys = [driver.add([*common, *prompt(3, stem)], max_tokens=9, priority=1) for stem in (3, 4)]
    for _ in range(2):
        driver.step()
    assert driver.core.memory.pool.num_used == 2 + 1 + 1
    urgent = driver.add(prompt(45, stem=7), max_tokens=2, priority=0)
    driver.turn()
    assert sequence_of(driver, urgent).status is Status.RUNNING
    plan = driver.plans[-1]
    assert [(piece.start, piece.num_tokens) for piece in plan.slices] == [(0, 45)]
    assert {transfer.needed_by for transfer in plan.transfers} == {plan.plan_id}, "its forward waits, and may overwrite all of them"
    first, second = (sequence_of(driver, key).slots[0] for key in keys)
    assert first[1] == second[1]
    assert first[2] != second[2]
    assert len(out_of(plan.transfers)) == 4, "the shared ones are copied once"
    assert driver.core.swapping.swap.num_used == 4
    finish_all(driver)
    for key, stem in zip(keys, (3, 4), strict=True):
        assert driver.outputs[key] == expected([*common, *prompt(3, stem)], 9, 48)
    assert_nothing_held(driver)


def test_of_what_two_share_no_more_is_given_up_than_is_wanted() -> None:
    driver = manual_driver(num_blocks=12, max_num_seqs=3)
    common = prompt(20)
    keys = [driver.add([*common, *prompt(3, stem)], max_tokens=9, priority=1) for stem in (3, 4)]
    for _ in range(2):
        driver.step()
    driver.add(prompt(31, stem=7), max_tokens=1, priority=0)
    driver.turn()
    assert [places(driver, key) for key in keys] == ["ddddaa", "ddddaa"], "four of the twelve are left, for eight are needed"
    assert len(out_of(driver.plans[-1].transfers)) == 3
    finish_all(driver)
    for key, stem in zip(keys, (3, 4), strict=True):
        assert driver.outputs[key] == expected([*common, *prompt(3, stem)], 9, 48)
    assert_nothing_held(driver)


# --- how it comes back -----------------------------------------------------------------------------------


def test_what_takes_little_of_a_step_comes_back_in_the_plan_whose_forward_waits_for_it() -> None:
    driver = manual_driver(prefix_caching=False)
    key, plan = come_back_at_once(driver)
    assert len(plan.slices) == 1
    assert {transfer.needed_by for transfer in plan.transfers} == {plan.plan_id}
    finish_all(driver)
    assert driver.outputs[key] == expected(prompt(14), 20)


def test_a_forward_waits_for_no_more_than_its_share_however_many_come_back() -> None:
    driver = manual_driver(prefix_caching=False, max_num_seqs=2, swap_in_bytes_s=5e8)
    keys = [driver.add(prompt(14, stem), max_tokens=20) for stem in (1, 2)]
    driver.step()
    for key in keys:
        driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    carry_out_all(driver)
    while driver.answer():
        pass
    driver.turn()
    needed_by = [transfer.needed_by for transfer in driver.plans[-1].transfers if transfer.to_tier == "device"]
    assert sorted(needed_by) == [NONE] * 4 + [driver.plans[-1].plan_id] * 4, "four blocks take 8 of the 10 ms that a step gives"
    assert len(driver.plans[-1].slices) == 1
    finish_all(driver)
    assert [driver.outputs[key] for key in keys] == [expected(prompt(14, stem), 20) for stem in (1, 2)]


@pytest.mark.parametrize(("prefill_tok_s", "waits"), [(1.0, True), (1e9, False)])
def test_a_forward_waits_for_copies_that_are_short_beside_the_chunk_it_computes_however_short_steps_were_so_far(prefill_tok_s: float, waits: bool) -> None:
    driver = manual_driver(num_blocks=12, num_swap_slots=32, preemption="swap", prefill_tok_s=prefill_tok_s, swap_in_bytes_s=SLOW_LINK)
    driver.auto_transfers = True
    for stem in (0, 5):  # the second one's blocks take the place of the first one's
        start(driver, prompt(40, stem), max_tokens=2)
        driver.run()
    driver.auto_transfers = False
    asking = driver.add([*prompt(24), 1, 2, 3], max_tokens=3)
    driver.turn()
    plan = driver.plans[-1]
    assert {transfer.needed_by for transfer in plan.transfers if transfer.to_tier == "device"} == {plan.plan_id if waits else NONE}
    assert len(plan.slices) == waits
    finish_all(driver)
    assert driver.outputs[asking] == expected([*prompt(24), 1, 2, 3], 3)
    assert_nothing_held(driver)


@pytest.mark.parametrize(("prefill_tok_s", "waits"), [(1.0, True), (1e9, False)])
def test_a_forward_waits_for_copies_that_are_short_beside_a_chunk_of_somebody_else(prefill_tok_s: float, waits: bool) -> None:
    driver = manual_driver(preemption="swap", max_num_seqs=2, max_num_batched_tokens=8, prefill_tok_s=prefill_tok_s, swap_in_bytes_s=SLOW_LINK)
    key = start(driver, prompt(8), steps=2)
    other = driver.add(prompt(40, 3), max_tokens=2, priority=1)
    driver.step()
    driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    carry_out_all(driver)
    driver.answer()
    driver.turn()
    sequence, plan = sequence_of(driver, key), driver.plans[-1]
    assert sequence_of(driver, other).num_uncomputed_tokens > 1, "its prompt is still being computed"
    assert {transfer.needed_by for transfer in plan.transfers if transfer.to_tier == "device"} == {plan.plan_id if waits else NONE}
    assert (sequence.status is Status.RUNNING) == waits
    finish_all(driver)
    assert [driver.outputs[key], driver.outputs[other]] == [expected(prompt(8), 20), expected(prompt(40, 3), 2)]


# --- the end in the middle -------------------------------------------------------------------------------

PHASES = ["copies out are ordered", "one copy out is done", "all copies out are done", "copies in are ordered", "one copy in is done"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cached", [True, False])
def test_an_abort_in_the_middle_of_a_copy_ends_with_every_block_and_slot_free(phase: str, cached: bool) -> None:
    driver = manual_driver(swap_in_bytes_s=SLOW_LINK)
    key = driver.add(prompt(10), max_tokens=20, cached=cached, priority=1)
    driver.step()
    preempt(driver, key)
    worker = driver.worker
    if phase == PHASES[1]:
        worker.carry_out(worker.transfers[0], 1)
        driver.tell_transfers()
    elif phase != PHASES[0]:
        carry_out_all(driver)
    if phase in PHASES[3:]:
        let_back(driver)
        driver.turn()
        assert places(driver, key) == ("dd>" if cached else ">>>"), "confirmed blocks that nobody has overwritten need no copy"
        if phase == PHASES[4]:
            worker.carry_out(worker.transfers[0], 1)
            driver.tell_transfers()
    num_under_way = len(driver.core.swapping.transfers)
    assert (num_under_way > 0) == (phase != PHASES[2] and not (phase == PHASES[4] and cached))
    driver.abort(key)
    assert len(driver.core.swapping.transfers) == num_under_way, "what is under way cannot be taken back"
    if num_under_way:
        assert driver.core.memory.pool.num_used or driver.core.swapping.swap.num_used, "and is not reused before it is done"
    finish_all(driver)
    assert_nothing_held(driver)
    if not cached:
        assert driver.core.swapping.swap.num_cached == 0, "nobody could ever find what it alone had"
