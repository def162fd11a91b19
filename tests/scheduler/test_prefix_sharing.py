"""Sharing of prefixes: what is computed once is not computed again, in whatever order requests come."""

from __future__ import annotations

import pytest

from pagemill.keys import root_key
from pagemill.messages.sequences import SamplingParams, SequenceKey
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32
STEM = [(i * 5 + i // 7) % VOCAB for i in range(1000)]


def own(number: int) -> list[int]:
    return STEM + [(number * 3 + i) % VOCAB for i in range(16)]


def check_tokens(driver: CoreDriver, keys: list[SequenceKey], prompts: list[list[int]], max_tokens: int) -> None:
    for key, tokens in zip(keys, prompts, strict=True):
        assert driver.outputs[key] == expected_tokens(tokens, SamplingParams(), 0, 8192, max_tokens, VOCAB)


def test_nobody_waits_for_one_ahead_to_compute_what_it_has_taken_over_from_another() -> None:
    """One announces its prompt and is overtaken; it takes over what the urgent one has computed, which then turns out not to be trusted."""
    driver = CoreDriver(block_size=4, max_num_batched_tokens=5, scheduling_policy="priority")
    ticking = driver.add([1], max_tokens=60, priority=3)  # takes a token of each step, and leaves a block's worth
    driver.step()
    first = driver.add(STEM[:16], max_tokens=60, priority=1)
    driver.step()
    urgent = driver.add(STEM[:16], max_tokens=60, priority=0)
    while not driver.core.sequences[first].num_cached_tokens:
        driver.step()
    row = driver.core.sequences[urgent].row
    driver.worker.fail = lambda number, version: number == row
    driver.step()
    driver.worker.fail = lambda number, version: False
    assert driver.finished[urgent].finish_reason == "error"
    driver.abort(ticking)
    last = driver.add(STEM[:16], max_tokens=2, priority=2)
    for _ in range(12):
        driver.step()
    assert first not in driver.finished
    check_tokens(driver, [last], [STEM[:16]], 2)
    driver.run()
    check_tokens(driver, [first], [STEM[:16]], 60)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_common_prefix_is_computed_once_one_after_another_or_all_in_the_same_instant(at_once: bool) -> None:
    driver = CoreDriver(num_blocks=512, max_num_batched_tokens=256)
    prompts = [own(number) for number in range(16)]
    keys = []
    for tokens in prompts:
        keys.append(driver.add(tokens, max_tokens=2))
        if not at_once:
            driver.run()
    driver.run()
    check_tokens(driver, keys, prompts, 2)
    shared_end = len(STEM) // 16 * 16
    computed_of_stem = driver.worker.num_positions - 16 * (len(prompts[0]) - shared_end + 1)
    assert computed_of_stem <= len(STEM) + 16
    assert driver.finished[keys[0]].num_cached_tokens == 0
    assert {driver.finished[key].num_cached_tokens for key in keys[1:]} == {shared_end}


def test_the_same_prompt_twice_leaves_at_least_one_token_to_compute() -> None:
    driver = CoreDriver(block_size=4)
    for length in (8, 9, 7):
        prompt = STEM[100 * length : 100 * length + length]
        first = driver.add(prompt, max_tokens=3)
        driver.run()
        second = driver.add(prompt, max_tokens=3)
        driver.run()
        assert driver.outputs[first] == driver.outputs[second]
        assert driver.finished[second].num_cached_tokens == (length - 1) // 4 * 4


def test_generated_tokens_are_cached_for_the_next_turn_of_a_conversation() -> None:
    driver = CoreDriver(block_size=4)
    prompt = STEM[:6]
    first = driver.add(prompt, max_tokens=10)
    driver.run()
    second = driver.add(prompt + driver.outputs[first] + [1, 2], max_tokens=1)
    driver.run()
    # 16 tokens are known after the first turn, the last of which was never fed to the model
    assert driver.finished[second].num_cached_tokens == 12


def test_other_roots_share_nothing() -> None:
    driver = CoreDriver(block_size=4)
    prompt = STEM[:9]
    driver.add(prompt, max_tokens=1, root=root_key(b"m", b"", b"a"))
    driver.run()
    other = driver.add(prompt, max_tokens=1, root=root_key(b"m", b"", b"b"))
    driver.run()
    assert driver.finished[other].num_cached_tokens == 0


@pytest.mark.parametrize("how", ["disabled", "uncached"])
def test_no_caching_means_no_hits_and_nothing_left_behind(how: str) -> None:
    driver = CoreDriver(block_size=4, prefix_caching=how != "disabled")
    for _ in range(2):
        key = driver.add(STEM[:9], max_tokens=1, cached=how != "uncached")
        driver.run()
    assert driver.finished[key].num_cached_tokens == 0
    assert driver.core.memory.pool.num_free == driver.core.config.num_blocks


def test_a_waiting_sequence_is_passed_by_unrelated_ones_but_not_for_ever() -> None:
    driver = CoreDriver(num_blocks=512, max_num_batched_tokens=128)
    driver.add(own(1), max_tokens=1)
    twin = driver.add(own(2), max_tokens=1)
    unrelated = driver.add([31, 30, 29], max_tokens=1)
    while unrelated not in driver.finished:
        driver.step()
    assert twin not in driver.finished
    driver.run()
    assert driver.finished[twin].num_cached_tokens == 992


def test_nobody_waits_for_one_behind() -> None:
    driver = CoreDriver(num_blocks=512, max_num_batched_tokens=128, scheduling_policy="priority")
    driver.add(own(1), max_tokens=1, priority=1)
    driver.step()
    urgent = driver.add(own(2), max_tokens=1, priority=0)
    for _ in range(8):
        driver.step()
    assert urgent in driver.finished
    assert driver.finished[urgent].num_cached_tokens == 128


def test_only_prompt_tokens_count_as_cached() -> None:
    driver = CoreDriver(block_size=4)
    first = driver.add(STEM[:6], max_tokens=10)
    driver.run()
    again = driver.add(STEM[:6], max_tokens=10, output=driver.outputs[first][:9])
    driver.run()
    assert driver.outputs[again] == driver.outputs[first]
    assert driver.finished[again].num_cached_tokens == 6


def test_when_the_one_ahead_is_aborted_the_waiting_one_computes_the_rest_itself() -> None:
    driver = CoreDriver(num_blocks=512, max_num_batched_tokens=128)
    first = driver.add(own(1), max_tokens=1)
    twin = driver.add(own(2), max_tokens=1)
    for _ in range(3):
        driver.step()
    driver.abort(first)
    driver.run()
    check_tokens(driver, [twin], [own(2)], 1)
    assert driver.finished[twin].num_cached_tokens == 3 * 128


def test_a_hit_is_pinned_before_blocks_are_allocated() -> None:
    driver = CoreDriver(num_blocks=4, block_size=4)
    driver.add(STEM[:9], max_tokens=1)
    driver.run()
    assert driver.core.memory.pool.num_cached == 2
    again = driver.add(STEM[:13], max_tokens=2)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 8
