"""One request's outputs on their way to its reader: in order, a little in each turn, and never without end."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from frontend import generation as module
from frontend import overload
from frontend.choice import Choice, Delta, TextOptions
from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.generation import TOKENS_A_TURN, ClientGoneError, Generation
from frontend.metrics import FrontendMetrics
from frontend.overload import Overload
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.token_bytes import TokenBytes
from frontend.waiting_room import WaitingRoom
from pagemill.ids import NONE
from pagemill.messages.frontend import SchedulerToFrontend, SequenceOutput, StepOutput
from pagemill.messages.sequences import FinishReason, SequenceKey, TokenLogprobs
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler

TOKENS = TokenBytes({"type": "ByteLevel"}, lambda token_id: chr(ord("a") + token_id % 26), frozenset())
MANY = 10 * TOKENS_A_TURN


def output(choice: int, position: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(SequenceKey(0, 1, 1, choice), position, (position,), (), finish, NONE, 0, 0, 0.0, "")


@contextmanager
def begun(num_choices: int = 1, server: Overload | None = None) -> Iterator[Generation]:
    """One whose engine has no scheduler: a test says what comes."""
    engine = Engine(FakeScheduler.hello("frontend"), Readiness(), (), WaitingRoom(100, 100))
    record = RequestLedger(FrontendMetrics("tiny", "none")).open(method="POST", endpoint="/v1/completions", request_id="r")
    choices = [Choice(index, TOKENS, TextOptions()) for index in range(num_choices)]
    try:
        yield Generation(engine, record, (server or Overload(100)).open(), choices, 1, num_choices)
    finally:
        engine.close()


async def read_all(generation: Generation, sizes: list[int]) -> list[Delta]:
    deltas: list[Delta] = []
    while not generation.finished:
        new = await generation.deltas()
        sizes.append(len(new))
        deltas += new
    return deltas


def texts(deltas: Sequence[Delta], num_choices: int) -> list[str]:
    return ["".join(delta.text for delta in deltas if delta.choice == index) for index in range(num_choices)]


def test_much_that_comes_at_once_is_read_a_little_in_each_turn_in_order() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def burst() -> None:
        sizes: list[int] = []
        with begun(3) as generation:
            reading = asyncio.create_task(read_all(generation, sizes))
            await asyncio.sleep(0)
            for index in range(3):
                for position in range(MANY):
                    generation.output(output(index, position, "length" if position == MANY - 1 else None))
            task = asyncio.create_task(others())
            deltas = await asyncio.wait_for(reading, DEADLINE_S)
            task.cancel()
            assert max(sizes) <= TOKENS_A_TURN
            assert turns >= len(sizes) - 1 >= 3 * 9
            assert texts(deltas, 3) == ["".join(chr(ord("a") + position % 26) for position in range(MANY))] * 3

    asyncio.run(burst())


def test_a_reader_at_work_is_not_too_slow_whatever_comes_meanwhile() -> None:
    async def stream() -> None:
        sizes: list[int] = []
        with begun() as generation:
            reading = asyncio.create_task(read_all(generation, sizes))
            for position in range(0, 5 * MANY, MANY):  # each time more than may wait, and more than is read in a few turns
                for offset in range(MANY):
                    generation.output(output(0, position + offset, "length" if position + offset == 5 * MANY - 1 else None))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            deltas = await asyncio.wait_for(reading, DEADLINE_S)
            assert len(deltas) == 5 * MANY

    asyncio.run(stream())


def test_a_reader_that_is_busy_elsewhere_is_too_slow() -> None:
    async def stall() -> None:
        with begun() as generation:
            cut: list[bool] = []
            generation.on_overflow = lambda: cut.append(True)
            for position in range(MANY):
                generation.output(output(0, position))
            assert len(await generation.deltas()) == TOKENS_A_TURN
            for position in range(MANY, 2 * MANY):
                generation.output(output(0, position))
            while not cut:
                await asyncio.sleep(0)
            with pytest.raises(ApiError, match="did not read"):
                await generation.deltas()

    asyncio.run(asyncio.wait_for(stall(), DEADLINE_S))


@pytest.mark.parametrize("at_least", [1, 5, TOKENS_A_TURN])
def test_a_reader_who_shows_nothing_before_the_end_is_woken_when_so_much_has_come_and_by_every_end(at_least: int) -> None:
    num_tokens = [2 * TOKENS_A_TURN + 3, TOKENS_A_TURN + 1]

    async def read() -> None:
        num_wakeups = 0
        with begun(2) as generation:

            async def gather() -> list[Delta]:
                nonlocal num_wakeups
                deltas: list[Delta] = []
                while not generation.finished:
                    deltas += await generation.deltas(at_least=at_least)
                    num_wakeups += 1
                return deltas

            reading = asyncio.create_task(gather())
            await asyncio.sleep(0)
            for position in range(max(num_tokens)):
                for index, count in enumerate(num_tokens):
                    if position < count:
                        generation.output(output(index, position, "length" if position == count - 1 else None))
                    for _ in range(4):  # the reader may come after each
                        await asyncio.sleep(0)
            deltas = await asyncio.wait_for(reading, DEADLINE_S)
        assert texts(deltas, 2) == ["".join(chr(ord("a") + position % 26) for position in range(count)) for count in num_tokens]
        assert sum(num_tokens) // at_least <= num_wakeups <= sum(num_tokens) // at_least + 2

    asyncio.run(read())


def test_a_failure_wakes_whoever_waits_for_much() -> None:
    async def fail() -> None:
        with begun() as generation:
            reading = asyncio.create_task(generation.deltas(at_least=TOKENS_A_TURN))
            await asyncio.sleep(0)
            generation.output(output(0, 0))
            generation.failed()
            assert [delta.text for delta in await reading] == ["a"]
            with pytest.raises(ApiError):
                await generation.deltas(at_least=TOKENS_A_TURN)

    asyncio.run(asyncio.wait_for(fail(), DEADLINE_S))


def test_who_has_just_come_is_not_away_whatever_came_before() -> None:
    async def come_and_go() -> None:
        cut: list[bool] = []
        with begun() as generation:
            generation.on_overflow = lambda: cut.append(True)
            reading = asyncio.create_task(generation.deltas())
            await asyncio.sleep(0)
            for position in range(MANY):
                generation.output(output(0, position))
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(reading.result()) == TOKENS_A_TURN
            assert not cut

    asyncio.run(asyncio.wait_for(come_and_go(), DEADLINE_S))


def test_a_burst_for_many_choices_ahead_of_a_reader_that_comes_again_and_again_cuts_nobody() -> None:
    """As after a stall: some messages in each turn, which in all are far more than the reader gets to."""
    num_choices, num_steps = 128, 900
    num_read = 0
    cut: list[bool] = []

    async def read(generation: Generation) -> None:
        nonlocal num_read
        while True:
            num_read += len(await generation.deltas())
            await asyncio.sleep(0)  # the transport is full for a turn

    async def recover() -> None:
        with begun(num_choices) as generation:
            generation.on_overflow = lambda: cut.append(True)
            reading = asyncio.create_task(read(generation))
            for first in range(0, num_steps, 4):
                for position in range(first, first + 4):
                    for index in range(num_choices):
                        generation.output(output(index, position))
                await asyncio.sleep(0)
            assert not reading.done()
            assert not cut
            assert num_read > 50 * TOKENS_A_TURN
            assert num_read + len(generation._waiting) == num_choices * num_steps
            reading.cancel()

    asyncio.run(asyncio.wait_for(recover(), DEADLINE_S))


def test_what_comes_after_the_last_choice_has_ended_cuts_nobody() -> None:
    async def end() -> None:
        cut: list[bool] = []
        with begun() as generation:
            generation.on_overflow = lambda: cut.append(True)
            generation.output(output(0, 0, "stop"))
            assert len(await generation.deltas()) == 1
            for position in range(1, MANY):
                generation.output(output(0, position))
            generation.close()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not cut

    asyncio.run(asyncio.wait_for(end(), DEADLINE_S))


@pytest.mark.parametrize(("limit", "num_others"), [("MAX_REPLY_BYTES", 0), ("MAX_REPLY_BYTES_HELD", 3)], ids=["alone", "together"])
def test_a_reader_that_falls_behind_without_end_is_told_so_when_too_much_is_held(limit: str, num_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2 * MANY * module._size(output(0, 0))
    monkeypatch.setattr(overload, limit, most)
    monkeypatch.setattr(overload, "SMALL_REPLY_BYTES", most // 4)

    async def fall_behind() -> None:
        server = Overload(100)
        others = [server.open() for _ in range(num_others)]
        for load in others:
            load.gather(most // 4)
        with begun(server=server) as generation:
            reading = asyncio.create_task(read_all(generation, []))
            for position in itertools.count():
                generation.output(output(0, position))
                if generation._make_error is not None:
                    break
                assert server.reply_bytes <= most
                if position % MANY == 0:
                    await asyncio.sleep(0)
            assert server.reply_bytes == num_others * (most // 4)
            with pytest.raises(ApiError, match="could be sent"):
                await reading
        for load in others:
            load.close()
        assert server.reply_bytes == 0

    asyncio.run(asyncio.wait_for(fall_behind(), DEADLINE_S))


def test_what_waits_is_counted_until_it_is_read_or_nobody_reads() -> None:
    async def wait() -> None:
        server = Overload(100)
        with begun(server=server) as generation:
            for position in range(MANY):
                generation.output(output(0, position))
            assert server.reply_bytes == MANY * module._size(output(0, 0))
            await generation.deltas()
            assert server.reply_bytes == (MANY - TOKENS_A_TURN) * module._size(output(0, 0))
            generation.close()
            assert server.reply_bytes == 0

    asyncio.run(asyncio.wait_for(wait(), DEADLINE_S))


@pytest.mark.parametrize(("num_tokens", "num_top"), [(1, None), (1, 0), (1, 5), (1, 20), (8, None), (8, 20)])
def test_an_output_counts_for_what_it_takes_up_in_memory(num_tokens: int, num_top: int | None) -> None:
    num_outputs = 500
    logprobs = () if num_top is None else (TokenLogprobs(-1.5, bytes(4 * num_top), bytes(4 * num_top)),) * num_tokens
    outputs = tuple(
        SequenceOutput(SequenceKey(0, 1, 1000 + index, 0), 1000 + index, tuple(range(1000, 1000 + num_tokens)), logprobs, None, NONE, 1000, 0, 0.1, "")
        for index in range(num_outputs)
    )
    frame = msgspec.msgpack.encode(StepOutput(0, 1, outputs, ()))
    decoder = msgspec.msgpack.Decoder(SchedulerToFrontend)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    message = decoder.decode(frame)
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert isinstance(message, StepOutput)
    assert 0.7 < sum(map(module._size, message.outputs)) / num_bytes < 1.5


def test_what_came_before_a_failure_is_read_before_it() -> None:
    async def fail() -> None:
        sizes: list[int] = []
        with begun() as generation:
            for position in range(MANY):
                generation.output(output(0, position))
            generation.failed()
            with pytest.raises(ApiError, match="failed"):
                await read_all(generation, sizes)
            assert sum(sizes) == MANY

    asyncio.run(asyncio.wait_for(fail(), DEADLINE_S))


def test_a_client_that_leaves_ends_the_reading_at_once() -> None:
    async def leave() -> None:
        with begun() as generation:
            for position in range(MANY):
                generation.output(output(0, position))
            await generation.deltas()
            for position in range(MANY, MANY + 10):
                generation.output(output(0, position))
            generation.client_gone()
            with pytest.raises(ClientGoneError):
                await generation.deltas()

    asyncio.run(asyncio.wait_for(leave(), DEADLINE_S))
