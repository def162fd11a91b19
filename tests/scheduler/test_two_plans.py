"""Two plans in flight: the second is sent before the first one's tokens are known."""

from __future__ import annotations

import pytest

from pagemill.ids import NO_PLAN
from pagemill.messages.decisions import VictimKind
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import StepDone
from scheduler.events import Preempt
from scheduler.sequence import Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32


def prompt(length: int, stem: int = 0) -> list[int]:
    return [(stem * 11 + i * 3 + i // 8) % VOCAB for i in range(length)]


def expected(tokens: list[int], max_tokens: int, sampling: SamplingParams | None = None, longest: int = 1000) -> list[int]:
    return expected_tokens(tokens, sampling or SamplingParams(), 0, longest, max_tokens, VOCAB)


def two_plans(**numbers: object) -> CoreDriver:
    return CoreDriver(None, **{"block_size": 4, "max_plans_in_flight": 2} | numbers)


def test_the_second_plan_takes_the_token_that_the_first_one_draws() -> None:
    driver = two_plans()
    driver.add(prompt(5), max_tokens=9)
    driver.turn()
    first, second = driver.plans
    assert (second.slices[0].start, second.slices[0].num_tokens) == (5, 1)
    assert (first.slices[0].after_plan, second.slices[0].after_plan) == (NO_PLAN, first.plan_id)
    assert second.slices[0].new_token_ids == b""
    driver.turn()
    assert len(driver.plans) == 2, "no more than two are in flight"


def test_the_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    driver = two_plans(max_num_batched_tokens=8)
    key = driver.add(prompt(20), max_tokens=3)
    driver.turn()
    assert [(plan.slices[0].start, plan.slices[0].after_plan) for plan in driver.plans] == [(0, NO_PLAN), (8, NO_PLAN)]
    driver.run()
    assert driver.outputs[key] == expected(prompt(20), 3)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_no_more_positions_are_computed_than_max_tokens_asks_for(max_tokens: int) -> None:
    driver = two_plans()
    key = driver.add(prompt(5), max_tokens=max_tokens)
    driver.run()
    assert driver.outputs[key] == expected(prompt(5), max_tokens)
    assert driver.worker.num_positions == 5 + max_tokens - 1


def test_no_more_positions_are_computed_than_the_model_is_long() -> None:
    driver = two_plans(max_model_len=8)
    key = driver.add(prompt(5), max_tokens=50)
    driver.run()
    assert len(driver.outputs[key]) == 3
    assert driver.worker.num_positions == 7


def test_an_end_found_while_the_next_plan_is_in_flight_drops_what_that_one_draws() -> None:
    driver = two_plans()
    whole = expected(prompt(5), 9)
    sampling = SamplingParams(stop_token_ids=(whole[2],))
    key = driver.add(prompt(5), max_tokens=9, sampling=sampling)
    other = driver.add(prompt(5, stem=1), max_tokens=9)
    while key not in driver.finished:
        driver.turn()
        driver.answer()
    assert driver.in_flight, "its next token is being drawn in vain"
    pool = driver.core.memory.pool
    assert pool.num_fenced > 0, "and its blocks are written until that plan is done"
    driver.run()
    assert driver.outputs[key] == whole[: whole.index(whole[2]) + 1]
    assert driver.outputs[other] == expected(prompt(5, stem=1), 9)
    assert (pool.num_used, pool.num_fenced) == (0, 0)


def test_a_row_is_not_reused_while_the_second_plan_names_it() -> None:
    driver = two_plans()
    key = driver.add(prompt(5), max_tokens=30)
    driver.turn()
    driver.answer()
    driver.turn()
    driver.abort(key)
    driver.answer()
    assert driver.core.rows.accounted()[0] == []
    driver.answer()
    assert driver.core.rows.accounted()[0] == [0]


@pytest.mark.parametrize("which", [0, 1])
def test_a_row_deferred_in_one_of_two_plans_draws_the_same_tokens_later(which: int) -> None:
    driver = two_plans()
    key = driver.add(prompt(6), max_tokens=9)
    calls: list[int] = []

    def defer(row: int, version: int) -> bool:
        calls.append(row)
        return len(calls) == which + 1

    driver.worker.defer = defer
    driver.turn()
    driver.worker.defer = lambda row, version: False
    outcomes = [result.outcome for done in driver.in_flight if isinstance(done, StepDone) for result in done.results]
    assert outcomes == (["deferred", "deferred"] if which == 0 else ["accepted", "deferred"])
    driver.run()
    assert driver.outputs[key] == expected(prompt(6), 9)
    assert driver.core.memory.pool.num_used == 0


def test_a_row_that_fails_with_a_successor_in_flight_ends_once_with_an_error() -> None:
    driver = two_plans()
    key = driver.add(prompt(6), max_tokens=9)
    other = driver.add(prompt(6, stem=1), max_tokens=9)
    driver.worker.fail = lambda row, version: row == 0
    driver.turn()
    driver.worker.fail = lambda row, version: False
    driver.run()
    assert (driver.finished[key].finish_reason, driver.outputs[key]) == ("error", [])
    assert driver.outputs[other] == expected(prompt(6, stem=1), 9)
    assert driver.core.memory.pool.num_used == 0


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_nothing_a_successor_of_a_plan_with_a_missing_row_answers_is_used(budget: int, num_steps: int) -> None:
    """The plan changed nothing, so its successor computes on what was never computed and answers with errors."""
    driver = two_plans(max_num_batched_tokens=budget)
    keys = [driver.add(prompt(14, stem), max_tokens=9) for stem in range(2)]
    for _ in range(num_steps):
        driver.turn()
        driver.answer()
    lost = sorted(driver.worker.rows)[:1]
    for row in lost:
        del driver.worker.rows[row]
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.finished[key].finish_reason == "length"
        assert driver.outputs[key] == expected(prompt(14, stem), 9)


@pytest.mark.parametrize("kind", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("cached", [False, True])
def test_what_a_sequence_draws_that_was_preempted_in_flight_is_applied(kind: VictimKind, cached: bool) -> None:
    driver = two_plans(num_swap_slots=16, prefill_tok_s=1.0, max_num_seqs=1, scheduling_policy="priority")
    key = driver.add(prompt(6), max_tokens=20, priority=1, cached=cached)
    driver.turn()
    driver.answer()
    driver.turn()
    driver.answer()
    assert len(driver.in_flight) == 1
    num_drawn = len(driver.outputs[key])
    driver.add(prompt(6, stem=5), max_tokens=3, priority=0)
    driver.handle(Preempt(key, kind, 100))
    driver.turn()
    sequence = driver.core.sequences[key]
    assert sequence.status is Status.PREEMPTED
    driver.answer()
    assert len(driver.outputs[key]) == num_drawn + 1, "the token drawn in flight is not lost"
    driver.run()
    assert driver.outputs[key] == expected(prompt(6), 20)
    if kind != "recompute":
        assert driver.core.counters.tokens_recomputed == 0
    assert driver.core.memory.pool.num_used == 0


def test_a_sequence_preempted_in_flight_does_not_start_again_before_its_answers_came() -> None:
    driver = two_plans()
    key = driver.add(prompt(6), max_tokens=20)
    driver.turn()
    driver.answer()
    driver.handle(Preempt(key, "recompute", 100))
    driver.turn()
    assert driver.core.sequences[key].status is Status.PREEMPTED
    driver.answer()
    driver.turn()
    assert driver.core.sequences[key].status is Status.RUNNING
    driver.run()
    assert driver.outputs[key] == expected(prompt(6), 20)


def test_two_plans_together_keep_to_the_memory_there_is() -> None:
    driver = two_plans(num_blocks=7, num_swap_slots=4)
    keys = [driver.add(prompt(9, stem), max_tokens=14) for stem in range(3)]
    driver.run()
    assert [driver.outputs[key] for key in keys] == [expected(prompt(9, stem), 14, longest=28) for stem in range(3)]
