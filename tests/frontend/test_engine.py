"""Requests outlive the scheduler they were given to: replies go on at the very token, and each thing is said once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from frontend.errors import ApiError
from pagemill import injection
from pagemill.messages import (
    NONE,
    AbortRequest,
    AddRequest,
    DebugStateQuery,
    FinishRequest,
    Limits,
    Rejection,
    SamplingParams,
    SchedulerReady,
    SequenceKey,
    SequenceOutput,
    StepOutput,
    pack_ids,
    unpack_ids,
)
from tests.helpers.event_stream import Stream, parse
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler, Script, Step, logprobs_of
from tests.helpers.frontend_server import RunningFrontend, running_frontend

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
FIRST_CUT, SECOND_CUT, NUM_TOKENS = 5, 9, 14


class Reader(threading.Thread):
    """Reads a streamed or a buffered reply in a thread of its own."""

    def __init__(self, frontend: RunningFrontend, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = f"{frontend.url}{CHAT}"
        self._body = {"messages": HELLO, **body}
        self._arrived = threading.Condition()
        self.status = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as response:
            for piece in response.iter_text():
                with self._arrived:
                    self.text += piece
                    self._arrived.notify_all()
            self.status = response.status_code

    def wait_for_chunks(self, count: int) -> None:
        """Of a stream: until so many chunks with text have arrived."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.text.count('"content":"') - self.text.count('"content":""') >= count, DEADLINE_S), self.text

    def stream(self) -> Stream:
        self.join(DEADLINE_S)
        assert self.status == 200, self.text
        return parse(self.text)

    def reply(self) -> httpx.Response:
        self.join(DEADLINE_S)
        return httpx.Response(self.status, text=self.text)


