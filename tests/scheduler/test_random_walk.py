"""Seeded random walks over the core: any events in any order, every invariant after every event.

The walk itself is `tests.helpers.random_walk`; `scripts/soak_core` takes it further. The seed is part of the
test's name; the events are few and the failing assertion tells the story.
"""

from __future__ import annotations

import random

import pytest

from pagemill.messages.control import Drain
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import slot_of
from tests.helpers.random_walk import Walk
from tests.helpers.swapping import expected, prompt

#: Events of all walks together; the suite promises at least this many.
NUM_EVENTS = 100_000
WALKS = 125


@pytest.mark.parametrize("seed", range(WALKS))
def test_random_walk_keeps_every_invariant_and_every_token(seed: int) -> None:
    assert Walk(seed).run(NUM_EVENTS // WALKS) >= NUM_EVENTS // WALKS


@pytest.mark.parametrize("preemption", ["auto", "swap"])
@pytest.mark.parametrize("tiers", [("arena",), ("device",), ("arena", "device")], ids=["read", "written", "either"])
def test_slots_that_can_never_be_read_or_written_hold_up_nobody(tiers: tuple[str, ...], preemption: str) -> None:
    """Little memory, long prompts with common beginnings, and swapping the cheaper way: most requests meet such a slot."""
    for seed in range(6):
        dice = random.Random(seed)
        driver = CoreDriver(
            num_blocks=14,
            block_size=4,
            num_swap_slots=10,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=40,
            prefill_tok_s=10.0,
            preemption=preemption,
            max_plans_in_flight=dice.choice((1, 2)),
        )
        driver.auto_transfers = False
        driver.worker.cannot_copy = lambda transfer: transfer.from_tier in tiers and slot_of(transfer) < 4
        asked = [(prompt(dice.randint(3, 28), stem=dice.randint(0, 3)), dice.randint(1, 10), dice.random() < 0.8) for _ in range(12)]
        keys = [driver.add(tokens, max_tokens=max_tokens, cached=cached) for tokens, max_tokens, cached in asked]
        for _ in range(200):
            driver.turn()
            while driver.worker.transfers and dice.random() < 0.9:
                driver.worker.carry_out(driver.worker.transfers[0], driver.core.config.epoch)
            driver.tell_transfers()
            driver.answer()
        assert [driver.outputs[key] for key in keys] == [expected(tokens, max_tokens, 40) for tokens, max_tokens, _ in asked]
        assert not driver.in_flight


def test_a_draining_core_takes_nothing_new_and_finishes_the_rest() -> None:
    walk = Walk(1)
    running = walk.driver.add([1, 2, 3], max_tokens=3)
    walk.driver.handle(Drain(1.0))
    late = walk.driver.add([1, 2, 3])
    walk.driver.run()
    assert walk.driver.rejected[late].reason == "draining"
    assert walk.driver.finished[running].finish_reason == "length"
