"""Results: tokens taken over, ends that are noticed, and rows that fail or are deferred."""

from __future__ import annotations

import msgspec
import pytest

from pagemill.messages.sequences import SamplingParams, TokenLogprobs
from pagemill.messages.worker import StepDone
from tests.helpers.core_driver import CoreDriver
from tests.helpers.prompts import VOCAB, expected, prompt


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_stop_ids_end_a_sequence_once_min_tokens_are_out(min_tokens: int) -> None:
    driver = CoreDriver()
    sampling = SamplingParams(stop_token_ids=tuple(range(VOCAB)), min_tokens=min_tokens)
    key = driver.add(prompt(5), max_tokens=10, sampling=sampling)
    driver.run()
    last = driver.finished[key]
    assert (last.finish_reason, len(driver.outputs[key])) == ("stop", max(1, min_tokens))
    assert last.stop_token_id == driver.outputs[key][-1]


def test_the_model_length_ends_a_sequence_with_length() -> None:
    driver = CoreDriver(max_model_len=10)
    key = driver.add(prompt(6), max_tokens=100)
    driver.run()
    assert (len(driver.outputs[key]), driver.finished[key].finish_reason) == (4, "length")


def test_a_sequence_that_fills_the_pool_ends_with_length_and_the_queue_moves_on() -> None:
    driver = CoreDriver(num_blocks=4, block_size=4)
    long = driver.add(prompt(10), max_tokens=100)
    short = driver.add(prompt(3, stem=1), max_tokens=2)
    driver.run()
    assert (len(driver.outputs[long]), driver.finished[long].finish_reason) == (6, "length")
    assert driver.outputs[short] == expected(driver, prompt(3, stem=1), 2)


def test_a_failed_row_fails_its_request_only() -> None:
    driver = CoreDriver()
    keys = [driver.add(prompt(5, stem), max_tokens=3) for stem in range(3)]
    driver.step()
    driver.worker.fail = lambda row, version: row == 1
    driver.step()
    driver.worker.fail = lambda row, version: False
    driver.run()
    assert [driver.finished[key].finish_reason for key in keys] == ["length", "error", "length"]
    assert driver.finished[keys[1]].error == "planted failure"


def answer_with(driver: CoreDriver, **changes: object) -> None:
    """Lets the plan in flight be answered by one result that was tampered with."""
    (done,) = driver.in_flight
    assert isinstance(done, StepDone)
    results = tuple(msgspec.structs.replace(result, **changes) for result in done.results)
    driver.in_flight = [msgspec.structs.replace(done, results=results)]
    driver.answer()


@pytest.mark.parametrize("missing", ["result", "token"])
def test_a_step_without_the_token_it_was_to_draw_fails_the_request(missing: str) -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=3)
    driver.turn()
    answer_with(driver, **({"row": 7} if missing == "result" else {"token_ids": ()}))
    assert (driver.finished[key].finish_reason, driver.finished[key].error) == ("error", "no token")
    assert driver.core.memory.pool.num_used == 0


def test_a_deferred_row_draws_from_the_same_position_in_the_next_step() -> None:
    driver = CoreDriver(block_size=4)
    key = driver.add(prompt(5), max_tokens=6)
    driver.worker.defer = lambda row, version: True
    driver.step()
    assert driver.outputs[key] == []
    driver.turn()
    (piece,) = driver.plans[-1].slices
    assert (piece.start, piece.num_tokens, piece.sample) == (4, 1, True)
    driver.worker.defer = lambda row, version: False
    driver.answer()
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(5), 6)


def test_of_several_tokens_those_behind_the_end_are_dropped_with_their_logprobs() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=9, sampling=SamplingParams(stop_token_ids=(2,)))
    driver.turn()
    logprobs = tuple(TokenLogprobs(-float(number), b"", b"") for number in range(3))
    answer_with(driver, token_ids=(1, 2, 3), logprobs=logprobs)
    last = driver.finished[key]
    assert (last.token_ids, last.logprobs, last.stop_token_id) == ((1, 2), logprobs[:2], 2)


def test_kv_of_a_sequence_that_failed_is_found_by_nobody() -> None:
    driver = CoreDriver(block_size=4, num_swap_slots=8)
    key = driver.add(list(range(1, 14)), max_tokens=9)
    driver.step()
    assert len(driver.core.memory.pool.index) == 3
    driver.worker.fail = lambda row, version: True
    driver.step()
    assert driver.finished[key].finish_reason == "error"
    assert len(driver.core.memory.pool.index) == 0
    driver.worker.fail = lambda row, version: False
    again = driver.add(list(range(1, 14)), max_tokens=9)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 0
