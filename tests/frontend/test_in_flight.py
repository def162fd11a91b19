"""A live sequence: every token once, whatever is repeated, and enough kept to go on at another scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.in_flight import LiveSequence
from pagemill.ids import NONE, unpack_ids
from pagemill.messages.frontend import AddRequest, Rejection, SequenceOutput
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey, TokenLogprobs

KEY = SequenceKey(0, 1, 1, 0)
REQUEST = AddRequest(KEY, "cmpl-1", b"", b"", SamplingParams(), Limits(100), 7, 0, 12.5, b"", b"")


class NoSink:
    """For what is not about sinks."""

    def output(self, output: SequenceOutput) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...

    def failed(self) -> None: ...


def output(first_index: int, *ids: int, **changes: Any) -> SequenceOutput:
    logprobs = tuple(TokenLogprobs(-float(token_id), b"", b"") for token_id in ids)
    plain = SequenceOutput(KEY, first_index, ids, logprobs, None, NONE, 0, 0, 0.0, "")
    return msgspec.structs.replace(plain, **changes)


def sent() -> LiveSequence:
    sequence = LiveSequence(REQUEST, NoSink())
    sequence.sent = True
    return sequence


def ids_of(packed: bytes) -> list[int]:
    return list(unpack_ids(packed))


@pytest.mark.parametrize(
    ("first_index", "ids", "fresh"),
    [(2, (12, 13), (12, 13)), (1, (11, 12), (12,)), (0, (10, 11, 12), (12,)), (0, (10, 11), ()), (2, (), ())],
    ids=["what follows", "an overlap", "everything again", "nothing new", "no token"],
)
def test_tokens_received_before_are_taken_off_with_their_logprobs(first_index: int, ids: tuple[int, ...], fresh: tuple[int, ...]) -> None:
    sequence = sent()
    sequence.take(output(0, 10, 11))
    taken = sequence.take(output(first_index, *ids))
    assert taken is not None
    assert taken.token_ids == fresh
    assert [entry.logprob for entry in taken.logprobs] == [-float(token_id) for token_id in fresh]
    assert ids_of(sequence.again().output_ids) == [10, 11, *fresh]


@pytest.mark.parametrize("late", [output(3, 13), output(3, finish_reason="stop")], ids=["a token", "an end"])
def test_a_gap_is_not_taken(late: SequenceOutput) -> None:
    sequence = sent()
    sequence.take(output(0, 10, 11))
    assert sequence.take(late) is None
    assert ids_of(sequence.again().output_ids) == [10, 11]


def test_what_was_never_sent_goes_out_as_it_is_and_the_rest_with_what_was_received() -> None:
    sequence = LiveSequence(REQUEST, NoSink())
    assert sequence.again() is REQUEST
    sequence.sent = True
    again = sequence.again()
    assert (again.resubmitted, again.output_ids) == (True, b"")
    sequence.take(output(0, 10, 11))
    again = sequence.again()
    assert ids_of(again.output_ids) == [10, 11]
    assert (again.key, again.seed, again.arrival, again.limits) == (KEY, 7, 12.5, REQUEST.limits)


def test_what_schedulers_count_for_a_sequence_is_put_together() -> None:
    sequence = sent()
    sequence.take(output(0, 10, num_cached_tokens=3, num_preemptions=1, queue_s=0.5))
    sequence.again()
    sequence.again()  # a scheduler that said nothing
    taken = sequence.take(output(1, 11, num_cached_tokens=9, num_preemptions=2, queue_s=4.0))
    assert taken is not None
    assert (taken.num_cached_tokens, taken.num_preemptions, taken.queue_s) == (3, 3, 0.5)
    sequence.again()
    taken = sequence.take(output(2, 12, num_preemptions=4))
    assert taken is not None
    assert (taken.num_cached_tokens, taken.num_preemptions, taken.queue_s) == (3, 7, 0.5)
    ended = sequence.aborted()
    assert (ended.first_index, ended.finish_reason, ended.num_cached_tokens, ended.num_preemptions) == (3, "abort", 3, 7)


def test_before_its_first_token_the_newest_scheduler_is_believed() -> None:
    sequence = sent()
    sequence.again()
    taken = sequence.take(output(0, 10, num_cached_tokens=9, queue_s=4.0))
    assert taken is not None
    assert (taken.num_cached_tokens, taken.queue_s) == (9, 4.0)


def test_a_sequence_ends_without_ever_having_begun() -> None:
    ended = LiveSequence(REQUEST, NoSink()).aborted()
    assert (ended.key, ended.first_index, ended.token_ids, ended.finish_reason) == (KEY, 0, (), "abort")


@given(st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["again", "repeat", "overlap"])), max_size=30))
def test_each_token_arrives_once_whatever_is_repeated_and_however_often_schedulers_are_replaced(events: list[int | str]) -> None:
    sequence = sent()
    arrived: list[int] = []
    position = 0  #: of the scheduler
    for event in events:
        start, end = position, position
        match event:
            case "again":
                position = len(unpack_ids(sequence.again().output_ids))
                continue
            case "repeat":
                start = 0
            case "overlap":
                start, end = max(0, position - 2), position + 1
            case int(count):
                end = position + count
        taken = sequence.take(output(start, *range(start, end)))
        assert taken is not None
        arrived += taken.token_ids
        position = end
        assert arrived == list(range(end))
