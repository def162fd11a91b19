"""Clients that ask a server the same again and again, and know what it has to say.

First each request is asked undisturbed; from then on every answer must be equal to the bit, whatever happens to the
server. A connection may break only where somebody says that its process was killed (`excuse`), and a request may be turned
away only with 503 and Retry-After. Must not know what is done to the server, nor how.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx

from tests.helpers.answers import Answer, ConnectionBroken, RequestFailed, ask

STEMS = ("The mill stands where the river bends, and every page", "What is the capital of France? The capital", "One, two, three, four, five")
#: Tokens that no prompt holds and nobody may draw, so that a fault can be tied to whoever sends one.
RESERVED_TOKEN_IDS = (5, 6, 7)
#: So many requests are asked at once to learn their answers: few enough for any pool.
_LEARNERS = 2
#: A request that hears nothing for so long counts as lost. Longer than any repair.
HUNG_S = 120.0
#: So many have made their point.
_MAX_FAILURES = 20
#: Before a client that was turned away comes again.
_RETRY_S = 0.2


@dataclass(frozen=True)
class Asked:
    """One request. Odd numbers wait for the whole answer."""

    number: int
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return self.number % 2 == 0


def make_request(number: int, max_tokens: Sequence[int]) -> Asked:
    """What client `number` asks for: a mixture of all that must outlive a fault."""
    draw = random.Random(number)
    stem = draw.choice(STEMS)
    return Asked(
        number,
        {
            "prompt": stem[: draw.choice((len(stem), len(stem), 20))] + draw.choice(("", " and then", f" {number}")),
            "max_tokens": draw.choice(max_tokens),
            "temperature": draw.choice((0, 0.8, 1.2)),
            "seed": number,
            "n": draw.choice((1, 1, 1, 2)),
            "stop": draw.choice((None, None, [" qu"])),
            "logprobs": draw.choice((None, None, 0, 2)),
            "presence_penalty": draw.choice((0, 0.6)),
            "repetition_penalty": draw.choice((1.0, 1.2)),
            "logit_bias": {str(token_id): -100 for token_id in RESERVED_TOKEN_IDS},
        },
    )


class Clients:
    """One client for each request. `run` goes on until `stop`, and then until every answer has come."""

    def __init__(self, url: str, requests: Iterable[Asked], known: Mapping[int, Answer] = MappingProxyType({})) -> None:
        self.known = dict(known)  #: by number of the request
        self.outcomes: Counter[str] = Counter()  #: completed, wrong, failed, broken, turned away
        self.failures: list[str] = []  #: what should not have happened
        self.num_parts = 0  #: events of streams and whole answers received, of all clients
        self.num_tokens = 0  #: of completed answers
        self._url = url
        self._requests = list(requests)
        self._excused: set[int] = set()  #: ports of connections that may break
        self._is_stopping = False
        self._parts_of: Counter[int] = Counter()  #: of each client's request under way

    async def learn(self) -> None:
        """Asks everything once, undisturbed. Raises RequestFailed or ConnectionBroken."""
        turns = asyncio.Semaphore(_LEARNERS)

        async def learn(client: httpx.AsyncClient, asked: Asked) -> None:
            async with turns:
                self.known[asked.number] = await ask(client, asked.body, stream=asked.stream)

        async with connections(self._url) as client:
            await asyncio.gather(*(learn(client, asked) for asked in self._requests))

    async def run(self, *, once: bool = False) -> None:
        """Everybody at once; `once` each, or again and again."""
        async with connections(self._url) as client:
            await asyncio.gather(*(self._go_on(client, asked, once=once) for asked in self._requests))

    def stop(self) -> None:
        """No request begins from here on."""
        self._is_stopping = True

    def excuse(self, ports: Iterable[int]) -> None:
        """These connections, named by the clients' ports, are those of a process that is about to be killed."""
        self._excused.update(ports)

    @property
    def num_under_way(self) -> int:
        """Streams of which something has come, and not all."""
        return sum(parts > 0 for parts in self._parts_of.values())

    async def _go_on(self, client: httpx.AsyncClient, asked: Asked, *, once: bool) -> None:
        while not self._is_stopping:
            self._parts_of[asked.number] = 0
            outcome = await self._ask(client, asked)
            self.outcomes[outcome] += 1
            if len(self.failures) >= _MAX_FAILURES:
                self.stop()
            elif outcome in ("failed", "turned away"):
                await asyncio.sleep(_RETRY_S)
            elif once:
                break
        del self._parts_of[asked.number]

    async def _ask(self, client: httpx.AsyncClient, asked: Asked) -> str:
        def note_part() -> None:
            self.num_parts += 1
            self._parts_of[asked.number] += 1

        try:
            answer = await ask(client, asked.body, stream=asked.stream, on_part=note_part)
        except ConnectionBroken as broken:
            if broken.port in self._excused:
                self._excused.discard(broken.port)
                return "broken"
            self.failures.append(f"request {asked.number} was cut off although nobody touched its frontend, {broken}")
            return "failed"
        except httpx.TimeoutException:
            self.failures.append(f"request {asked.number} heard nothing for {HUNG_S:.0f} s")
            return "failed"
        except RequestFailed as refusal:
            if refusal.status == httpx.codes.SERVICE_UNAVAILABLE and refusal.retry_after:
                return "turned away"
            self.failures.append(f"request {asked.number} failed, {refusal}")
            return "failed"
        if answer == self.known[asked.number]:
            self.num_tokens += answer.num_completion_tokens
            return "completed"
        self.failures.append(f"request {asked.number} got another answer than undisturbed: {difference(self.known[asked.number], answer)}")
        return "wrong"


@asynccontextmanager
async def connections(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A connection of its own for every request, so that what becomes of one tells of one process."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=HUNG_S) as client:
        yield client


def difference(expected: Answer, got: Answer) -> str:
    """Where two answers part, in one line."""
    for index in sorted(expected.choices.keys() | got.choices.keys()):
        if index not in expected.choices or index not in got.choices:
            return f"choice {index} is {'missing' if index not in got.choices else 'one too many'}"
        one, other = expected.choices[index], got.choices[index]
        if one.text != other.text:
            same = next((at for at, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), min(len(one.text), len(other.text)))
            return f"choice {index} from character {same} on: {other.text[same : same + 40]!r} instead of {one.text[same : same + 40]!r}"
        if one != other:
            return f"choice {index}: same text, but {other} instead of {one}"[:1000]
    return f"{got.num_prompt_tokens} and {got.num_completion_tokens} tokens instead of {expected.num_prompt_tokens} and {expected.num_completion_tokens}"
