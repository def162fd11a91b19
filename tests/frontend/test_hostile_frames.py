"""What a scheduler should never send: it is dropped and counted, and the replies that are under way go on."""

from __future__ import annotations

import msgspec
import pytest

from pagemill import channels
from pagemill.ids import NONE
from pagemill.messages.frontend import AbortRequest, AddRequest, DecisionsReply, SchedulerReady, SequenceOutput, StepOutput
from pagemill.messages.sequences import SequenceKey
from pagemill.messages.wire import Hello
from tests.helpers.fake_scheduler import FakeScheduler
from tests.helpers.frontend_server import running_frontend
from tests.helpers.lost_scheduler import FIRST_CUT, NUM_TOKENS, Reader, up_to, whole

MAX_FRAME_BYTES = 65536


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def output(key: SequenceKey, first_index: int, token_id: int) -> SequenceOutput:
    return SequenceOutput(key, first_index, (token_id,), (), None, NONE, 0, 0, 0.0, "")


def test_frames_that_are_malformed_oversized_replayed_or_misdirected_change_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_FRAME_BYTES", MAX_FRAME_BYTES)
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as frontend:
        fake, engine = frontend.scheduler, frontend.services.engine
        reader = Reader(frontend, stream=True)
        reader.wait_for_chunks(FIRST_CUT)
        (request,) = fake.requests()
        key = request.key
        right = packed(StepOutput(0, 1, (output(key, FIRST_CUT, 99),), ()))
        malformed = [
            b"",
            b"\xc1",
            b"\x00" * 100,
            right[:-1],
            right + b"\x00",
            packed(AbortRequest(key)),
            msgspec.msgpack.encode(["StepOutput", "0", 1, [], []]),
        ]
        stranger = msgspec.structs.replace(key, frontend=3)
        misdirected = [
            StepOutput(1, 1, (output(key, FIRST_CUT, 99),), ()),
            StepOutput(0, 1, (output(stranger, FIRST_CUT, 99),), ()),
            StepOutput(0, 0, (output(key, FIRST_CUT, 99),), ()),
            SchedulerReady(0, 8, 8, 8, 0, 8, False),
        ]
        for frame in (*malformed, *map(packed, misdirected)):
            fake.send(frame)
        frontend.wait_until(lambda: engine.num_dropped == len(malformed) + len(misdirected), f"{engine.num_dropped} are counted")

        replayed = [StepOutput(0, 1, (output(key, 0, whole(request)[0].tokens[0]),), ()), DecisionsReply(1234, 0.0, []), FakeScheduler.hello("scheduler")]
        for frame in map(packed, replayed):
            fake.send(frame)
        fake.go_on(key, whole(request)[FIRST_CUT:])
        stream = reader.stream()
        assert stream.finish_reasons() == ["length"]
        assert len(stream.text_of(0)) == NUM_TOKENS
        assert f"pagemill_frontend_dropped_messages_total {len(malformed) + len(misdirected)}.0" in frontend.client.get("/metrics").text


def test_a_frame_past_the_longest_never_arrives_and_nothing_with_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_FRAME_BYTES", MAX_FRAME_BYTES)
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as frontend:
        reader = Reader(frontend, stream=True)
        reader.wait_for_chunks(FIRST_CUT)
        frontend.scheduler.send(bytes(MAX_FRAME_BYTES + 1))
        assert frontend.client.get("/livez").status_code == 200
        frontend.lose_scheduler()  # as the launcher says it when this one is replaced
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            fake.wait_for(AddRequest)
            assert len(reader.stream().text_of(0)) == NUM_TOKENS


@pytest.mark.parametrize("wrong", [{"token": b"x" * 16}, {"kind": "worker"}, {"protocol_version": 0}], ids=["token", "kind", "version"])
def test_a_scheduler_that_turns_out_to_be_a_stranger_is_not_listened_to(wrong: dict[str, object]) -> None:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as frontend:
        reader = Reader(frontend, stream=True)
        reader.wait_for_chunks(FIRST_CUT)
        (request,) = frontend.scheduler.requests()
        hello: Hello = msgspec.structs.replace(FakeScheduler.hello("scheduler"), **wrong)
        frontend.scheduler.send(packed(hello))
        frontend.scheduler.send(packed(StepOutput(0, 1, (output(request.key, FIRST_CUT, 99),), ())))
        frontend.wait_until(lambda: frontend.client.get("/readyz").status_code == 503, "it is still believed")
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            stream = reader.stream()
    assert (len(stream.text_of(0)), stream.finish_reasons()) == (NUM_TOKENS, ["length"])
