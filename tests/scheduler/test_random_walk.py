"""Seeded random walks over the core: any events in any order, every invariant after every event.

The walk itself is `tests.helpers.random_walk`; `scripts/soak_core` takes it further. The seed is part of the
test's name; the events are few and the failing assertion tells the story.
"""

from __future__ import annotations

import pytest

from pagemill.messages import Drain
from tests.helpers.random_walk import Walk

#: Events of all walks together; the suite promises at least this many.
NUM_EVENTS = 100_000
WALKS = 125


@pytest.mark.parametrize("seed", range(WALKS))
def test_random_walk_keeps_every_invariant_and_every_token(seed: int) -> None:
    assert Walk(seed).run(NUM_EVENTS // WALKS) >= NUM_EVENTS // WALKS


def test_a_draining_core_takes_nothing_new_and_finishes_the_rest() -> None:
    walk = Walk(1)
    running = walk.driver.add([1, 2, 3], max_tokens=3)
    walk.driver.handle(Drain(1.0))
    late = walk.driver.add([1, 2, 3])
    walk.driver.run()
    assert walk.driver.rejected[late].reason == "draining"
    assert walk.driver.finished[running].finish_reason == "length"
