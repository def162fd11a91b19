"""The waiting room: what is taken while there is no scheduler is bounded, in every way in which it could grow, and in time."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from frontend import waiting_room
from frontend.errors import ApiError
from frontend.in_flight import LiveSequence
from frontend.waiting_room import WaitingRoom
from pagemill.messages.frontend import AddRequest, Rejection
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from tests.frontend.test_in_flight import NoSink


def guest(number: int, num_tokens: int = 1, max_queue_s: float = 0.0, **changes: Any) -> LiveSequence:
    prompt = array("i", range(num_tokens)).tobytes()
    request = AddRequest(SequenceKey(0, 1, number, 0), "r", prompt, b"", SamplingParams(), Limits(8, max_queue_s), 0, 0, 0.0, b"", b"")
    return LiveSequence(msgspec.structs.replace(request, **changes), NoSink())


def test_sequences_are_bounded_in_number_and_a_request_comes_in_whole_or_not_at_all() -> None:
    room = WaitingRoom(3, 1000)
    room.retry_after_s = lambda: 9
    room.admit([guest(1), guest(2)], 0.0)
    with pytest.raises(ApiError) as refusal:
        room.admit([guest(3), guest(4)], 0.0)
    assert (refusal.value.status, refusal.value.headers) == (429, {"Retry-After": "9"})
    room.admit([guest(5)], 0.0)
    assert len(room) == 3
    room.leave(guest(1).key)
    room.leave(guest(1).key)
    room.admit([guest(6)], 0.0)


def test_prompt_tokens_are_bounded_and_come_free_when_somebody_leaves() -> None:
    room = WaitingRoom(100, 1000)
    room.admit([guest(1, 600)], 0.0)
    with pytest.raises(ApiError):
        room.admit([guest(2, 401)], 0.0)
    room.admit([guest(3, 400)], 0.0)
    room.leave(guest(1).key)
    room.admit([guest(2, 600)], 0.0)


@pytest.mark.parametrize(
    "large",
    [{"prefix_keys": bytes(400)}, {"sampling": SamplingParams(logit_bias=((1, 0.5),) * 7)}, {"sampling": SamplingParams(stop_token_ids=tuple(range(7)))}],
    ids=["prefix keys", "biases", "stop tokens"],
)
def test_bytes_are_bounded_whatever_they_are_spent_on(large: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "MAX_BYTES", 1000)
    room = WaitingRoom(100, 1000)
    room.admit([guest(1, **large), guest(2, **large)], 0.0)
    with pytest.raises(ApiError):
        room.admit([guest(3, **large)], 0.0)
    room.admit([guest(4)], 0.0)


def test_one_that_is_larger_than_the_room_is_taken_while_it_is_empty() -> None:
    room = WaitingRoom(100, 1000)
    room.admit([guest(1, 5000)], 0.0)
    with pytest.raises(ApiError):
        room.admit([guest(2, 1)], 0.0)


def test_one_that_no_scheduler_took_is_kept_whatever_the_limits_and_counted_once() -> None:
    room = WaitingRoom(1, 1000)
    room.admit([guest(1)], 0.0)
    for _ in range(2):
        room.keep(guest(2), 0.0)
    assert len(room) == 2
    for number in (1, 2):
        room.leave(guest(number).key)
    room.admit([guest(3, 1000)], 0.0)


def test_who_has_waited_for_as_long_as_it_may_is_told_so() -> None:
    room = WaitingRoom(100, 1000)
    room.admit([guest(1, max_queue_s=2.0)], 0.0)
    room.admit([guest(2, max_queue_s=2.0), guest(3)], 1.0)
    assert room.expired(1.9) == []
    assert room.expired(2.5) == [Rejection(guest(1).key, "queue_timeout", 2500, 2000)]
    room.leave(guest(1).key)
    assert [rejection.key for rejection in room.expired(1e6)] == [guest(2).key]


def test_a_scheduler_is_told_how_much_of_the_time_is_left() -> None:
    room = WaitingRoom(100, 1000)
    limited, patient = guest(1, max_queue_s=10.0), guest(2)
    room.admit([limited, patient], 5.0)
    assert room.shortened(limited.request, 8.0).limits == Limits(8, 7.0)
    assert 0 < room.shortened(limited.request, 99.0).limits.max_queue_s < 0.1, "0 would be no limit"
    assert room.shortened(patient.request, 8.0) is patient.request
    room.leave(limited.key)
    assert room.shortened(limited.request, 8.0) is limited.request
