"""What every scheduling policy must keep, whoever wrote it: run over all files of the folder."""

from __future__ import annotations

import random

import pytest

from pagemill.ids import SeqId, pack_ids
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from scheduler.core_config import CoreConfig
from scheduler.policies import load_policies
from scheduler.sequence import Sequence
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

POLICIES = sorted(load_policies())


def sequences(count: int, seed: int) -> list[Sequence]:
    dice = random.Random(seed)
    found = []
    for number in range(count):
        key = SequenceKey(0, 1, number, 0)
        arrival = float(dice.randrange(5))  # ties happen
        request = AddRequest(key, f"r{number}", pack_ids([1]), b"", SamplingParams(), Limits(1), 0, dice.randrange(-3, 4), arrival, b"", b"")
        found.append(Sequence(SeqId(number + 1), request, now=0.0, block_size=16, num_groups=1))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_the_order_is_total_and_never_changes(name: str) -> None:
    policy = load_policies()[name]()
    found = sequences(40, seed=1)
    keys = [policy.key(sequence) for sequence in found]
    assert len(set(keys)) == len(keys)
    for sequence, key in zip(found, keys, strict=True):
        sequence.order = key
        sequence.token_ids.extend([1, 2, 3])
        sequence.num_preemptions += 1
        assert policy.key(sequence) == key


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_batch_admits(name: str) -> None:
    """Otherwise nothing would ever run."""
    assert load_policies()[name]().admits(0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_with_its_own_tokens_under_pressure(name: str, seed: int) -> None:
    """The starvation bound of a closed system: all that was admitted finishes, and the steps are bounded by the work."""
    dice = random.Random(seed)
    driver = CoreDriver(CoreConfig(num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, scheduling_policy=name))
    asked = {}
    for _ in range(12):
        prompt = [dice.randrange(32) for _ in range(dice.randint(1, 12))]
        priority = dice.randrange(3) if driver.core.policy.READS_PRIORITY else 0
        max_tokens = dice.randint(1, 20)
        asked[driver.add(prompt, max_tokens=max_tokens, priority=priority)] = (prompt, max_tokens)
        driver.step()
    driver.run(limit=2000)
    for key, (prompt, max_tokens) in asked.items():
        assert driver.outputs[key] == expected_tokens(prompt, SamplingParams(), 0, 48, max_tokens, 32)
