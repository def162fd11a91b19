"""Who is refused before anything is read, when to come again, and how a burst is spread over turns of the event loop."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from frontend import overload
from frontend.errors import ApiError
from frontend.overload import Load, Overload, Pacer, Throughput
from pagemill.messages.frontend import SchedulerReady
from tests.helpers.fake_scheduler import snapshot

SEATS = 4
READY = SchedulerReady(epoch=1, max_model_len=512, block_size=16, num_blocks=100, num_swap_slots=0, max_num_seqs=SEATS, deterministic=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ready(max_num_queued: int = 10, clock: Clock | None = None) -> Overload:
    """A server that has nothing to do."""
    made = Overload(max_num_queued, clock or Clock())
    made.scheduler_ready(READY)
    made.snapshot(snapshot())
    return made


def add(server: Overload, num_sequences: int = 1) -> Load:
    """One request, all the way to the scheduler."""
    load = server.open()
    load.admit()
    load.prepare()
    load.submitted(num_sequences)
    return load


def fill(server: Overload) -> list[Load]:
    """As many requests as it takes."""
    loads = []
    while True:
        try:
            loads.append(add(server))
        except ApiError:
            return loads


def test_as_many_are_taken_as_may_wait_and_can_run() -> None:
    assert len(fill(ready(10))) == 10 + SEATS


def test_where_some_wait_already_nobody_will_sit_down_at_once() -> None:
    server = ready(10)
    server.snapshot(snapshot(num_waiting=3, num_running=SEATS - 2))
    assert len(fill(server)) == 7


def test_seats_that_are_taken_are_not_free() -> None:
    server = ready(10)
    server.snapshot(snapshot(num_running=1, num_preempted=2))
    assert len(fill(server)) == 10 + 1


def test_a_sequence_that_starts_makes_room_before_the_next_snapshot() -> None:
    server = ready(10)
    loads = fill(server)
    loads[0].started()
    assert len(fill(server)) == 1


def test_a_request_that_ends_while_it_waits_makes_room_for_all_its_sequences() -> None:
    server = ready(10)
    loads = [add(server, 4), *fill(server)]
    loads[0].started()
    fill(server)
    loads[0].close()
    assert len(fill(server)) == 3


def test_a_snapshot_counts_what_was_handed_over_before_it() -> None:
    server = ready(10)
    fill(server)
    server.snapshot(snapshot(num_waiting=10, num_running=SEATS))
    assert server.num_waiting == 10
    server.snapshot(snapshot(num_waiting=8, num_running=SEATS))
    assert len(fill(server)) == 2


def test_what_was_on_its_way_when_a_snapshot_was_taken_waits_beside_what_is_counted_there() -> None:
    server = ready(10)
    fill(server)
    server.num_unheard = lambda: 6
    server.snapshot(snapshot(num_waiting=1, num_running=SEATS))
    assert server.num_waiting == 7
    server.num_unheard = lambda: 0
    assert len(fill(server)) == 3


def test_what_other_frontends_handed_over_counts_as_well() -> None:
    server = ready(10)
    server.snapshot(snapshot(num_waiting=10, num_running=SEATS))
    assert fill(server) == []


def test_requests_that_are_being_prepared_count_and_those_that_are_being_read_do_not() -> None:
    server = ready(2)
    reading = [server.open() for _ in range(20)]
    for load in reading:
        load.admit()
    for load in reading[: 2 + SEATS]:
        load.prepare()
    with pytest.raises(ApiError, match="waiting"):
        reading[-1].prepare()
    with pytest.raises(ApiError, match="waiting"):
        server.open().admit()
    reading[0].close()
    reading[-1].prepare()


def test_while_the_scheduler_is_away_as_many_may_wait_as_ever_and_nobody_sits() -> None:
    server = ready(10)
    server.scheduler_lost()
    assert len(fill(server)) == 10
    server.scheduler_ready(READY)
    assert fill(server) == []


def test_no_limit_of_the_queue_at_all_still_fills_the_seats() -> None:
    assert len(fill(ready(0))) == SEATS


def test_large_bodies_are_bounded_together_and_small_ones_pass() -> None:
    server = ready()
    large, other, small = server.open(), server.open(), server.open()
    large.hold(overload.MAX_BODY_BYTES_HELD)
    with pytest.raises(ApiError, match="large request bodies") as caught:
        other.hold(overload.SMALL_BODY_BYTES + 1)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    small.hold(overload.SMALL_BODY_BYTES)
    other.close()
    large.submitted(1)
    other = server.open()
    other.hold(overload.MAX_BODY_BYTES_HELD - overload.SMALL_BODY_BYTES)
    assert server.body_bytes == overload.MAX_BODY_BYTES_HELD


def test_one_reply_is_bounded_and_so_are_large_ones_together_while_small_ones_pass() -> None:
    server = ready()
    with pytest.raises(ApiError, match="'stream'") as caught:
        server.open().gather(overload.MAX_REPLY_BYTES + 1)
    assert (caught.value.status, caught.value.code) == (400, "reply_too_large")
    server = ready()
    loads = [server.open() for _ in range(4)]
    loads[0].gather(overload.MAX_REPLY_BYTES)
    loads[1].gather(overload.MAX_REPLY_BYTES_HELD - overload.MAX_REPLY_BYTES)
    loads[2].gather(overload.SMALL_REPLY_BYTES)
    with pytest.raises(ApiError, match="large replies") as caught:
        loads[3].gather(overload.SMALL_REPLY_BYTES + 1)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    loads[0].close()
    loads[3].gather(overload.SMALL_REPLY_BYTES + 2)


CALLS = ["hold", "prepare", "submitted", "started", "gather", "hold_unread", "close"]
OPERATIONS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(CALLS), st.integers(1, 100)), max_size=60)


@given(OPERATIONS)
def test_whatever_happens_nothing_weighs_when_all_is_closed(operations: list[tuple[int, str, int]]) -> None:
    server = ready(1000)
    loads = [server.open() for _ in range(4)]
    for which, name, amount in operations:
        call = getattr(loads[which], name)
        call(amount) if name in ("hold", "submitted", "gather", "hold_unread") else call()
    for load in loads:
        load.close()
    assert server.body_bytes == server.reply_bytes == server.num_waiting == 0
    assert len(fill(server)) == 1000 + SEATS


# --- when to come again ------------------------------------------------------------------------------------


def ends_at(server: Overload, clock: Clock, sequences_s: float, seconds: float, num_waiting: int) -> None:
    """The scheduler ends so many sequences a second while others wait, and says so ten times a second."""
    for step in range(int(seconds * 10) + 1):
        server.snapshot(snapshot(num_waiting=num_waiting, num_running=SEATS, sequences_finished={"stop": int(step * sequences_s / 10), "rejected": 7 * step}))
        clock.now += 0.1


@pytest.mark.parametrize(("sequences_s", "num_waiting", "expected"), [(10, 100, 10), (10, 101, 11), (40, 100, 3), (1000, 10, 1), (1, 10_000, 60), (0, 30, 60)])
def test_retry_after_is_what_waits_over_the_pace_in_whole_seconds(sequences_s: float, num_waiting: int, expected: int) -> None:
    clock = Clock()
    server = ready(10, clock)
    ends_at(server, clock, sequences_s, 20, num_waiting)
    assert server.retry_after_s() == expected


def test_retry_after_is_short_while_nothing_is_known() -> None:
    server = Overload(0, Clock())
    with pytest.raises(ApiError) as caught:
        server.open().admit()
    assert caught.value.headers == {"Retry-After": "1"}


def test_the_pace_is_that_of_the_last_half_minute() -> None:
    clock = Clock()
    server = ready(10, clock)
    ends_at(server, clock, 1000, 60, 100)
    ends_at(server, clock, 10, 40, 100)  # the counter begins anew as well: a new scheduler
    assert server.retry_after_s() == 10


def test_time_in_which_nobody_waited_says_nothing() -> None:
    pace = Throughput()
    for second in range(10):
        pace.note(float(second), second, others_wait=False)
    assert pace.sequences_s == 0.0
    for second in range(10, 20):
        pace.note(float(second), 9 + 20 * (second - 9), others_wait=True)
    assert pace.sequences_s == pytest.approx(20.0)
    pace.note(100.0, 200, others_wait=False)
    pace.note(200.0, 200, others_wait=False)
    assert pace.sequences_s == 0.0


# --- bursts --------------------------------------------------------------------------------------------------


def test_a_burst_begins_a_few_at_a_time_in_order_and_others_go_between() -> None:
    begun: list[int] = []
    between: list[int] = []

    async def request(pacer: Pacer, number: int) -> None:
        await pacer.turn()
        begun.append(number)

    async def burst() -> None:
        pacer = Pacer(width=3)
        requests = [asyncio.create_task(request(pacer, number)) for number in range(20)]
        requests[10].cancel()
        while len(begun) < 19:
            await asyncio.sleep(0)
            between.append(len(begun))
        await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(burst())
    assert begun == [number for number in range(20) if number != 10]
    assert max(later - earlier for earlier, later in zip([0, *between], between, strict=False)) <= 3


def test_a_request_alone_does_not_wait_for_its_turn() -> None:
    async def alone() -> None:
        pacer = Pacer(width=1)
        turn = pacer.turn()
        with pytest.raises(StopIteration):
            turn.send(None)

    asyncio.run(alone())


def test_who_is_cancelled_while_waiting_does_not_take_a_turn_from_others() -> None:
    async def crowd() -> list[object]:
        pacer = Pacer(width=1)
        tasks = [asyncio.create_task(pacer.turn()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[1:49]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(crowd(), 10))
    assert results[0] is results[-1] is None


def test_who_waits_for_a_turn_takes_the_room_that_is_left_and_keeps_it() -> None:
    """Of a burst nobody is refused late: those beyond the queue hear it at once, all others are taken."""
    taken: list[int] = []

    async def request(server: Overload, number: int) -> str:
        if server.is_full:
            return "refused"
        await server.pacer.turn()
        load = server.open()
        load.admit()
        load.prepare()
        load.submitted(1)
        taken.append(number)
        return "taken"

    async def burst() -> None:
        server = ready(90)
        requests = [asyncio.create_task(request(server, number)) for number in range(200)]
        await asyncio.sleep(0)
        assert len(taken) < 20
        refused = [number for number, task in enumerate(requests) if task.done() and task.result() == "refused"]
        assert refused == list(range(90 + SEATS, 200))
        await asyncio.gather(*requests)
        assert taken == list(range(90 + SEATS))
        assert server.num_waiting == 90 + SEATS

    asyncio.run(burst())


# --- what operators hear -------------------------------------------------------------------------------------


def test_the_log_says_now_and_then_how_many_were_refused() -> None:
    clock = Clock()
    server = ready(0, clock)
    with capture_logs() as lines:
        for _ in range(3):
            fill(server)
            clock.now += overload.REPORT_INTERVAL_S / 2
            server.snapshot(snapshot(num_waiting=SEATS))
        clock.now += overload.REPORT_INTERVAL_S
        server.snapshot(snapshot())
    assert [(line["event"], line["refused"], line["log_level"]) for line in lines] == [("requests_refused", 1, "warning"), ("requests_refused", 2, "warning")]
