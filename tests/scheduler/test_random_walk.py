"""Seeded random walks over the core: any events in any order, every invariant after every event.

The fake worker reads every history back from its pool before it draws, so a walk also proves that no block
is overwritten while somebody needs it, and that each request ends with exactly the tokens it would have had
alone. The seed is part of the test's name; the events are few and the failing assertion tells the story.
"""

from __future__ import annotations

import random

import pytest

from pagemill.messages import Drain, PeerLost, PlanId, SamplingParams, SequenceKey, StepDone, TransferDone
from scheduler.core_config import CoreConfig
from scheduler.policies import load_policies
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32
POLICIES = sorted(load_policies())
#: Events of all walks together; the suite promises at least this many.
NUM_EVENTS = 100_000
WALKS = 125


class Walk:
    """One walk: a random small world, then random events in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        block_size = self.random.choice((1, 2, 4, 8))
        self.driver = CoreDriver(
            CoreConfig(
                num_blocks=self.random.randint(4, 64),
                block_size=block_size,
                num_groups=self.random.choice((1, 1, 1, 2)),
                max_model_len=self.random.choice((16, 64, 256)),
                max_num_seqs=self.random.randint(1, 8),
                max_num_batched_tokens=self.random.choice((1, 3, 8, 64)),
                max_num_queued=self.random.choice((4, 64)),
                scheduling_policy=self.random.choice(POLICIES),
                prefix_caching=self.random.random() < 0.8,
            )
        )
        #: Few prompt beginnings, so that prefixes are shared.
        self.stems = [[self.random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        self.asked: dict[SequenceKey, tuple[list[int], SamplingParams, int, int, int]] = {}
        self.ended_early: set[SequenceKey] = set()

    def run(self, num_events: int) -> int:
        driver = self.driver
        while len(driver.log) < num_events:
            self._event()
        driver.worker.fail = driver.worker.defer = lambda row, version: False
        driver.run(limit=20_000)
        self._check_outcomes()
        return len(driver.log)

    def _event(self) -> None:
        driver, dice = self.driver, self.random.random()
        live = list(driver.core.sequences)
        if dice < 0.25:
            self._add()
        elif dice < 0.60:
            driver.turn()
        elif dice < 0.93:
            driver.answer()
        elif dice < 0.95 and live:
            key = self.random.choice(live)
            self.ended_early.add(key)
            driver.abort(key)
        elif dice < 0.97 and live:
            key = self.random.choice(live)
            self.ended_early.add(key)
            driver.finish(key, self.random.randint(0, len(driver.outputs[key])))
        elif dice < 0.98 and driver.worker.rows:
            driver.worker.rows.pop(self.random.choice(list(driver.worker.rows)))
        elif dice < 0.985:
            driver.worker.fail = lambda row, version: (row + version) % 11 == 0
        elif dice < 0.988:
            driver.worker.defer = lambda row, version: (row + version) % 3 == 0
        elif dice < 0.992:
            driver.worker.fail = driver.worker.defer = lambda row, version: False
        else:
            self._stray()

    def _add(self) -> None:
        dice = self.random
        stem = dice.choice(self.stems)
        prompt = stem[: dice.randint(1, len(stem))] + [dice.randrange(VOCAB) for _ in range(dice.choice((0, 0, 1, 5)))]
        sampling = SamplingParams(stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 1, 3)))), min_tokens=dice.choice((0, 0, 2)))
        max_tokens = dice.choice((1, 2, 8, 40))
        seed = dice.randrange(2)
        output: list[int] = []
        if dice.random() < 0.1:  # as a frontend resubmits what it had received from an earlier scheduler
            config = self.driver.core.config
            longest = min(config.max_model_len, self.driver.core.memory.capacity_tokens())
            whole = expected_tokens(prompt, sampling, seed, longest, max_tokens, VOCAB)
            output = whole[: dice.randint(0, max(0, len(whole) - 1))]
        priority = dice.choice((0, 0, 1, 2)) if self.driver.core.policy.READS_PRIORITY else 0
        #: Frontends tokenize in parallel, and resubmit: requests do not come in the order in which they arrived.
        arrival = len(self.asked) + dice.choice((0.0, 0.0, -3.5, -100.5))
        cached = dice.random() < 0.9
        key = self.driver.add(
            prompt, max_tokens=max_tokens, sampling=sampling, seed=seed, priority=priority, cached=cached, output=output, arrival=arrival
        )
        self.asked[key] = (prompt, sampling, seed, max_tokens, len(output))

    def _stray(self) -> None:
        """Late, foreign or unknown events change nothing."""
        driver = self.driver
        before = len(driver.core.sequences)
        unknown = SequenceKey(0, 1, 10**6, 0)
        match self.random.randrange(5):
            case 0:
                driver.abort(unknown)
            case 1:
                driver.finish(unknown, 0)
            case 2:
                driver.handle(StepDone(driver.core.config.epoch - 1, 0, driver.plans[-1].plan_id if driver.plans else PlanId(1), (), {}))
            case 3:
                driver.handle(TransferDone(driver.core.config.epoch, 0, 7, True))
            case 4:
                driver.handle(PeerLost("frontend", 5, 1))
        assert len(driver.core.sequences) == before

    def _check_outcomes(self) -> None:
        driver = self.driver
        config = driver.core.config
        longest = min(config.max_model_len, driver.core.memory.capacity_tokens())
        for key, (prompt, sampling, seed, max_tokens, _) in self.asked.items():
            if key in driver.rejected:
                continue
            expected = expected_tokens(prompt, sampling, seed, longest, max_tokens, VOCAB)
            got = driver.outputs[key]
            if key in self.ended_early or driver.finished[key].finish_reason == "error":
                assert got == expected[: len(got)]
            else:
                assert got == expected
        pool = driver.core.memory.pool
        assert (pool.num_used, pool.num_fenced) == (0, 0), "blocks leaked"
        assert not driver.core.memory.announced(), "announcements leaked"
        assert driver.core.rows.accounted()[1] == {}, "rows leaked"


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
