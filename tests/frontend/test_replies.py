"""Streams and buffered replies when things go wrong: clients leave, do not read, wait; sequences fail, repeat, end early."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from frontend import replies
from frontend.choice import Delta, TokenEntry
from frontend.endpoints.chat_completions import ChatFormat
from frontend.endpoints.completions import CompletionFormat
from frontend.generation import TOKENS_A_TURN
from frontend.logprobs import chat_logprobs
from frontend.openai_types import ChatBody, ChatLogprobs, ChatMessage
from frontend.replies import ReplyFormat
from frontend.token_bytes import TokenBytes
from frontend.validation import chat_request
from frontend.whole_reply import Outcome
from pagemill.messages.frontend import AbortRequest, AddRequest, FinishRequest
from tests.helpers.event_stream import parse, parse_response
from tests.helpers.fake_scheduler import DEADLINE_S, Refuse, Step, counting, logprobs_of
from tests.helpers.frontend_server import RunningFrontend
from tests.helpers.raw_http import post_raw, read_to_end

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = [Step((40 + index % 20,)) for index in range(100_000)]
#: Each token shows the most beside it.
LOGPROBS: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 20}),
    ("/v1/completions", {"prompt": "Hello", "logprobs": 5}),
]


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_a_stream_ends_its_sequences(n: int, frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: list(ENDLESS)
    with post_raw(frontend.port, PATH, {"messages": HELLO, "stream": True, "n": n}) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    frontend.scheduler.wait_for(AbortRequest, count=n)
    frontend.scheduler.wait_idle()


def test_a_client_that_leaves_before_its_buffered_reply_ends_its_sequences(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: [Step()] * 100_000
    with post_raw(frontend.port, PATH, {"messages": HELLO, "n": 2}):
        frontend.scheduler.wait_for(AddRequest, count=2)
    frontend.scheduler.wait_for(AbortRequest, count=2)


def test_many_clients_that_leave_leave_nothing_behind(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: list(ENDLESS[:2000])
    for _ in range(100):
        with post_raw(frontend.port, PATH, {"messages": HELLO, "stream": True}) as connection:
            connection.recv(1)
    frontend.scheduler.wait_for(AbortRequest, count=100)
    assert frontend.services.engine.num_sequences == 0


def test_a_client_that_does_not_read_is_cut_and_its_sequence_ended(frontend: RunningFrontend) -> None:
    wide = logprobs_of(-1.0, dict.fromkeys(range(20), -1.0))
    frontend.scheduler.script = lambda _: [Step(step.tokens, logprobs=(wide,)) for step in ENDLESS]
    with post_raw(frontend.port, PATH, {"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}, receive_buffer=4096) as connection:
        frontend.scheduler.wait_for(AbortRequest)
        assert b"[DONE]" not in read_to_end(connection)
    frontend.scheduler.script = counting
    assert parse_response(frontend.post(PATH, messages=HELLO, max_tokens=2, stream=True)).done


def test_a_burst_that_arrives_at_once_is_not_held_against_the_reader(frontend: RunningFrontend) -> None:
    frontend.scheduler.burst = 400
    frontend.scheduler.script = counting
    assert parse_response(frontend.post(PATH, messages=HELLO, max_tokens=450, stream=True)).usage is None
    assert frontend.post(PATH, messages=HELLO, max_tokens=450).json()["usage"]["completion_tokens"] == 450


def test_a_whole_reply_that_grows_too_large_is_refused_and_given_back_but_may_be_streamed(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.overload.MAX_REPLY_BYTES", 60_000)
    wanted: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
    response = frontend.post(PATH, **wanted)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "reply_too_large")
    frontend.scheduler.wait_for(AbortRequest)
    frontend.wait_until(lambda: frontend.services.overload.reply_bytes == 0, "the reply is still held")
    assert len(parse_response(frontend.post(PATH, stream=True, **wanted)).logprobs("content")) == 400


@pytest.mark.parametrize("certain", [{"ignore_eos": True}, {"min_tokens": 400}], ids=["nothing stops it", "least"])
@pytest.mark.parametrize(("path", "fields"), LOGPROBS, ids=["chat", "completion"])
def test_a_whole_reply_that_can_only_become_too_large_is_refused_before_it_is_computed(
    path: str, fields: dict[str, Any], certain: dict[str, Any], frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.overload.MAX_REPLY_BYTES", 6_000)
    frontend.scheduler.gate.clear()
    response = frontend.post(path, **fields, **certain, max_tokens=400)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "reply_too_large")
    frontend.scheduler.wait_for(AbortRequest)
    frontend.scheduler.gate.set()
    assert frontend.post(path, **fields, **certain, max_tokens=400, stream=True).status_code == 200


@pytest.mark.parametrize(("path", "fields"), LOGPROBS, ids=["chat", "completion"])
@pytest.mark.parametrize("also", [{}, {"ignore_eos": True, "stop": "\0"}], ids=["eos", "a stop string"])
def test_a_whole_reply_that_may_end_early_is_computed(
    path: str, fields: dict[str, Any], also: dict[str, Any], frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.overload.MAX_REPLY_BYTES", 6_000)
    frontend.scheduler.script = lambda request: [*counting(request)[:1], Step((), "stop")]
    assert frontend.post(path, **fields, **also, max_tokens=400).status_code == 200


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("make", [ChatFormat, CompletionFormat])
def test_no_token_takes_up_less_than_what_is_thought_to_be_the_least(make: Callable[..., ReplyFormat], num_top: int, frontend: RunningFrontend) -> None:
    text = frontend.services.text
    assert text is not None
    wanted, _ = chat_request(ChatBody(messages=[ChatMessage("user", "Hello")], logprobs=True, top_logprobs=num_top), text.facts)
    form = make("r", wanted, text.tokenizer.token_bytes)
    least = replies._least_bytes_a_token(form, num_top)
    assert least >= (38 * (num_top + 1) if make is ChatFormat else 15)
    for token_id in range(text.facts.vocab_size):
        entry = TokenEntry(token_id, token_id, logprobs_of(-token_id / 7, {token_id % 3 + other: -0.0 for other in range(num_top)}))
        outcome = Outcome(form.logprobs(()))
        for position in range(2):
            assert outcome.add(Delta(0, "", (entry,), position), form.logprobs((entry,))) >= least


def test_where_no_logprobs_are_shown_any_number_of_tokens_may_take_up_nothing(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.overload.MAX_REPLY_BYTES", 1_000)
    frontend.scheduler.script = lambda _: [Step((0,), "length")]  # a special token, which is not shown
    assert frontend.post(PATH, messages=HELLO, ignore_eos=True, max_tokens=400).status_code == 200


def test_a_whole_reply_is_held_until_it_is_sent(frontend: RunningFrontend) -> None:
    text, steps = frontend.services.text, ENDLESS[:TOKENS_A_TURN]
    assert text is not None
    num_bytes = 4 * len(text.tokenizer.decode([token_id for step in steps for token_id in step.tokens]))
    frontend.scheduler.script = lambda _: [*steps, *[Step()] * 100_000]
    with post_raw(frontend.port, PATH, {"messages": HELLO, "max_tokens": 100}):
        frontend.wait_until(lambda: frontend.services.overload.reply_bytes == num_bytes > 0, "what is held is not what has come")
    frontend.wait_until(lambda: frontend.services.overload.reply_bytes == 0, "the reply is still held")


def test_a_stop_string_ends_a_whole_reply_as_soon_as_it_is_there(frontend: RunningFrontend) -> None:
    """Though the reader of a reply without one sleeps until much more has come."""
    text, steps = frontend.services.text, ENDLESS[:3]
    assert text is not None
    generated = text.tokenizer.decode([token_id for step in steps for token_id in step.tokens])
    frontend.scheduler.script = lambda _: [*steps, *[Step()] * 100_000]
    reply = frontend.post(PATH, messages=HELLO, max_tokens=100, stop=generated[-1]).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    (finish,) = frontend.scheduler.wait_for(FinishRequest)
    assert finish.reason == "stop"


def test_logprobs_of_a_whole_reply_are_encoded_as_they_come_and_not_at_its_end(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> ChatLogprobs:
        sizes.append(len(entries))
        return chat_logprobs(entries, token_bytes)

    monkeypatch.setattr("frontend.endpoints.chat_completions.chat_logprobs", noting)
    reply = frontend.post(PATH, messages=HELLO, n=4, max_tokens=100, logprobs=True, top_logprobs=20).json()
    assert [len(choice["logprobs"]["content"]) for choice in reply["choices"]] == [100] * 4
    assert sum(sizes) == 400
    assert max(sizes) < 10


def test_a_slow_client_gets_everything_while_others_go_on(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda request: [*ENDLESS[: request.limits.max_tokens - 1], Step((40,), "length")]
    with post_raw(frontend.port, PATH, {"messages": HELLO, "stream": True, "max_tokens": 50}):
        for _ in range(5):
            assert parse_response(frontend.post(PATH, messages=HELLO, max_tokens=5, stream=True)).done


def test_an_idle_stream_is_kept_alive_and_a_waiting_one_begins(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(replies, "PATIENCE_S", 0.02)
    frontend.scheduler.gate.clear()
    with frontend.client.stream("POST", PATH, json={"messages": HELLO, "stream": True, "max_tokens": 2}) as response:
        received = ""
        for piece in response.iter_text():
            received += piece
            if received.count(": keep-alive\n\n") == 3:
                frontend.scheduler.gate.set()
    stream = parse(received)
    assert stream.comments >= 3
    assert (stream.done, stream.finish_reasons()) == (True, ["length"])


def test_a_sequence_that_the_server_ends_has_a_last_chunk(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: [Step((40,)), Step((), "abort")]
    stream = parse_response(frontend.post(PATH, messages=HELLO, stream=True))
    assert (stream.done, stream.finish_reasons()) == (True, ["abort"])
    assert frontend.post(PATH, messages=HELLO).json()["choices"][0]["finish_reason"] == "abort"


def test_a_failure_in_a_stream_is_an_event_and_in_a_buffered_reply_a_500(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: [Step((40,)), Step(), Step((), "error", error="/secret/path")]
    stream = parse_response(frontend.post(PATH, messages=HELLO, stream=True))
    response = frontend.post(PATH, messages=HELLO)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    for error in (stream.error, response.json()["error"]):
        assert error is not None
        assert (error["type"], error["code"]) == ("server_error", "generation_failed")
        assert "secret" not in str(error)
    assert stream.done


def test_one_failed_choice_ends_the_others(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda request: [Step((), "error")] if request.key.choice else list(ENDLESS)
    assert frontend.post(PATH, messages=HELLO, n=2).status_code == 500
    frontend.scheduler.wait_for(AbortRequest)


def test_an_unexpected_exception_in_a_stream_is_an_event_without_details(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("frontend.reply_format.ChunkWriter.usage", explode)
    before = counts_of_ends(frontend)
    stream = parse_response(frontend.post(PATH, messages=HELLO, max_tokens=2, stream=True))
    assert stream.error is not None
    assert stream.error["code"] == "internal_error"
    assert stream.done
    assert "secret" not in str(stream.chunks)
    assert (counts_of_ends(frontend) - before)[f'pagemill_requests_finished_total{{endpoint="{PATH}",reason="error",status="200"}}'] == 1


def counts_of_ends(frontend: RunningFrontend) -> Counter[str]:
    """What the metrics say of requests and choices that have ended, once all have."""
    frontend.wait_until(lambda: frontend.services.ledger.num_in_flight == 0, "a request goes on")
    families = ("pagemill_requests_finished_total", "pagemill_requests_refused_total", "pagemill_choices_finished_total")
    lines = b"".join(frontend.services.metrics.scrape()).decode().splitlines()
    return Counter({name: int(float(number)) for name, number in (line.rsplit(" ", 1) for line in lines if line.startswith(families))})


def counts_of_a_stream_that_has_begun(frontend: RunningFrontend, then: list[Step] | Refuse) -> tuple[str, dict[str, int]]:
    """The code of the error that it ends with, and what was counted for it."""
    begun = threading.Event()

    def wait_for_begin(_: AddRequest) -> list[Step] | Refuse:
        assert begun.wait(DEADLINE_S)
        return then

    frontend.scheduler.script = wait_for_begin
    before = counts_of_ends(frontend)
    with frontend.client.stream("POST", PATH, json={"messages": HELLO, "stream": True}) as response:
        assert response.status_code == 200
        begun.set()
        stream = parse("".join(response.iter_text()))
    assert stream.done
    assert stream.error is not None
    return stream.error["code"], dict(counts_of_ends(frontend) - before)


def test_a_refusal_counts_as_one_though_its_stream_has_begun(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PATIENCE_S", 0.02)
    counts = {f'pagemill_requests_refused_total{{endpoint="{PATH}",reason="queue_timeout",status="200"}}': 1}
    assert counts_of_a_stream_that_has_begun(frontend, Refuse("queue_timeout", 0, 30_000)) == ("queue_timeout", counts)


@pytest.mark.parametrize("tokens", [[], [Step((40,))]], ids=["before the first token", "after it"])
def test_a_failure_of_a_stream_is_not_its_client_s_abort(tokens: list[Step], frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PATIENCE_S", 0.02)
    a_gap = [*tokens, Step((41,), skip=1), *[Step()] * 100_000]
    counts = {
        f'pagemill_requests_finished_total{{endpoint="{PATH}",reason="error",status="200"}}': 1,
        'pagemill_choices_finished_total{reason="error"}': 1,
    }
    assert counts_of_a_stream_that_has_begun(frontend, a_gap) == ("internal_error", counts)


def test_outputs_that_come_twice_are_said_once(frontend: RunningFrontend) -> None:
    expected = frontend.post(PATH, messages=HELLO, max_tokens=5).json()["choices"][0]["message"]["content"]
    frontend.scheduler.repeat_all = True
    assert frontend.post(PATH, messages=HELLO, max_tokens=5).json()["choices"][0]["message"]["content"] == expected


def test_outputs_that_overlap_are_said_once(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: [Step((40, 41)), Step((41, 42), "length", skip=-1)]
    usage = frontend.post(PATH, messages=HELLO).json()["usage"]
    assert usage["completion_tokens"] == 3


def test_a_gap_in_the_outputs_is_a_fault_of_this_request_only(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: [Step((40,)), Step((41,), skip=1), *ENDLESS]
    assert frontend.post(PATH, messages=HELLO).status_code == 500
    frontend.scheduler.wait_for(AbortRequest)
    frontend.scheduler.script = lambda _: [Step((40,), "length")]
    assert frontend.post(PATH, messages=HELLO).status_code == 200


REFUSALS = [
    (Refuse("queue_full", 1, 0), 429, "rate_limit_exceeded"),
    (Refuse("exceeds_kv_cache", 900, 64), 400, "context_length_exceeded"),
    (Refuse("exceeds_model_length", 900, 512), 400, "context_length_exceeded"),
    (Refuse("invalid"), 400, "invalid_value"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS)
def test_what_the_scheduler_refuses_is_an_ordinary_error_streamed_or_not(
    refusal: Refuse, status: int, code: str, stream: bool, frontend: RunningFrontend
) -> None:
    frontend.scheduler.script = lambda request: refusal if request.key.choice else list(ENDLESS)
    if stream:
        frontend.scheduler.script = lambda _: refusal
    response = frontend.post(PATH, messages=HELLO, n=1 if stream else 2, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("Retry-After" in response.headers) == (status == 429)
    if refusal.required > 1:
        assert str(refusal.required) in response.json()["error"]["message"]
        assert str(refusal.available) in response.json()["error"]["message"]


def test_a_large_body_being_tokenized_does_not_hold_up_streams(frontend: RunningFrontend) -> None:
    large = "The mill stands where the river bends. " * 25_000  # nearly a megabyte: more than a second of work
    answers: list[int] = []

    def tokenize() -> None:
        answers.append(frontend.client.post("/tokenize", json={"prompt": large}, timeout=60).json()["count"])

    worker = threading.Thread(target=tokenize)
    worker.start()
    num_streams = 0
    while worker.is_alive():
        assert parse_response(frontend.post(PATH, messages=HELLO, max_tokens=3, stream=True)).done
        num_streams += 1
    worker.join()
    assert answers[0] > 200_000
    assert num_streams >= 10
