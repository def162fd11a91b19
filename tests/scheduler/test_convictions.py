"""Convictions: an equal request is known again, any other is not, and nothing is remembered for ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagemill.ids import pack_ids
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from scheduler.convictions import MAX_CONVICTIONS, REMEMBERED_S, Convictions

GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)


def request(prompt: tuple[int, ...] = (1, 2, 3), **changes: Any) -> AddRequest:
    plain = AddRequest(SequenceKey(0, 1, 1, 0), "r1", pack_ids(list(prompt)), b"", DRAWN, Limits(100), 7, 0, 12.5, b"root", b"")
    return msgspec.structs.replace(plain, **changes)


def convicted(culprit: AddRequest, num_computed_tokens: int) -> Convictions:
    convictions = Convictions()
    convictions.add(culprit, num_computed_tokens, 0.0)
    return convictions


def test_who_sends_it_when_and_for_how_many_tokens_makes_no_difference() -> None:
    convictions = convicted(request(), 3)
    again = request(key=SequenceKey(5, 6, 7, 8), request_id="r2", limits=Limits(1), seed=8, priority=3, arrival=99.0, root=b"", output_ids=pack_ids([9]))
    assert convictions.names(again, 1.0)


@pytest.mark.parametrize(
    "other",
    [request((1, 2)), request((1, 2, 3, 4)), request((1, 2, 4)), request(sampling=GREEDY), request(sampling=SamplingParams(0.7, logit_bias=((1, 2.0),)))],
    ids=["shorter", "longer", "other", "greedy", "biased"],
)
def test_another_prompt_and_another_way_to_sample_are_innocent(other: AddRequest) -> None:
    assert not convicted(request(), 3).names(other, 1.0)


def test_behind_the_prompt_the_seed_counts_where_tokens_are_drawn() -> None:
    drawn = convicted(request(seed=7), 4)
    assert drawn.names(request(seed=7), 1.0)
    assert not drawn.names(request(seed=8), 1.0), "it may have drawn other tokens"
    assert convicted(request(seed=7, sampling=GREEDY), 4).names(request(seed=8, sampling=GREEDY), 1.0)


def test_a_second_conviction_with_another_seed_shows_that_it_does_not_matter() -> None:
    convictions = convicted(request(seed=7), 4)
    convictions.add(request(seed=7), 4, 1.0)
    assert not convictions.names(request(seed=9), 2.0)
    convictions.add(request(seed=8), 4, 3.0)
    assert convictions.names(request(seed=9), 4.0)


def test_nothing_is_remembered_for_ever_and_no_more_than_there_is_room_for() -> None:
    convictions = convicted(request(), 3)
    assert convictions.names(request(), REMEMBERED_S - 1)
    assert not convictions.names(request(), REMEMBERED_S)
    assert len(convictions) == 0
    for number in range(MAX_CONVICTIONS + 5):
        convictions.add(request((number,)), 1, 0.0)
    assert len(convictions) == MAX_CONVICTIONS
    assert [convictions.names(request((number,)), 1.0) for number in (4, 5, MAX_CONVICTIONS + 4)] == [False, True, True]
