"""Requests outlive the scheduler they were given to: replies go on at the very token, and each thing is said once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from frontend.errors import ApiError
from pagemill.ids import NONE
from pagemill.messages.frontend import AbortRequest, AddRequest, DebugStateQuery, FinishRequest, Rejection, SchedulerReady, SequenceOutput, StepOutput
from pagemill.messages.sequences import SequenceKey
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler, Step
from tests.helpers.frontend_server import RunningFrontend, running_frontend
from tests.helpers.lost_scheduler import CHAT, FIRST_CUT, HELLO, NUM_TOKENS, SECOND_CUT, Reader, add, received, replaced, up_to, whole


def output(key: SequenceKey, first_index: int, *ids: int) -> SequenceOutput:
    return SequenceOutput(key, first_index, ids, (), None, NONE, 0, 0, 0.0, "")


@pytest.fixture
def frontend() -> Iterator[RunningFrontend]:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as running:
        yield running


def first(request: AddRequest, num_tokens: int) -> list[int]:
    return [step.tokens[0] for step in whole(request)[:num_tokens]]


BODIES: dict[str, dict[str, Any]] = {"plain": {}, "two choices": {"n": 2}, "logprobs": {"logprobs": True, "top_logprobs": 2, "n": 2}}


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
@pytest.mark.parametrize("cuts", [(FIRST_CUT,), (FIRST_CUT, SECOND_CUT)], ids=["one loss", "two losses"])
def test_replies_go_on_where_lost_schedulers_stopped(body: dict[str, Any], cuts: tuple[int, ...], frontend: RunningFrontend) -> None:
    n = body.get("n", 1)
    buffered = Reader(frontend, **body)
    frontend.scheduler.wait_for(AddRequest, count=n)
    streamed = Reader(frontend, **body, stream=True)
    with ExitStack() as schedulers:
        for cut, script in zip(cuts, [up_to(SECOND_CUT), whole][-len(cuts) :], strict=True):
            streamed.wait_for_chunks(cut * n)
            fake = schedulers.enter_context(replaced(frontend, script, frontend.scheduler.epoch + 1))
            requests = fake.wait_for(AddRequest, count=2 * n)
            assert [(request.resubmitted, received(request)) for request in requests] == [(True, first(request, cut)) for request in requests]
            assert [request.key for request in requests] == sorted(request.key for request in requests)  # in order of arrival
        stream, reply = streamed.stream(), buffered.reply().json()
        undisturbed = frontend.post(CHAT, messages=HELLO, **body).json()
        assert len(frontend.scheduler.requests()) == 3 * n
    assert (reply["choices"], reply["usage"]) == (undisturbed["choices"], undisturbed["usage"])
    assert (stream.done, stream.error) == (True, None)
    for choice in undisturbed["choices"]:
        assert stream.text_of(choice["index"]) == choice["message"]["content"]
        assert stream.finish_reasons(choice["index"]) == ["length"]
        assert not choice["logprobs"] or stream.logprobs("content", choice["index"]) == choice["logprobs"]["content"]
    assert frontend.services.engine.num_sequences == 0


def test_a_stop_string_is_found_across_the_gap(frontend: RunningFrontend) -> None:
    detokenized = [frontend.post("/detokenize", tokens=[40 + index]).json()["prompt"] for index in range(NUM_TOKENS)]
    stop = detokenized[FIRST_CUT - 1] + detokenized[FIRST_CUT]
    streamed = Reader(frontend, stop=stop, stream=True)
    streamed.wait_for_chunks(FIRST_CUT - 1)  # the last of the five is held: it may begin the stop string
    frontend.wait_until(lambda: frontend.services.engine.num_sequences == 1, "the sequence does not run")
    with replaced(frontend) as fake:
        stream = streamed.stream()
        (finish,) = fake.wait_for(FinishRequest)
        assert finish.keep == FIRST_CUT + 1
        assert stream.text == "".join(detokenized[: FIRST_CUT - 1])
        assert (stream.finish_reasons(), stream.stop_reason(), stream.done) == (["stop"], stop, True)


def test_what_ends_while_no_scheduler_is_there_is_not_sent_to_the_next(frontend: RunningFrontend) -> None:
    engine = frontend.services.engine
    (stopped, staying), heard = add(frontend, 2)
    with httpx.stream("POST", f"{frontend.url}{CHAT}", json={"messages": HELLO, "stream": True}, timeout=DEADLINE_S) as leaving:
        next(leaving.iter_text())
        frontend.wait_until(lambda: len(heard.outputs) == 2 * FIRST_CUT, "the outputs do not arrive")
        frontend.lose_scheduler()
    frontend.wait_until(lambda: engine.num_sequences == 2, "the client that left is not noticed")
    frontend.run(lambda: engine.finish(stopped, "stop", 1))
    with FakeScheduler(whole, epoch=2) as fake:
        frontend.meet(fake)
        fake.wait_for(AddRequest)
        frontend.wait_until(lambda: engine.num_sequences == 0, "the one that stayed does not end")
        assert [message.key for message in fake.received if isinstance(message, AddRequest | AbortRequest | FinishRequest)] == [staying]
    assert heard.num_failures == 0


def test_a_new_epoch_of_the_same_scheduler_is_no_reason_to_send_anything_again(frontend: RunningFrontend) -> None:
    streamed = Reader(frontend, stream=True)
    streamed.wait_for_chunks(FIRST_CUT)
    (request,) = frontend.scheduler.requests()
    frontend.run(lambda: frontend.services.readiness.peer_lost("worker", 0))
    assert frontend.client.get("/readyz").json() == {"status": "restarting", "detail": "A worker is restarting."}
    during = Reader(frontend)  # is taken, and waits at the scheduler
    frontend.scheduler.wait_for(AddRequest, count=2)
    frontend.scheduler.rebuild()
    frontend.wait_ready()
    for key in (request.key, frontend.scheduler.requests()[1].key):
        frontend.scheduler.go_on(key, whole(request)[FIRST_CUT:])
    assert streamed.stream().finish_reasons() == ["length"]
    assert during.reply().status_code == 200
    assert len(frontend.scheduler.requests()) == 2


def test_outputs_of_an_older_epoch_and_of_nobody_are_dropped_and_counted(frontend: RunningFrontend) -> None:
    (key,), heard = add(frontend)
    engine = frontend.services.engine
    frontend.wait_until(lambda: len(heard.outputs) == FIRST_CUT, "the outputs do not arrive")
    with replaced(frontend, up_to(SECOND_CUT), epoch=5) as fake:
        frontend.wait_until(lambda: len(heard.outputs) == SECOND_CUT, "the outputs do not arrive")
        assert engine.num_dropped == 0
        stale = output(key, SECOND_CUT, 99)
        fake.send(StepOutput(0, 4, (stale, stale), (Rejection(key, "invalid", 0, 0),)))
        fake.send(StepOutput(0, 5, (output(engine.key(999, 0), 0, 99),), (Rejection(engine.key(999, 0), "invalid", 0, 0),)))
        fake.send(SchedulerReady(3, 8, 8, 8, 0, 8, False))
        frontend.wait_until(lambda: engine.num_dropped == 6, f"{engine.num_dropped} are counted")
        assert frontend.services.readiness.require().max_model_len == 512
        fake.wait_for(AddRequest)
        fake.go_on(key, [Step((54,), "length")])
        frontend.wait_until(lambda: engine.num_sequences == 0, "the sequence does not end")
    assert [output.token_ids[0] for output in heard.outputs] == [*range(40, 40 + SECOND_CUT), 54]


def test_a_newer_epoch_is_adopted_wherever_it_is_seen(frontend: RunningFrontend) -> None:
    (key,), heard = add(frontend)
    frontend.wait_until(lambda: len(heard.outputs) == FIRST_CUT, "the outputs do not arrive")
    frontend.scheduler.send(StepOutput(0, 8, (output(key, FIRST_CUT, 60),), ()))
    frontend.scheduler.send(StepOutput(0, 7, (output(key, FIRST_CUT + 1, 61),), ()))
    frontend.wait_until(lambda: frontend.services.engine.num_dropped == 1, "the older one is not dropped")
    assert heard.outputs[-1].token_ids == (60,)


def test_a_query_fails_at_once_when_its_scheduler_is_lost_and_while_none_is_there(frontend: RunningFrontend) -> None:
    frontend.scheduler.answers_queries = False
    asking = asyncio.run_coroutine_threadsafe(frontend.services.engine.debug_state(timeout_s=1e6), frontend.loop)
    frontend.scheduler.wait_for(DebugStateQuery)
    frontend.lose_scheduler()
    with pytest.raises(ApiError, match="does not answer"):
        asking.result(DEADLINE_S)
    for path in ("/debug/state", "/debug/preemptions"):
        answer = frontend.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
    with FakeScheduler(epoch=2) as fake:
        frontend.meet(fake)
        assert frontend.client.get("/debug/state").status_code == 200


def test_a_scheduler_that_is_there_and_not_ready_is_sent_nothing(frontend: RunningFrontend) -> None:
    engine = frontend.services.engine
    (leaving, staying), heard = add(frontend, 2)
    frontend.wait_until(lambda: len(heard.outputs) == 2 * FIRST_CUT, "the outputs do not arrive")
    frontend.lose_scheduler()
    with FakeScheduler(whole, epoch=2, ready=False) as fake:
        frontend.run(lambda: engine.connect(fake.address))
        (new,), _ = add(frontend)
        frontend.run(lambda: engine.abort([leaving]))
        assert frontend.client.get("/debug/state").status_code == 503
        fake.become_ready()
        fake.wait_for(AddRequest, count=2)
        frontend.wait_until(lambda: engine.num_sequences == 0, "the sequences do not end")
        assert fake.received == fake.requests()
        assert [request.key for request in fake.requests()] == [staying, new]


def test_every_sequence_gets_an_end_when_the_server_gives_up_waiting(frontend: RunningFrontend) -> None:
    streamed = Reader(frontend, stream=True, n=2)
    streamed.wait_for_chunks(2 * FIRST_CUT)
    frontend.lose_scheduler()
    frontend.run(frontend.services.engine.end_all)
    stream = streamed.stream()
    assert (stream.done, stream.finish_reasons(0), stream.finish_reasons(1)) == (True, ["abort"], ["abort"])
    assert len(stream.text_of(0)) == FIRST_CUT
    assert frontend.services.engine.num_sequences == 0
