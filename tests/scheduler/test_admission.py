"""Who is taken: what can never fit is refused at once, queues are bounded, and nobody waits for longer than it said."""

from __future__ import annotations

import msgspec
import pytest

from pagemill.messages.frontend import AddRequest
from scheduler.core_config import CoreConfig
from tests.helpers.core_driver import CoreDriver
from tests.helpers.prompts import prompt


@pytest.mark.parametrize(
    ("config", "length", "reason", "numbers"),
    [
        (CoreConfig(max_model_len=8), 8, "exceeds_model_length", (9, 8)),
        (CoreConfig(num_blocks=4, block_size=4), 16, "exceeds_kv_cache", (17, 16)),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(config: CoreConfig, length: int, reason: str, numbers: tuple[int, int]) -> None:
    driver = CoreDriver(config)
    refused = driver.add(prompt(length))
    accepted = driver.add(prompt(length - 1), max_tokens=1)
    driver.run()
    rejection = driver.rejected[refused]
    assert (rejection.reason, (rejection.required, rejection.available)) == (reason, numbers)
    assert accepted in driver.finished


def test_a_full_queue_refuses_the_next_request() -> None:
    driver = CoreDriver(max_num_queued=2)
    keys = [driver.add(prompt(3, stem)) for stem in range(3)]
    assert [driver.rejected[key].reason if key in driver.rejected else None for key in keys] == [None, None, "queue_full"]


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_ids": b""},
        {"prefix_keys": b"short"},
        {"prompt_ids": bytes(34), "output_ids": bytes(2)},
        {"output_ids": bytes(4 * 8)},
    ],
    ids=["no prompt", "wrong keys", "half a token", "nothing left to generate"],
)
def test_a_malformed_request_is_refused_and_changes_nothing(bad: dict[str, bytes]) -> None:
    driver = CoreDriver(block_size=4)
    driver.add(prompt(9), max_tokens=8)
    request = driver.log[-1][1]
    assert isinstance(request, AddRequest)
    other = msgspec.structs.replace(request.key, request=99)
    driver.handle(msgspec.structs.replace(request, key=other, **bad))
    assert driver.rejected[other].reason == "invalid"
    assert list(driver.core.sequences) == [request.key]


def test_a_sequence_that_waits_too_long_to_be_started_is_refused() -> None:
    driver = CoreDriver(max_num_seqs=1)
    running = driver.add([1, 2, 3], max_tokens=100, max_queue_s=0.05)
    driver.turn()
    waiting, patient = driver.add([4, 5], max_queue_s=0.5), driver.add([6, 7])
    driver.now += 0.4
    driver.turn()
    assert not driver.rejected
    driver.now += 0.2
    driver.turn()
    assert {key: (rejection.reason, rejection.available) for key, rejection in driver.rejected.items()} == {waiting: ("queue_timeout", 500)}
    assert driver.rejected[waiting].required >= 500
    driver.run()
    assert set(driver.finished) == {running, patient}


def test_time_in_the_queue_goes_on_over_a_loss_of_workers() -> None:
    driver = CoreDriver(max_num_seqs=1)
    driver.add([1, 2, 3], max_tokens=100)
    driver.turn()
    waiting = driver.add([4, 5], max_queue_s=0.5)
    driver.now += 0.4
    driver.lose_worker()
    driver.now += 0.2
    driver.worker_back()
    driver.turn()
    assert driver.rejected[waiting].reason == "queue_timeout"


def test_prompt_tokens_that_wait_are_bounded() -> None:
    driver = CoreDriver(max_num_seqs=1, max_queued_tokens=10)
    driver.add([1, 2, 3], max_tokens=5)
    driver.turn()
    first, second, third = driver.add([1] * 30), driver.add([2]), driver.add([3] * 9)
    assert first not in driver.rejected, "the first in the queue is taken whatever its length"
    assert {key: (rejection.reason, rejection.required, rejection.available) for key, rejection in driver.rejected.items()} == {
        second: ("queue_tokens", 31, 10),
        third: ("queue_tokens", 39, 10),
    }
    driver.run()
    assert driver.core.queues.num_waiting_tokens == 0