class Heard:
    """A sink of its own, for sequences that no client asked for."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.num_failures = 0

    def output(self, output: SequenceOutput) -> None:
        self.outputs.append(output)

    def rejected(self, rejection: Rejection) -> None:
        raise AssertionError(rejection)

    def failed(self) -> None:
        self.num_failures += 1


def add(frontend: RunningFrontend, count: int = 1) -> tuple[list[SequenceKey], Heard]:
    """A request with so many choices, handed to the engine itself. Raises what the engine raises."""
    engine, heard = frontend.services.engine, Heard()
    raised: list[ApiError] = []
    number = engine.new_request()
    keys = [engine.key(number, choice) for choice in range(count)]

    def hand_over() -> None:
        try:
            engine.add([AddRequest(key, "r", pack_ids([1, 2]), b"", SamplingParams(), Limits(NUM_TOKENS), 0, 0, 0.0, b"", b"") for key in keys], heard)
        except ApiError as error:
            raised.append(error)

    frontend.run(hand_over)
    if raised:
        raise raised[0]
    return keys, heard


def output(key: SequenceKey, first_index: int, *ids: int) -> SequenceOutput:
    return SequenceOutput(key, first_index, ids, (), None, NONE, 0, 0, 0.0, "")


def whole(request: AddRequest) -> list[Step]:
    """Fourteen tokens, each choice has its own."""
    logprobs = (logprobs_of(-0.5, {3: -0.5, 4: -1.5}),) if request.sampling.num_logprobs > 0 else ()
    ids = [40 + 20 * request.key.choice + index for index in range(NUM_TOKENS)]
    return [Step((token_id,), "length" if token_id == ids[-1] else None, logprobs=logprobs, cached=2) for token_id in ids]


def up_to(num_tokens: int) -> Script:
    """As many tokens, then silence."""
    return lambda request: [*whole(request)[:num_tokens], *[Step()] * 1_000_000]


@pytest.fixture
def frontend() -> Iterator[RunningFrontend]:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT))) as running:
        yield running


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    injection.disarm()


@contextmanager
def replaced(frontend: RunningFrontend, script: Script = whole, epoch: int = 2) -> Iterator[FakeScheduler]:
    """Another scheduler in place of the one that is there."""
    frontend.lose_scheduler()
    with FakeScheduler(script, epoch=epoch) as fake:
        frontend.meet(fake)
        yield fake


def received(request: AddRequest) -> list[int]:
    return list(unpack_ids(request.output_ids))


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


def test_a_request_that_comes_while_no_scheduler_is_there_waits_behind_the_others(frontend: RunningFrontend) -> None:
    before = Reader(frontend, stream=True)
    before.wait_for_chunks(FIRST_CUT)
    frontend.lose_scheduler()
    response = frontend.client.get("/readyz")
    assert (response.status_code, response.json()) == (503, {"status": "restarting", "detail": "The scheduler is restarting."})
    assert frontend.client.get("/livez").status_code == 200
    assert frontend.client.get("/v1/models").status_code == 200
    during = Reader(frontend)
    frontend.wait_until(lambda: frontend.services.engine.num_sequences == 2, "the request is not kept")
    with FakeScheduler(whole, epoch=2) as fake:
        frontend.meet(fake)
        assert before.stream().finish_reasons() == ["length"]
        assert during.reply().json()["usage"]["completion_tokens"] == NUM_TOKENS
        assert [(request.resubmitted, len(received(request))) for request in fake.requests()] == [(True, FIRST_CUT), (False, 0)]


def test_no_more_sequences_are_kept_than_may_wait() -> None:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT)), max_num_queued=3) as frontend:
        add(frontend, 4)
        frontend.scheduler.wait_for(AddRequest, count=4)  # these were taken once, and do not count
        frontend.lose_scheduler()
        frontend.services.engine.room.retry_after_s = lambda: 7
        with pytest.raises(ApiError, match="Too many requests are waiting") as refusal:
            add(frontend, 4)
        assert (refusal.value.status, refusal.value.headers) == (429, {"Retry-After": "7"})
        add(frontend, 2)
        add(frontend, 1)
        with pytest.raises(ApiError):
            add(frontend, 1)
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            assert [request.resubmitted for request in fake.wait_for(AddRequest, count=7)] == [True] * 4 + [False] * 3
            fake.wait_idle()
            add(frontend, 4)  # the scheduler has its own limit
            fake.wait_for(AddRequest, count=11)


def test_without_a_scheduler_prompt_tokens_are_bounded() -> None:
    with running_frontend(FakeScheduler(whole), max_queued_tokens=5) as frontend:
        add(frontend, 3)
        frontend.scheduler.wait_for(AddRequest, count=3)  # the scheduler has its own limit
        frontend.lose_scheduler()
        add(frontend, 2)
        with pytest.raises(ApiError, match="Too many requests are waiting"):
            add(frontend, 1)


def test_who_waits_for_a_scheduler_does_not_wait_for_longer_than_it_said() -> None:
    with running_frontend(FakeScheduler(up_to(FIRST_CUT)), max_queue_time_s=1) as frontend:
        begun = Reader(frontend, stream=True)
        begun.wait_for_chunks(FIRST_CUT)
        frontend.lose_scheduler()
        refused = Reader(frontend, n=2).reply()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_timeout")
        assert refused.json()["error"]["message"] == "The request waited longer than the limit of 1 s."
        late = Reader(frontend)
        frontend.wait_until(lambda: frontend.services.engine.num_sequences == 2, "it is not taken")
        with FakeScheduler(whole, epoch=2) as fake:
            frontend.meet(fake)
            assert begun.stream().finish_reasons() == ["length"], "what was begun waits as long as it takes"
            assert late.reply().status_code == 200
            again, new = fake.requests()
    assert (again.resubmitted, again.limits.max_queue_s) == (True, 1.0)
    assert 0 < new.limits.max_queue_s < 1.0, "what it has waited for here is over"
    assert frontend.services.engine.num_dropped == 0


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


# --- faults at the hand-overs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["request", "submit", "submitted", "output", "finish"])
def test_a_fault_on_the_way_fails_one_request_and_leaves_nothing_behind(point: str, frontend: RunningFrontend) -> None:
    injection.arm([f"frontend.{point}=raise"], incarnation=0)
    stop = frontend.post("/detokenize", tokens=[42]).json()["prompt"] if point == "finish" else None
    response = frontend.post(CHAT, messages=HELLO, n=2, stop=stop)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "frontend." not in response.text
    frontend.wait_until(lambda: frontend.services.engine.num_sequences == 0, "a sequence is left")
    frontend.scheduler.wait_idle()
    frontend.scheduler.script = whole
    assert frontend.post(CHAT, messages=HELLO, n=2, stop=stop).status_code == 200
    assert frontend.services.overload.num_waiting == 0


def test_a_fault_in_an_abort_does_not_keep_it_from_the_scheduler(frontend: RunningFrontend) -> None:
    injection.arm(["frontend.abort=raise"], incarnation=0)
    with httpx.stream("POST", f"{frontend.url}{CHAT}", json={"messages": HELLO, "stream": True, "n": 2}, timeout=DEADLINE_S) as leaving:
        next(leaving.iter_text())
    frontend.scheduler.wait_for(AbortRequest, count=2)
    frontend.scheduler.wait_idle()


@pytest.mark.parametrize("choice", [0, 1])
def test_a_fault_in_a_resubmission_fails_its_request_and_no_other(choice: int, frontend: RunningFrontend) -> None:
    failing = Reader(frontend, n=2)
    frontend.scheduler.wait_for(AddRequest, count=2)
    staying = Reader(frontend, stream=True)
    staying.wait_for_chunks(FIRST_CUT)
    injection.arm([f"frontend.resubmit=raise@{choice + 1}"], incarnation=0)
    with replaced(frontend) as fake:
        assert failing.reply().status_code == 500
        assert staying.stream().finish_reasons() == ["length"]
        fake.wait_for(AddRequest, count=1 + choice)
        fake.wait_idle()
        assert len(fake.requests()) == 1 + choice  # what has failed already is not sent
