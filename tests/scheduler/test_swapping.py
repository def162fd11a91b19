"""Swapping: what goes to the arena and comes back, block by block, whatever happens meanwhile."""

from __future__ import annotations

from array import array

import pytest

from pagemill.keys import KEY_BYTES, prefix_keys
from pagemill.messages import NONE, Plan, Preempt, SamplingParams, SequenceKey, Transfer, VictimKind
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import ROOT, CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32
#: Swapping is always the cheaper way unless a test says otherwise.
SLOW_PREFILL = 1.0


def prompt(length: int, stem: int = 0) -> list[int]:
    return [(stem * 11 + i * 3 + i // 8) % VOCAB for i in range(length)]


def expected(tokens: list[int], max_tokens: int, longest: int = 1000) -> list[int]:
    return expected_tokens(tokens, SamplingParams(), 0, longest, max_tokens, VOCAB)


#: A block takes longer than a forward would wait for, so it comes beside the forwards.
SLOW_LINK = 5e7


def manual_driver(**numbers: object) -> CoreDriver:
    """One seat, and copies are done only when the test says so."""
    defaults: dict[str, object] = {
        "num_blocks": 20,
        "block_size": 4,
        "num_swap_slots": 16,
        "prefill_tok_s": SLOW_PREFILL,
        "max_num_seqs": 1,
        "scheduling_policy": "priority",
    }
    driver = CoreDriver(None, **defaults | numbers)
    driver.auto_transfers = False
    return driver


def preempt(driver: CoreDriver, key: SequenceKey, kind: VictimKind = "swap", num_blocks: int = 100) -> tuple[Transfer, ...]:
    """Makes it yield, and an urgent request takes its seat until `let_back`. Returns the copies ordered."""
    before = len(driver.plans)
    driver.add([VOCAB - 1, number_of(driver)], max_tokens=30, priority=-1)
    driver.handle(Preempt(key, kind, num_blocks))
    driver.turn()
    return tuple(transfer for plan in driver.plans[before:] for transfer in plan.transfers)


def number_of(driver: CoreDriver) -> int:
    return len(driver.outputs)


def let_back(driver: CoreDriver) -> None:
    """The urgent request goes, and with the next turn the preempted sequence may come back."""
    while driver.answer():
        pass
    for key, sequence in list(driver.core.sequences.items()):
        if sequence.priority < 0:
            driver.abort(key)


def finish_all(driver: CoreDriver) -> None:
    let_back(driver)
    driver.auto_transfers = True
    carry_out_all(driver)
    driver.run()


def out_of(transfers: tuple[Transfer, ...]) -> list[int]:
    return [transfer.from_id for transfer in transfers if transfer.to_tier == "arena"]


def carry_out_all(driver: CoreDriver, *, ok: bool = True) -> None:
    while driver.worker.transfers:
        driver.worker.carry_out(driver.worker.transfers[0], driver.core.config.epoch, ok=ok)
    driver.tell_transfers()


def sequence_of(driver: CoreDriver, key: SequenceKey) -> Sequence:
    return driver.core.sequences[key]


def places(driver: CoreDriver, key: SequenceKey) -> str:
    """For each block of the sequence: d on the device, a in the arena, > arriving."""
    sequence = sequence_of(driver, key)
    return "".join("a" if block == NONE else ">" if (0, index) in sequence.arriving else "d" for index, block in enumerate(sequence.tables[0]))


def assert_nothing_held(driver: CoreDriver) -> None:
    core = driver.core
    assert (core.memory.pool.num_used, core.swapping.swap.num_used, len(core.swapping.transfers)) == (0, 0, 0)


def start(driver: CoreDriver, tokens: list[int], max_tokens: int = 20, steps: int = 1) -> SequenceKey:
    key = driver.add(tokens, max_tokens=max_tokens, priority=1)
    for _ in range(steps):
        driver.step()
    return key


# --- what goes ---------------------------------------------------------------------------------------------


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


# --- two that share ----------------------------------------------------------------------------------------


def test_two_preempted_sequences_hold_one_slot_for_each_block_they_share() -> None:
    driver = manual_driver(num_blocks=12, max_num_seqs=3)
    common = prompt(8)
    keys = [driver.add([*common, *prompt(3, stem)], max_tokens=9, priority=1) for stem in (3, 4)]
    for _ in range(2):
        driver.step()
    assert driver.core.memory.pool.num_used == 2 + 1 + 1
    urgent = driver.add(prompt(43, stem=7), max_tokens=4, priority=0)
    driver.turn()
    driver.answer()
    carry_out_all(driver)
    driver.turn()
    assert sequence_of(driver, urgent).status is Status.RUNNING
    first, second = (sequence_of(driver, key).slots[0] for key in keys)
    assert first[1] == second[1]
    assert first[2] != second[2]
    assert len(out_of(tuple(transfer for plan in driver.plans for transfer in plan.transfers))) == 4, "the shared ones were copied once"
    assert driver.core.swapping.swap.num_used == 4
    finish_all(driver)
    for key, stem in zip(keys, (3, 4), strict=True):
        assert driver.outputs[key] == expected([*common, *prompt(3, stem)], 9, 48)
    assert_nothing_held(driver)


# --- copies that fail --------------------------------------------------------------------------------------


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


def come_back_at_once(driver: CoreDriver) -> tuple[SequenceKey, Plan]:
    """A preempted sequence whose copies take little of a step, and the plan that brings it back."""
    key = start(driver, prompt(14))
    preempt(driver, key)
    carry_out_all(driver)
    let_back(driver)
    driver.turn()
    return key, driver.plans[-1]


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


# --- the end in the middle ---------------------------------------------------------------------------------

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


# --- the second level of the prefix cache ------------------------------------------------------------------


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


# --- copies ahead of need ----------------------------------------------------------------------------------


def early_copies(driver: CoreDriver) -> int:
    return driver.core.swapping.num_early_copies


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
