"""Replies that are interrupted: clients that read on, a scheduler that falls silent in the middle, and the one that comes after it.

A request has fourteen tokens. `up_to` gives the first of them and then nothing more; `replaced` puts another scheduler there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from frontend.errors import ApiError
from pagemill.ids import pack_ids, unpack_ids
from pagemill.messages.frontend import AddRequest, Rejection, SequenceOutput
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from tests.helpers.event_stream import Stream, parse
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler, Script, Step, logprobs_of
from tests.helpers.frontend_server import RunningFrontend

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


def whole(request: AddRequest) -> list[Step]:
    """Fourteen tokens, each choice has its own."""
    logprobs = (logprobs_of(-0.5, {3: -0.5, 4: -1.5}),) if request.sampling.num_logprobs > 0 else ()
    ids = [40 + 20 * request.key.choice + index for index in range(NUM_TOKENS)]
    return [Step((token_id,), "length" if token_id == ids[-1] else None, logprobs=logprobs, cached=2) for token_id in ids]


def up_to(num_tokens: int) -> Script:
    """As many tokens, then silence."""
    return lambda request: [*whole(request)[:num_tokens], *[Step()] * 1_000_000]


@contextmanager
def replaced(frontend: RunningFrontend, script: Script = whole, epoch: int = 2) -> Iterator[FakeScheduler]:
    """Another scheduler in place of the one that is there."""
    frontend.lose_scheduler()
    with FakeScheduler(script, epoch=epoch) as fake:
        frontend.meet(fake)
        yield fake


def received(request: AddRequest) -> list[int]:
    """The output that the frontend says it has."""
    return list(unpack_ids(request.output_ids))
