"""The clients of `scripts/chaos`: no wrong answer may be missed, and no broken connection be blamed on the innocent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from scripts.lib.chaos_clients import RESERVED_TOKEN_IDS, Asked, Clients, make_request
from tests.helpers.chaos import response
from tests.helpers.tiny_model import make_tokenizer

STREAMED, WHOLE = Asked(0, {"prompt": "Once"}), Asked(1, {"prompt": "Once"})
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def choice(text: str, finish_reason: str | None = "length") -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def whole(text: str, usage: dict[str, int] = USAGE) -> bytes:
    return response("200 OK", json.dumps({"choices": [choice(text)], "usage": usage}))


def events(*bodies: dict[str, Any], done: bool = True) -> bytes:
    return response("200 OK", "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + ("data: [DONE]\n\n" if done else ""))


def stream(*texts: str) -> bytes:
    return events(*({"choices": [choice(text, None)]} for text in texts), {"choices": [choice("")]}, {"choices": [], "usage": USAGE})


CUT = stream("two ", "words")[:-20]


def good(asked: Asked) -> bytes:
    return stream("two ", "words") if asked.stream else whole("two words")


@asynccontextmanager
async def scripted(replies: Sequence[bytes], on_ask: Callable[[int, int], None]) -> AsyncIterator[str]:
    """A server that says these one after another, and the last again and again. `on_ask` hears the number of the request and its port."""
    num_asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(length)
            on_ask(num_asked, writer.get_extra_info("peername")[1])
            writer.write(replies[min(num_asked, len(replies) - 1)])
            num_asked += 1

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.chaos_clients._RETRY_S", 0.0)


def ask_twice(asked: Asked, replies: Sequence[bytes], *, killed: Sequence[int] = ()) -> Clients:
    """Learns from the first reply and asks again until there is an answer. With the requests in `killed` goes the frontend that has them."""

    async def run() -> Clients:
        def on_ask(number: int, port: int) -> None:
            if number in killed:
                clients.excuse({port})

        async with scripted(replies, on_ask) as url:
            clients = Clients(url, [asked])
            await clients.learn()
            await clients.run(once=True)
            return clients

    return asyncio.run(run())


@pytest.mark.parametrize("asked", [STREAMED, WHOLE])
def test_an_answer_that_is_the_same_is_complete(asked: Asked) -> None:
    clients = ask_twice(asked, [good(asked)])
    assert (clients.failures, clients.outcomes, clients.num_tokens) == ([], {"completed": 1}, 2)


def test_a_stream_may_come_in_other_pieces() -> None:
    assert ask_twice(STREAMED, [good(STREAMED), stream("two words")]).failures == []


@pytest.mark.parametrize(
    ("asked", "reply", "says"),
    [
        (STREAMED, stream("two ", "wards"), "request 0 got another answer than undisturbed: choice 0 from character 5 on: 'ards' instead of 'ords'"),
        (STREAMED, stream("two ", "words", "words"), "choice 0 from character 9 on: 'words' instead of ''"),
        (STREAMED, events({"choices": []}), "choice 0 is missing"),
        (WHOLE, whole("two"), "choice 0 from character 3 on: '' instead of ' words'"),
        (WHOLE, whole("two words", {"prompt_tokens": 1, "completion_tokens": 3}), "1 and 3 tokens instead of 1 and 2"),
        (WHOLE, response("200 OK", json.dumps({"choices": [choice("two words", "stop")], "usage": USAGE})), "choice 0: same text, but"),
        (WHOLE, response("200 OK", json.dumps({"choices": [choice("two words"), {**choice(""), "index": 1}]})), "choice 1 is one too many"),
    ],
)
def test_an_answer_that_differs_is_wrong_and_says_where(asked: Asked, reply: bytes, says: str) -> None:
    clients = ask_twice(asked, [good(asked), reply])
    assert clients.outcomes == {"wrong": 1}
    assert says in clients.failures[0]


@pytest.mark.parametrize(
    ("asked", "reply", "says"),
    [
        (STREAMED, events({"error": {"message": "No.", "code": "request_failed"}}), "request_failed"),
        (STREAMED, events({"choices": [choice("two words")]}, done=False), "without [DONE]"),
        (STREAMED, CUT, "was cut off although nobody touched its frontend"),
        (WHOLE, response("500 Internal Server Error", '{"error":{"message":"Oh."}}'), "HTTP 500"),
        (WHOLE, response("503 Service Unavailable", '{"error":{"message":"Later."}}'), "HTTP 503"),
        (WHOLE, response("503 Service Unavailable", "no JSON"), "no JSON"),
        (WHOLE, b"", "was cut off although nobody touched its frontend"),
    ],
)
def test_a_request_that_gets_no_answer_is_a_failure(asked: Asked, reply: bytes, says: str) -> None:
    clients = ask_twice(asked, [good(asked), reply, good(asked)])
    assert clients.outcomes == {"failed": 1, "completed": 1}
    assert says in clients.failures[0]


@pytest.mark.parametrize("reply", [CUT, b""])
def test_a_connection_may_break_if_its_own_frontend_was_killed(reply: bytes) -> None:
    replies = [good(STREAMED), reply, good(STREAMED)]
    excused, not_excused = (ask_twice(STREAMED, replies, killed=killed) for killed in ([1], [0]))
    assert (excused.failures, excused.outcomes) == ([], {"broken": 1})
    assert not_excused.outcomes == {"failed": 1, "completed": 1}


def test_who_is_turned_away_comes_again() -> None:
    clients = ask_twice(WHOLE, [good(WHOLE), response("503 Service Unavailable", '{"error":{"message":"Later."}}', "Retry-After: 1"), good(WHOLE)])
    assert clients.outcomes == {"turned away": 1, "completed": 1}
    assert clients.failures == []


def test_clients_give_up_when_nothing_works() -> None:
    """Each of them would go on until it has an answer."""
    clients = ask_twice(WHOLE, [good(WHOLE), response("500 Internal Server Error", "{}")])
    assert clients.outcomes == {"failed": 20}


def test_requests_are_the_same_every_time_and_keep_clear_of_what_belongs_to_faults() -> None:
    requests = [make_request(number, (20, 40)) for number in range(64)]
    assert requests == [make_request(number, (20, 40)) for number in range(64)]
    assert {asked.body["max_tokens"] for asked in requests} == {20, 40}
    assert all(asked.body["logit_bias"] == {str(token_id): -100 for token_id in RESERVED_TOKEN_IDS} for asked in requests)
    tokenizer = make_tokenizer()
    assert all(set(RESERVED_TOKEN_IDS).isdisjoint(tokenizer.encode(asked.body["prompt"]).ids) for asked in requests)
