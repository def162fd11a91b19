"""Typed channels: the handshake, what a stranger gets, and frames that mean nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from pagemill import PROTOCOL_VERSION
from pagemill.channels import Channel, ChannelError
from pagemill.ids import PlanId, RowId
from pagemill.messages.control import PeerLost
from pagemill.messages.debug_state import BlockCounts, DebugState, InvariantReport, SwapSlotCounts
from pagemill.messages.frontend import AbortRequest, DebugStateQuery, DebugStateReply, FrontendToScheduler, SchedulerToFrontend, StepOutput
from pagemill.messages.sequences import SequenceKey
from pagemill.messages.wire import Hello, Message
from pagemill.messages.worker import RowMissing

Bound = Channel[SchedulerToFrontend, FrontendToScheduler]
Connected = Channel[FrontendToScheduler, SchedulerToFrontend]
TOKEN = b"secret token"
SCHEDULER = Hello(TOKEN, PROTOCOL_VERSION, "scheduler", 0, 0)
FRONTEND = Hello(TOKEN, PROTOCOL_VERSION, "frontend", 0, 0)
COUNTS = (BlockCounts(4, 4, 0, 0), SwapSlotCounts(8, 1, 2, 5), InvariantReport(True, None))


def encoded(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


class Pair:
    """The scheduler's end and whatever connects to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._context = context
        self._address = f"ipc://{folder}/s"
        self.bound: Bound = Channel(context, self._address, bind=True, hello=SCHEDULER, peer="frontend", incoming=FrontendToScheduler)

        self._sockets = [self.bound.socket]

    def connect(self, hello: Hello = FRONTEND) -> Connected:
        channel: Connected = Channel(self._context, self._address, bind=False, hello=hello, peer="scheduler", incoming=SchedulerToFrontend)
        self._sockets.append(channel.socket)
        return channel

    def connect_raw(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        self._sockets.append(socket)
        socket.connect(self._address)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(zmq.Context(), tmp_path)
    yield made
    made.close()


def receive(channel: Bound | Connected, timeout_s: float = 10.0) -> object:
    """The next message; fails if none comes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        channel.socket.poll(50)
        message = channel.receive()
        if message is not None:
            return message
    raise AssertionError("no message")


def test_both_ends_are_greeted_before_anything_else_arrives(pair: Pair) -> None:
    frontend = pair.connect()
    frontend.send(DebugStateQuery(1))
    assert pair.bound.greeted is False
    assert receive(pair.bound) == DebugStateQuery(1)
    pair.bound.send(StepOutput(0, 1, (), ()))
    assert receive(frontend) == StepOutput(0, 1, (), ())
    assert frontend.greeted


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (msgspec.structs.replace(FRONTEND, token=b"guess"), "a stranger"),
        (msgspec.structs.replace(FRONTEND, kind="worker"), "a stranger"),
        (msgspec.structs.replace(FRONTEND, protocol_version=PROTOCOL_VERSION + 1), "broken installation"),
    ],
    ids=["token", "kind", "version"],
)
def test_who_is_not_the_peer_is_refused(pair: Pair, hello: Hello, says: str) -> None:
    pair.connect(hello)
    with pytest.raises(ChannelError, match=says):
        receive(pair.bound)
    assert not pair.bound.greeted


def test_who_speaks_before_the_handshake_is_refused(pair: Pair) -> None:
    pair.connect_raw().send(msgspec.msgpack.encode(DebugStateQuery(1)))
    with pytest.raises(ChannelError, match="before its handshake"):
        receive(pair.bound)


def test_a_frame_that_means_nothing_is_dropped_and_counted(pair: Pair) -> None:
    stranger = pair.connect_raw()
    for frame in (msgspec.msgpack.encode(FRONTEND), b"\xc1", msgspec.msgpack.encode(["NoSuchMessage", 1]), msgspec.msgpack.encode(DebugStateQuery(2))):
        stranger.send(frame)
    assert receive(pair.bound) == DebugStateQuery(2)
    assert pair.bound.num_dropped == 2


def test_a_flood_of_garbage_is_dropped_and_what_stands_in_it_is_read(pair: Pair) -> None:
    draw = random.Random(1)
    stranger = pair.connect_raw()
    stranger.send(encoded(FRONTEND))
    garbage = [draw.randbytes(draw.randint(0, 64)) for _ in range(500)]
    for number, frame in enumerate(garbage):
        stranger.send(frame)
        if number % 100 == 99:
            stranger.send(encoded(DebugStateQuery(number)))
    assert [receive(pair.bound) for _ in range(5)] == [DebugStateQuery(number) for number in (99, 199, 299, 399, 499)]
    assert pair.bound.num_dropped == len(garbage)


@pytest.mark.parametrize(
    "message",
    [StepOutput(0, 1, (), ()), RowMissing(1, 0, PlanId(2), RowId(3), 4), PeerLost("scheduler", 0, 0), DebugStateReply(1, DebugState(1, 1, 0, [], *COUNTS))],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_another_direction_is_dropped(message: Message, pair: Pair) -> None:
    frontend = pair.connect()
    frontend.send_frame(encoded(message))
    frontend.send(DebugStateQuery(1))
    assert receive(pair.bound) == DebugStateQuery(1)
    assert pair.bound.num_dropped == 1


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_message_that_is_cut_short_or_has_something_more_is_dropped(cut: int, pair: Pair) -> None:
    frontend = pair.connect()
    whole = encoded(AbortRequest(SequenceKey(frontend=0, incarnation=0, request=1, choice=0)))
    frontend.send_frame(whole[: -min(cut, len(whole) - 1)])
    frontend.send_frame(whole + b"\xc0" * cut)
    frontend.send(DebugStateQuery(1))
    assert receive(pair.bound) == DebugStateQuery(1)
    assert pair.bound.num_dropped == 2


def test_a_handshake_that_comes_again_changes_nothing_and_a_wrong_one_ends_it(pair: Pair) -> None:
    frontend = pair.connect()
    frontend.send_frame(encoded(FRONTEND))
    frontend.send(DebugStateQuery(1))
    assert receive(pair.bound) == DebugStateQuery(1)
    pair.bound.send(StepOutput(0, 1, (), ()))
    assert receive(frontend) == StepOutput(0, 1, (), ())
    frontend.send_frame(encoded(msgspec.structs.replace(FRONTEND, token=b"guess")))
    with pytest.raises(ChannelError, match="a stranger"):
        receive(pair.bound)


def test_a_frame_that_is_too_long_does_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill.channels.MAX_FRAME_BYTES", 1000)
    short_of_memory = Pair(zmq.Context(), tmp_path)
    try:
        frontend = short_of_memory.connect()
        frontend.send(DebugStateQuery(1))
        assert receive(short_of_memory.bound) == DebugStateQuery(1)
        frontend.send_frame(encoded(DebugStateQuery(2)) + b"\0" * 2000)
        short_of_memory.bound.socket.poll(200)
        assert short_of_memory.bound.receive() is None
    finally:
        short_of_memory.close()


def test_a_bound_end_cannot_send_before_anybody_is_there(pair: Pair) -> None:
    with pytest.raises(ChannelError, match="stuck"):
        pair.bound.send(StepOutput(0, 1, (), ()))


def test_a_bound_end_takes_its_socket_along(pair: Pair, tmp_path: Path) -> None:
    connected = pair.connect()
    connected.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    pair.bound.close()
    assert list(tmp_path.iterdir()) == []


def test_the_token_is_in_no_representation() -> None:
    assert "secret" not in repr(SCHEDULER)


@pytest.mark.parametrize("num_sent", [0, 20], ids=["listening", "sending"])
def test_an_event_loop_gets_its_turn_however_much_a_peer_sends(num_sent: int, pair: Pair) -> None:
    """Also if this end sends much in each turn, which makes it look for answers."""
    frontend = pair.connect()
    frontend.send(DebugStateQuery(0))
    receive(pair.bound)
    for number in range(100):
        pair.bound.send(StepOutput(0, number, (), ()))
    received: list[SchedulerToFrontend] = []

    async def most_in_a_turn() -> int:
        loop = asyncio.get_running_loop()
        frontend.attach(loop, received.append, lambda error: pytest.fail(str(error)))
        most = 0
        async with asyncio.timeout(30):
            while len(received) < 100:
                before = len(received)
                for number in range(num_sent):
                    frontend.send(DebugStateQuery(number))
                await asyncio.sleep(0)
                most = max(most, len(received) - before)
        frontend.detach(loop)
        return most

    assert 0 < asyncio.run(most_in_a_turn()) <= 10


def test_a_message_that_cannot_be_handled_keeps_none_behind_it(pair: Pair) -> None:
    frontend = pair.connect()
    frontend.send(DebugStateQuery(0))
    receive(pair.bound)
    received: list[SchedulerToFrontend] = []
    failures: list[str] = []

    def handle(message: SchedulerToFrontend) -> None:
        received.append(message)
        if len(received) % 2:
            raise RuntimeError("cannot be handled")

    async def take_all() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
        for number in range(5):
            pair.bound.send(StepOutput(0, number, (), ()))
        frontend.attach(loop, handle, lambda error: pytest.fail(str(error)))
        async with asyncio.timeout(30):
            while len(received) < 5:
                await asyncio.sleep(0)
        frontend.detach(loop)

    asyncio.run(take_all())
    assert failures == ["cannot be handled"] * 3
