"""Phases of an overload: what a server can do, what it does when ten times that is asked of it, and while it is crowded.

Load is open: requests leave when they are due, whatever has become of those before them, and latency counts from when
they were due; how late this process is itself is said beside it. Must not know how the server is started, nor who reads the
numbers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from scripts.lib.http_load import BROKEN, Answer, Client, post
from scripts.lib.report import milliseconds, percentiles
from scripts.lib.workloads import TokenSource

#: Requests leave together that are due within this time: no event loop can wait for less.
_TICK_S = 0.005
_LOOK_S = 0.01
#: When nothing has been answered for so long, whoever is to be refused has been told.
_PATIENCE_S = 3.0

#: Makes the next request.
Source = Callable[[], bytes]


@dataclass(frozen=True)
class Shape:
    """What requests are. Outputs are from half to one and a half times as long as said: alike they would all end in the same step."""

    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int

    def source(self, seed: int, *, stream: bool = False) -> Source:
        """Requests of random prompts, all different."""
        tokens, draw = TokenSource(seed, self.vocab_size), random.Random(seed)
        fields = {"ignore_eos": True, "temperature": 0, "stream": stream}

        def make() -> bytes:
            max_tokens = draw.randint((self.num_output_tokens + 1) // 2, self.num_output_tokens * 3 // 2)
            return post("/v1/completions", fields | {"prompt": tokens.take(self.num_prompt_tokens), "max_tokens": max_tokens})

        return make


@contextmanager
def lag() -> Iterator[list[float]]:
    """How late this process is with what it wants to do, in seconds, looked at a hundred times a second while the block runs."""
    lags_s: list[float] = []

    async def look() -> None:
        while True:
            due = time.perf_counter() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            lags_s.append(max(0.0, time.perf_counter() - due))

    task = asyncio.create_task(look())
    try:
        yield lags_s
    finally:
        task.cancel()


async def closed_loop(client: Client, source: Source, num_clients: int, seconds: float) -> list[Answer]:
    """So many clients, each asking again when it has been answered; their answers in a time that begins when all have had one."""
    answers: list[Answer] = []
    num_warm = 0
    begin = end = float("inf")

    async def one_client() -> None:
        nonlocal num_warm, begin, end
        await client.ask(source())
        num_warm += 1
        if num_warm == num_clients:
            begin = time.perf_counter()
            end = begin + seconds
        while time.perf_counter() < end:
            answer = await client.ask(source())
            if begin <= answer.ended_at < end:
                answers.append(answer)

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return answers


async def open_loop(client: Client, source: Source, rate: float, seconds: float) -> list[Answer]:
    """Requests at a rate, for a time; what has not been answered by then is given up and not among the answers."""
    answers: list[Answer] = []
    tasks: set[asyncio.Task[None]] = set()

    async def one(due: float) -> None:
        answers.append(await client.ask(source(), due))

    due = begin = time.perf_counter()
    while due < begin + seconds:
        while due <= time.perf_counter():
            task = asyncio.create_task(one(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += 1 / rate
        await asyncio.sleep(_TICK_S)
    for task in tasks:
        task.cancel()
    client.drop_all()
    return answers


async def overload(client: Client, source: Source, rate: float, seconds: float, settle_s: float) -> tuple[float, Mapping[str, object]]:
    """Offers `rate` requests a second. Goodput, which comes first, is what was completed a second once the first could have been."""
    begin = time.perf_counter() + settle_s
    with lag() as lags_s:
        answers = await open_loop(client, source, rate, settle_s + seconds)
    refused = [answer for answer in answers if answer.status == 429]
    goodput_s = sum(answer.status == 200 and begin <= answer.ended_at < begin + seconds for answer in answers) / seconds
    return goodput_s, {
        "offered_s": rate,
        "goodput_s": goodput_s,
        "statuses": statuses(answers),
        "refused_ms": milliseconds([answer.latency_s for answer in refused]),
        "retry_after_s": percentiles([float(answer.retry_after) for answer in refused if answer.retry_after]),
        "refused_without_retry_after": sum(not answer.retry_after for answer in refused),
        "client_lag_ms": milliseconds(lags_s),
    }


class Crowd:
    """Streams that stay open. Used with `with`."""

    def __init__(self, client: Client, source: Source, count: int) -> None:
        self._client = client
        self.num_started = 0  #: that have a status
        self._tasks = [asyncio.create_task(client.ask(source(), on_start=self._start)) for _ in range(count)]

    def _start(self) -> None:
        self.num_started += 1

    @property
    def num_open(self) -> int:
        return self.num_started - sum(task.done() for task in self._tasks)

    @property
    def num_broken(self) -> int:
        """Streams that ended without their end, or were refused."""
        return sum(task.done() and (task.result().status != 200 or b"data: [DONE]" not in task.result().tail) for task in self._tasks)

    async def wait_open(self, timeout_s: float) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.num_started < len(self._tasks):
                await asyncio.sleep(_TICK_S)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._client.drop_all()


async def burst(client: Client, source: Source, count: int) -> Mapping[str, object]:
    """So many requests in one turn of the event loop, each on a connection that stands already. Those for which there was room wait, and are given up."""
    await client.connect(count)
    requests = [source() for _ in range(count)]
    due = time.perf_counter()
    tasks = waiting = {asyncio.create_task(client.ask(request, due)) for request in requests}
    answered = tasks
    while waiting and answered:
        answered, waiting = await asyncio.wait(waiting, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    client.drop_all()
    answers = [task.result() for task in tasks - waiting]
    refused = [answer for answer in answers if answer.status == 429]
    return {"statuses": statuses(answers) | {"waiting": len(waiting)}, "refused_ms": milliseconds([answer.latency_s for answer in refused])}


async def huge_body(client: Client, num_bytes: int) -> Mapping[str, object]:
    """One request with a body of that size: a text that is too long, whatever the limit on bodies says of it."""
    frame = len(b'{"prompt":""}')
    answer = await client.ask(post("/v1/completions", b'{"prompt":"' + b"a word or " * ((num_bytes - frame) // 10) + b'"}'))
    return {"status": answer.status, "seconds": answer.latency_s}


def statuses(answers: Sequence[Answer]) -> dict[str, int]:
    """How often each came, `broken` for none."""
    found = Counter("broken" if answer.status == BROKEN else str(answer.status) for answer in answers)
    return dict(sorted(found.items()))
