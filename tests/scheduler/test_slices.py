"""What a step is made of: who computes how many tokens, under the budget and in which order."""

from __future__ import annotations

import pytest

from pagemill.messages.sequences import KvGroup
from tests.helpers.core_driver import CoreDriver
from tests.helpers.prompts import expected, prompt


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 49])
def test_a_prompt_in_chunks_gives_the_same_tokens(budget: int, length: int) -> None:
    driver = CoreDriver(max_num_batched_tokens=budget)
    key = driver.add(prompt(length), max_tokens=3)
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(length), 3)


def test_running_decodes_come_before_prefill_chunks() -> None:
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.add(prompt(4), max_tokens=20)
    driver.step()
    driver.add(prompt(100, stem=1), max_tokens=1)
    driver.step()
    shares = [piece.num_tokens for piece in driver.plans[-1].slices]
    assert shares == [1, 7]


def test_decodes_come_first_also_while_the_head_computes_a_long_prompt() -> None:
    driver = CoreDriver(max_num_batched_tokens=8, scheduling_policy="priority")
    driver.add(prompt(4), max_tokens=20, priority=1)
    driver.step()
    driver.add(prompt(100, stem=1), max_tokens=1, priority=0)
    for _ in range(5):
        driver.step()
        assert sorted(piece.num_tokens for piece in driver.plans[-1].slices) == [1, 7]


def test_the_head_computes_even_if_decodes_could_take_the_whole_budget() -> None:
    driver = CoreDriver(max_num_batched_tokens=2, scheduling_policy="priority")
    late = [driver.add(prompt(1, stem), max_tokens=50, priority=1) for stem in range(2)]
    driver.step()
    urgent = driver.add(prompt(6), max_tokens=1, priority=0)
    for _ in range(8):
        driver.step()
    assert urgent in driver.finished
    assert not any(key in driver.finished for key in late)


def test_the_head_starts_before_a_long_prefill_behind_it_goes_on() -> None:
    driver = CoreDriver(max_num_batched_tokens=8, scheduling_policy="priority")
    driver.add(prompt(200), max_tokens=1, priority=1)
    driver.step()
    urgent = driver.add(prompt(6, stem=1), max_tokens=1, priority=0)
    driver.step()
    assert urgent in driver.finished
    assert [piece.num_tokens for piece in driver.plans[-1].slices] == [6, 2]


def test_a_head_that_the_policy_keeps_out_takes_nothing_from_those_inside() -> None:
    driver = CoreDriver(max_num_batched_tokens=1, scheduling_policy="static")
    inside = driver.add(prompt(2), max_tokens=5, arrival=2.0)
    for _ in range(3):
        driver.step()
    head = driver.add(prompt(2, stem=1), max_tokens=5, arrival=1.0)
    assert driver.run(limit=50) == 3 + 6
    assert inside in driver.finished
    assert head in driver.finished


def test_no_step_exceeds_the_token_budget_or_the_seats() -> None:
    driver = CoreDriver(max_num_batched_tokens=10, max_num_seqs=3)
    for stem in range(9):
        driver.add(prompt(7, stem), max_tokens=5)
    driver.run()
    assert max(sum(piece.num_tokens for piece in plan.slices) for plan in driver.plans) <= 10
    assert max(len(plan.slices) for plan in driver.plans) <= 3
    assert len(driver.finished) == 9


def test_a_prompt_that_finds_only_part_of_its_blocks_computes_that_part() -> None:
    """Two groups: five obtainable blocks are two positions' worth of blocks, not five."""
    driver = CoreDriver(num_blocks=40, block_size=1, groups=(KvGroup(), KvGroup()), max_num_batched_tokens=4, prefix_caching=False)
    first = driver.add(prompt(3), max_tokens=17)
    driver.step()
    second = driver.add(prompt(12, stem=1), max_tokens=4)
    driver.run()
    assert driver.outputs[first] == expected(driver, prompt(3), 17)
    assert driver.outputs[second] == expected(driver, prompt(12, stem=1), 4)
