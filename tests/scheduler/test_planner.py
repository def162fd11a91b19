"""The planner: who yields, which way, at what price, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pagemill.ids import NO_PLAN
from pagemill.messages.decisions import Decision
from pagemill.messages.sequences import SamplingParams, SequenceKey
from scheduler.offers import Offer
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens
from tests.helpers.swapping import assert_nothing_held, carry_out_all, finish_all, manual_driver, places, preempt, prompt, start

VOCAB = 32


def expected(tokens: list[int], max_tokens: int, longest: int = 1000) -> list[int]:
    return expected_tokens(tokens, SamplingParams(), 0, longest, max_tokens, VOCAB)


def pressed(**numbers: object) -> CoreDriver:
    """Three that do not fit together run to their ends."""
    driver = CoreDriver(None, **{"num_blocks": 12, "block_size": 4, "num_swap_slots": 16, "prefill_tok_s": 1.0} | numbers)
    keys = [driver.add(prompt(9, stem), max_tokens=24) for stem in range(3)]
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected(prompt(9, stem), 24, 48)
    assert_nothing_held(driver)
    return driver


def decisions(driver: CoreDriver) -> list[Decision]:
    return driver.core.preemption.decisions.newest(1000)


def kinds(driver: CoreDriver) -> Counter[str]:
    return Counter(victim.kind for decision in decisions(driver) for victim in decision.victims if victim.yielded and victim.freed)


# --- which way ---------------------------------------------------------------------------------------------


def test_the_cheaper_way_is_taken() -> None:
    assert set(kinds(pressed(prefill_tok_s=1.0))) == {"swap"}
    assert set(kinds(pressed(prefill_tok_s=1e9))) == {"recompute"}


def test_asked_to_swap_it_swaps_at_any_price_while_there_are_slots() -> None:
    assert set(kinds(pressed(preemption="swap", prefill_tok_s=1e9))) == {"swap"}


def test_asked_to_recompute_it_never_uses_the_arena() -> None:
    driver = pressed(preemption="recompute", prefill_tok_s=1e-3)
    assert set(kinds(driver)) == {"recompute"}
    assert driver.core.swapping.swap.total == 0
    assert not any(plan.transfers for plan in driver.plans)


def test_what_is_queued_on_the_link_makes_swapping_dearer() -> None:
    driver = manual_driver(num_blocks=40, num_swap_slots=40, max_num_seqs=2, prefix_caching=False)
    first, second = start(driver, prompt(33)), start(driver, prompt(9, stem=1))
    planner = driver.core.preemption

    def price() -> float | None:
        return planner._offer(driver.core.sequences[second], 100, {}).swap_s

    before = price()
    preempt(driver, first)
    assert driver.core.swapping.transfers.backlog_bytes("out") == 9 << 20
    after = price()
    assert before is not None
    assert after == pytest.approx(before + 9 * (1 << 20) / 4e9)
    carry_out_all(driver)
    finish_all(driver)


def test_what_is_being_computed_is_part_of_what_dropping_it_costs_and_what_is_not_even_ordered_costs_nothing() -> None:
    driver = CoreDriver(None, block_size=4, max_plans_in_flight=2, max_num_batched_tokens=8, prefix_caching=False, prefill_tok_s=100.0)
    key = driver.add(prompt(40), max_tokens=1)
    driver.turn()
    sequence, planner = driver.core.sequences[key], driver.core.preemption
    assert (sequence.num_computed_tokens, sequence.num_planned_tokens) == (0, 16)
    offer = planner._offer(sequence, 1, {})
    assert offer.num_tokens == 16
    assert offer.recompute_s == pytest.approx(0.16)
    driver.answer()
    assert planner._offer(sequence, 1, {}).num_tokens == 8
    assert driver.core.memory.extend(sequence, 24)
    assert planner._offer(sequence, 1, {}).recompute_s == 0.0
    driver.core.memory.shrink(sequence, 16)
    driver.run()


def test_a_clean_copy_makes_swapping_cheaper() -> None:
    driver = manual_driver(num_blocks=9, num_swap_slots=32, max_num_seqs=2)
    driver.auto_transfers = True
    start(driver, prompt(6), max_tokens=20)
    behind = start(driver, prompt(14, stem=1), max_tokens=20, steps=3)
    offer = driver.core.preemption._offer(driver.core.sequences[behind], 100, {})
    assert offer.num_without_copy < len(offer.tail.entries)
    size, rates = driver.core.config.block_bytes, driver.core.swapping.transfers.rates
    expected_s = rates["out"].seconds(offer.num_without_copy * size) + rates["in"].seconds(len(offer.tail.entries) * size)
    assert offer.swap_s == pytest.approx(expected_s)
    driver.run()


# --- decisions ---------------------------------------------------------------------------------------------


def test_a_decision_says_for_whom_what_it_cost_and_what_became_of_it() -> None:
    driver = pressed()
    decision = next(decision for decision in decisions(driver) if decision.reason == "growth")
    (victim,) = [victim for victim in decision.victims if victim.yielded]
    assert (decision.request_id, victim.request_id, victim.was_running, victim.kind) == ("r1", "r3", True, "swap")
    assert victim.swap_s is not None
    assert victim.recompute_s is not None
    assert victim.swap_s < victim.recompute_s
    assert (victim.blocks, victim.freed) == (decision.blocks_wanted, decision.blocks_wanted)
    assert victim.recompute_s == pytest.approx(victim.tokens / decision.prefill_tok_s)
    assert (decision.block_bytes, decision.swap_slots_left) == (1 << 20, 16)
    assert [one.number for one in decisions(driver)] == list(range(1, len(decisions(driver)) + 1))


def test_the_backlog_that_is_told_is_the_one_that_the_price_comes_from() -> None:
    driver = manual_driver(num_blocks=40, num_swap_slots=40, max_num_seqs=2, prefix_caching=False)
    for key in (start(driver, prompt(33)), start(driver, prompt(9, stem=1))):
        preempt(driver, key)
        driver.answer()
    told = decisions(driver)
    assert [decision.backlog_bytes for decision in told] == [0, 9 << 20], "not what was ordered because of the decision itself"
    for decision in told:
        (victim,) = decision.victims
        out_bytes = decision.backlog_bytes + victim.blocks_to_copy * decision.block_bytes
        back_bytes = victim.blocks * decision.block_bytes
        assert victim.swap_s == pytest.approx(out_bytes / decision.out_bytes_s + back_bytes / decision.in_bytes_s)
    carry_out_all(driver)
    finish_all(driver)


@pytest.mark.parametrize("num_plans", [1, 2])
def test_what_a_victim_was_given_for_the_plan_being_built_is_taken_before_any_of_its_kv(num_plans: int) -> None:
    """It has just been given the last free block, and the head comes to need one."""
    driver = CoreDriver(
        num_blocks=3, block_size=4, max_num_seqs=2, max_num_batched_tokens=5, max_plans_in_flight=num_plans, prefix_caching=False, num_swap_slots=8
    )
    behind = driver.add(prompt(4 - num_plans), max_tokens=7, arrival=9.0)
    driver.step()
    head = driver.add(prompt(9, 1), max_tokens=2, arrival=1.0)
    sequence = driver.core.sequences[behind]
    while sequence.status is Status.RUNNING:
        driver.step()
    (decision,) = decisions(driver)
    (victim,) = [victim for victim in decision.victims if victim.yielded]
    assert (victim.seq_id, victim.freed, victim.kind) == (sequence.seq_id, 1, "keep")
    assert (sequence.num_device_blocks, sequence.num_computed_tokens + sequence.num_planned_tokens) == (1, 4)
    driver.run()
    assert driver.outputs[head] == expected(prompt(9, 1), 2)
    assert driver.outputs[behind] == expected(prompt(4 - num_plans), 7)
    assert driver.core.counters.tokens_recomputed == 0


def test_preemptions_are_counted_once_by_kind_and_reason() -> None:
    driver = pressed()
    counts = driver.core.preemption.decisions.preemptions
    assert sum(counts.values()) == sum(output.num_preemptions for output in driver.finished.values())
    assert counts["swap/growth"] == driver.core.preemption.decisions.num_preempted("swap")


# --- the head ----------------------------------------------------------------------------------------------


def test_the_head_takes_what_preempted_ones_hold_and_blocks_in_transfer_as_soon_as_they_are_done() -> None:
    driver = manual_driver(num_blocks=8, num_swap_slots=8, max_num_seqs=3, prefix_caching=False)
    first = start(driver, prompt(8, 1))
    second = start(driver, prompt(8, 2))
    head = driver.add(prompt(27, 3), max_tokens=3, priority=0)
    for _ in range(12):
        driver.turn()
        if driver.core.sequences[head].status is Status.RUNNING:
            break
        driver.answer()
        carry_out_all(driver)
    assert driver.core.sequences[head].status is Status.RUNNING
    assert all(driver.core.sequences[key].status is Status.PREEMPTED for key in (first, second))
    driver.auto_transfers = True
    carry_out_all(driver)
    driver.run()
    assert driver.outputs[head] == expected(prompt(27, 3), 3, 32)
    assert_nothing_held(driver)


def test_the_head_takes_seat_and_blocks_at_once_also_from_equals() -> None:
    """Not only after it has waited: an older one that comes late, as after a resubmission, is ahead of all others."""
    driver = CoreDriver(None, num_blocks=8, block_size=4, max_num_seqs=2, prefix_caching=False)
    keys = [driver.add(prompt(12, stem), max_tokens=20, arrival=10.0 + stem) for stem in range(2)]
    driver.step()
    head = driver.add(prompt(16, 5), max_tokens=4, arrival=1.0)
    driver.step()
    assert driver.core.sequences[head].status is Status.RUNNING
    assert driver.core.sequences[keys[1]].status is Status.PREEMPTED
    driver.run()


def test_the_head_takes_back_blocks_into_which_the_kv_of_one_behind_is_just_arriving() -> None:
    driver = manual_driver(num_blocks=8, num_swap_slots=8, max_num_seqs=1, prefix_caching=False)
    behind = start(driver, prompt(20, 1))
    preempt(driver, behind)
    carry_out_all(driver)
    while driver.answer():
        pass
    for key, sequence in list(driver.core.sequences.items()):
        if sequence.priority < 0:
            driver.abort(key)
    driver.turn()
    assert ">" in places(driver, behind)
    head = driver.add(prompt(27, 3), max_tokens=3, priority=0)
    driver.turn()
    assert driver.core.sequences[head].status is Status.WAITING, "what is being written cannot be taken before it is done"
    while driver.answer():
        pass
    carry_out_all(driver)
    driver.turn()
    assert driver.core.sequences[head].status is Status.RUNNING
    driver.auto_transfers = True
    carry_out_all(driver)
    driver.run()
    assert driver.outputs[behind] == expected(prompt(20, 1), 20, 32)
    assert_nothing_held(driver)


def test_a_forward_waits_for_the_copy_of_a_block_that_its_plan_overwrites_and_for_no_other() -> None:
    driver = manual_driver(num_blocks=8, num_swap_slots=8, max_num_seqs=2, prefix_caching=False)
    start(driver, prompt(23, 1))
    head = driver.add(prompt(11, 3), max_tokens=3, priority=0)
    driver.turn()
    plan = driver.plans[-1]
    assert driver.core.sequences[head].status is Status.RUNNING
    overwritten = set(driver.core.sequences[head].tables[0])
    assert plan.transfers
    for transfer in plan.transfers:
        assert (transfer.needed_by == plan.plan_id) == (transfer.from_id in overwritten)
        assert transfer.needed_by in (NO_PLAN, plan.plan_id)
    finish_all(driver)


def test_one_that_starts_leaves_room_for_what_others_were_promised_and_the_head_for_nothing() -> None:
    driver = CoreDriver(None, num_blocks=64, block_size=4, max_num_batched_tokens=8, prefix_caching=False)
    driver.add(prompt(40), max_tokens=20)
    driver.step()
    driver.add(prompt(40, 1), max_tokens=20)
    running, waiting = driver.core.queues.running[0], driver.core.queues.waiting[0]
    planner, num_obtainable = driver.core.preemption, driver.core.memory.pool.num_obtainable
    assert (num_obtainable, planner.head) == (64 - 2, running)
    assert planner._room(waiting) == num_obtainable - (10 - 2) - 1
    planner.num_reserved = 5  # for one whose KV is on its way
    assert planner._room(waiting) == num_obtainable - (10 - 2) - 1 - 5
    planner.head = waiting
    assert planner._room(waiting) == num_obtainable
    driver.run()


def test_one_whose_kv_is_on_its_way_keeps_the_seat_and_the_room_it_was_given() -> None:
    driver = manual_driver(num_blocks=16, num_swap_slots=16, max_num_seqs=1, prefix_caching=False, swap_in_bytes_s=5e7)
    long = start(driver, prompt(40))
    preempt(driver, long)
    carry_out_all(driver)
    while driver.answer():
        pass
    for key, sequence in list(driver.core.sequences.items()):
        if sequence.priority < 0:
            driver.abort(key)
    late = driver.add(prompt(20, 4), max_tokens=4, priority=2)
    driver.turn()
    assert ">" in places(driver, long)
    assert driver.core.preemption.num_returning == 1
    assert driver.core.preemption.num_reserved + driver.core.sequences[long].num_device_blocks == driver.core.memory.blocks_for(41)
    assert driver.core.sequences[late].status is Status.WAITING
    driver.auto_transfers = True
    carry_out_all(driver)
    driver.run()


# --- who ---------------------------------------------------------------------------------------------------


def two_equal(driver: CoreDriver) -> tuple[SequenceKey, SequenceKey]:
    """Two victims of equal size, the later one the natural one, and a third ahead of them in need."""
    keys = [driver.add(prompt(8, stem), max_tokens=40) for stem in range(3)]
    driver.step()
    return keys[1], keys[2]


def next_victim(driver: CoreDriver) -> str:
    victims = driver.core.preemption._victims(driver.core.queues.running[0])
    return driver.core.preemption._choose(victims, 1, {})[0].sequence.request_id


def test_the_last_in_the_order_yields_unless_another_is_less_than_half_as_dear() -> None:
    driver = CoreDriver(None, num_blocks=40, block_size=4, prefill_tok_s=100.0, prefix_caching=False)
    two_equal(driver)
    assert next_victim(driver) == "r3"
    planner = driver.core.preemption
    real = planner._offer

    def price_of_last(factor: float) -> str:
        def offer(sequence: Sequence, *arguments: object, **options: object) -> Offer:
            made = real(sequence, *arguments, **options)  # type: ignore[arg-type]
            if sequence.request_id == "r3":
                made.recompute_s *= factor
            return made

        planner._offer = offer  # type: ignore[method-assign]
        return next_victim(driver)

    assert price_of_last(1.9) == "r3"
    assert price_of_last(2.1) == "r2"


@pytest.mark.parametrize("why", ["has just come back", "has yielded often"])
def test_one_that_has_suffered_yields_after_all_others_but_does_yield(why: str) -> None:
    driver = CoreDriver(None, num_blocks=40, block_size=4, prefix_caching=False)
    for key in two_equal(driver)[::-1]:
        sequence = driver.core.sequences[key]
        if why == "has just come back":
            sequence.resumed_in_step = driver.core.preemption.step
        else:
            sequence.num_preemptions = 3
        expected_next = "r2" if sequence.request_id == "r3" else "r3"
        assert next_victim(driver) == expected_next  # when both are protected, order decides again


def test_the_quantum_ends_after_32_steps() -> None:
    driver = CoreDriver(None, num_blocks=40, block_size=4, prefix_caching=False)
    _, last = two_equal(driver)
    driver.core.sequences[last].resumed_in_step = driver.core.preemption.step - 31
    assert next_victim(driver) == "r2"
    driver.core.sequences[last].resumed_in_step = driver.core.preemption.step - 32
    assert next_victim(driver) == "r3"


# --- nobody waits for ever ---------------------------------------------------------------------------------


def test_one_that_has_waited_128_steps_takes_from_equals_that_overtook_it() -> None:
    driver = CoreDriver(None, num_blocks=200, block_size=4, max_num_seqs=2, scheduling_policy="priority")
    driver.add(prompt(4, 1), max_tokens=300, priority=1, arrival=1.0)
    late = driver.add(prompt(4, 2), max_tokens=300, priority=1, arrival=9.0)
    driver.step()
    between = driver.add(prompt(4, 3), max_tokens=4, priority=1, arrival=5.0)
    first_step = driver.core.counters.num_plans
    while driver.core.sequences[between].status is not Status.RUNNING:
        driver.step()
    assert driver.core.counters.num_plans - first_step in (128, 129)
    assert driver.core.sequences[late].status is Status.PREEMPTED


@pytest.mark.parametrize("seed", range(4))
def test_no_sequence_that_fits_beside_those_ahead_waits_longer_than_was_promised(seed: int) -> None:
    """Requests keep coming; the longest wait in steps of one that fits beside all ahead of it, measured."""
    dice = random.Random(seed)
    driver = CoreDriver(
        None,
        num_blocks=24,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=dice.choice((8, 64)),
        num_swap_slots=dice.choice((0, 16)),
        max_plans_in_flight=dice.choice((1, 2)),
        prefill_tok_s=dice.choice((1.0, 1e9)),
        scheduling_policy=dice.choice(("fcfs", "priority")),
    )
    longest, waits = 0, Counter[SequenceKey]()
    for number in range(450):
        if number % 6 == 0 and len(driver.core.sequences) < 12:
            arrival = number - dice.choice((0, 0, 50, 300))
            driver.add(prompt(dice.randint(1, 30), dice.randrange(50)), max_tokens=dice.choice((4, 20, 60)), arrival=float(arrival))
        driver.step()
        before = 0
        for rank, sequence in enumerate(sorted(driver.core.queues, key=lambda sequence: sequence.order)):
            before += driver.core.memory.blocks_for(sequence.num_tokens + 32)
            fits = before <= driver.core.config.num_blocks and rank < driver.core.config.max_num_seqs
            waits[sequence.key] = waits[sequence.key] + 1 if fits and sequence.status is not Status.RUNNING else 0
            longest = max(longest, waits[sequence.key])
    assert longest <= 140, f"waited {longest} steps"
    driver.run()
