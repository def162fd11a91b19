"""Held sequences: what is counted equals what is there."""

from __future__ import annotations

import random

import msgspec
import pytest

from pagemill.ids import num_ids, pack_ids
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from scheduler.events import Revive
from scheduler.held_sequences import HeldSequences


def revive(number: int, *, prompt: int = 3, added_at: float = 0.0, max_queue_s: float = 0.0, arrival: float | None = None, started: bool = False) -> Revive:
    request = AddRequest(
        key=SequenceKey(0, 1, number, 0),
        request_id=f"r{number}",
        prompt_ids=pack_ids([1] * prompt),
        output_ids=b"",
        sampling=SamplingParams(),
        limits=Limits(4, max_queue_s),
        seed=0,
        priority=0,
        arrival=float(number) if arrival is None else arrival,
        root=b"",
        prefix_keys=b"",
    )
    return Revive(request, added_at, 0.5 if started else -1.0, 0, 0, has_prefilled=started, has_decoded=False, suspicion=None)


def waiting_tokens(held: HeldSequences) -> int:
    return sum(num_ids(revive.request.prompt_ids) for revive in held.revives() if revive.queue_s < 0)


def test_the_count_of_waiting_tokens_equals_the_sum_whatever_comes_and_goes() -> None:
    dice = random.Random(1)
    held, now = HeldSequences(), 0.0
    for number in range(2000):
        now += 0.01
        held.add(revive(number, prompt=dice.randint(1, 50), added_at=now, max_queue_s=dice.choice((0.0, 0.05, 1.0)), started=dice.random() < 0.3))
        if dice.random() < 0.6:
            held.pop(SequenceKey(0, 1, dice.randint(0, number), 0))
        if dice.random() < 0.2:
            held.pop_expired(now)
        if dice.random() < 0.01:
            held.take()
        assert held.num_waiting_tokens == waiting_tokens(held)
        assert len(held) == len(held.revives()) == len(list(held))
    assert held.num_waiting_tokens


def test_all_are_taken_in_the_order_of_their_arrival_and_none_is_left() -> None:
    held = HeldSequences()
    for number, arrival in enumerate((3.0, 1.0, 2.0)):
        held.add(revive(number, arrival=arrival, max_queue_s=1.0))
    assert [taken.request.arrival for taken in held.take()] == [1.0, 2.0, 3.0]
    assert (len(held), held.num_waiting_tokens, held.pop_expired(9.0)) == (0, 0, [])


def test_only_those_that_were_never_started_expire() -> None:
    held = HeldSequences()
    held.add(revive(1, max_queue_s=1.0))
    held.add(revive(2, max_queue_s=1.0, started=True))
    held.add(revive(3))
    held.add(revive(4, max_queue_s=2.0))
    assert [expired.request.key.request for expired in held.pop_expired(1.5)] == [1]
    assert [kept.request for kept in held] == [2, 3, 4]


def test_one_that_comes_back_after_it_was_let_go_waits_for_its_own_time() -> None:
    held = HeldSequences()
    first = revive(1, max_queue_s=1.0)
    held.add(first)
    assert held.pop(first.request.key) is first
    assert held.pop(first.request.key) is None
    held.add(msgspec.structs.replace(first, added_at=5.0))
    assert held.pop_expired(5.5) == []
    assert len(held.pop_expired(6.0)) == 1


def test_none_is_held_twice() -> None:
    held = HeldSequences()
    held.add(revive(1))
    with pytest.raises(ValueError, match="held already"):
        held.add(revive(1))
    assert held.num_waiting_tokens == 3


def test_who_was_sent_tokens_by_a_former_scheduler_is_not_waiting() -> None:
    held = HeldSequences()
    begun = revive(1, max_queue_s=1.0)
    begun = msgspec.structs.replace(begun, request=msgspec.structs.replace(begun.request, output_ids=pack_ids([5])))
    held.add(begun)
    assert (held.num_waiting_tokens, held.pop_expired(99.0)) == (0, [])
    assert held.pop(begun.request.key) == begun
    assert held.num_waiting_tokens == 0
