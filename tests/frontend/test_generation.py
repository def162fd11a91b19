"""One request's outputs on their way to its reader: in order, a little in each turn, and never without end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from frontend import generation as module
from frontend.choice import Choice, Delta, TextOptions
from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.generation import ClientGoneError, Generation
from frontend.metrics import FrontendMetrics
from frontend.overload import Overload
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.token_bytes import TokenBytes
from frontend.waiting_room import WaitingRoom
from pagemill.ids import NONE
from pagemill.messages.frontend import SequenceOutput
from pagemill.messages.sequences import FinishReason, SequenceKey
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler

TOKENS = TokenBytes({"type": "ByteLevel"}, lambda token_id: chr(ord("a") + token_id % 26), frozenset())
MANY = 10 * module._TOKENS_A_TURN


def output(choice: int, position: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(SequenceKey(0, 1, 1, choice), position, (position,), (), finish, NONE, 0, 0, 0.0, "")


@contextmanager
def begun(num_choices: int = 1) -> Iterator[Generation]:
    """One whose engine has no scheduler: a test says what comes."""
    engine = Engine(FakeScheduler.hello("frontend"), Readiness(), (), WaitingRoom(100, 100))
    record = RequestLedger(FrontendMetrics("tiny", "none")).open(method="POST", endpoint="/v1/completions", request_id="r")
    choices = [Choice(index, TOKENS, TextOptions()) for index in range(num_choices)]
    try:
        yield Generation(engine, record, Overload(100).open(), choices, 1, num_choices)
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
            assert max(sizes) <= module._TOKENS_A_TURN
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
            assert len(await generation.deltas()) == module._TOKENS_A_TURN
            for position in range(MANY, 2 * MANY):
                generation.output(output(0, position))
            while not cut:
                await asyncio.sleep(0)
            with pytest.raises(ApiError, match="did not read"):
                await generation.deltas()

    asyncio.run(asyncio.wait_for(stall(), DEADLINE_S))


def test_a_burst_ahead_of_a_reader_that_waits_for_its_client_now_and_then_cuts_nobody() -> None:
    """As after a stall: some messages in each turn, which in all are far more than may wait."""
    num_choices, num_steps = 64, 1200

    async def recover() -> None:
        cut: list[bool] = []
        with begun(num_choices) as generation:
            generation.on_overflow = lambda: cut.append(True)

            async def read() -> int:
                num_read = 0
                while not generation.finished:
                    num_read += len(await generation.deltas())
                    await asyncio.sleep(0)  # the transport is full for a turn
                return num_read

            reading = asyncio.create_task(read())
            for first in range(0, num_steps, 4):
                for position in range(first, first + 4):
                    for index in range(num_choices):
                        generation.output(output(index, position, "length" if position == num_steps - 1 else None))
                await asyncio.sleep(0)
            assert await reading == num_choices * num_steps
            assert not cut

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


def test_a_reader_that_falls_behind_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TAKEN_OUTPUTS", 2 * MANY)

    async def fall_behind() -> None:
        with begun() as generation:
            reading = asyncio.create_task(read_all(generation, []))
            for first in range(0, 100 * MANY, MANY):
                for position in range(first, first + MANY):
                    generation.output(output(0, position))
                assert len(generation._taken) <= 3 * MANY
                await asyncio.sleep(0)
                if generation._make_error is not None:
                    break
            with pytest.raises(ApiError, match="did not read"):
                await reading

    asyncio.run(asyncio.wait_for(fall_behind(), DEADLINE_S))


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
