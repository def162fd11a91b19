"""Traffic as it comes: chats and completions, streamed or not, several choices, stop strings, mistakes, clients that leave.

What is drawn depends on a seed and nothing else; so does when a client leaves. Must not know how often it is asked, nor
what is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.lib.http_load import BROKEN, Answer, Client, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: A client that is going to leave does so within this time after its answer has begun, or after it asked.
_PATIENCE_S = 0.2
_WORDS = ("mill", "river", "page", "wheel", "grain", "stone", "water", "paper", "ink", "hill")


@dataclass(frozen=True)
class Ask:
    """A request, the status it must get, and what becomes of its client."""

    kind: str
    request: bytes
    status: int = 200
    leaves_after_s: float | None = None  #: seconds, from the beginning of the answer if it is streamed


class Traffic:
    """Draws requests, and counts what came of them by kind."""

    def __init__(self, seed: int, max_output_tokens: int = 32) -> None:
        self.answered: Counter[str] = Counter()
        self.refused = 0  #: with 429, which is nobody's mistake
        self.wrong: list[str] = []  #: answers that are not what they should be
        self._draw = random.Random(seed)
        self._max_output_tokens = max_output_tokens
        self._makers = {self._completion: 4, self._chat: 4, self._choices: 2, self._stopped: 2, self._mistake: 2, self._leaver: 2}

    def next(self) -> Ask:
        maker = self._draw.choices(list(self._makers), list(self._makers.values()))[0]
        return maker()

    async def perform(self, client: Client, ask: Ask, due: float | None = None) -> Answer:
        """Asks, and leaves if that is what this client does. What is wrong is kept in `wrong`."""
        if ask.leaves_after_s is None:
            answer = await client.ask(ask.request, due)
        else:
            answer = await client.ask_and_leave(ask.request, ask.leaves_after_s)
        self._judge(ask, answer)
        return answer

    @property
    def num_answered(self) -> int:
        return sum(self.answered.values())

    def _judge(self, ask: Ask, answer: Answer) -> None:
        self.answered[ask.kind] += 1
        if answer.status == 429:
            self.refused += 1
        elif ask.leaves_after_s is not None and answer.status in (BROKEN, 200):
            pass
        elif answer.status != ask.status:
            self.wrong.append(f"{ask.kind}: {answer.status} instead of {ask.status}: {answer.tail[-200:]!r}")

    # --- kinds ---------------------------------------------------------------------------------------------

    def _completion(self) -> Ask:
        return Ask("completion", post(COMPLETIONS, self._fields() | {"prompt": self._text()}))

    def _chat(self) -> Ask:
        return Ask("chat", post(CHAT, self._fields() | {"messages": self._messages()}))

    def _choices(self) -> Ask:
        more = {"n": self._draw.randint(2, 4), "temperature": 1.0, "logprobs": True, "top_logprobs": 2}
        return Ask("choices", post(CHAT, self._fields() | {"messages": self._messages()} | more))

    def _stopped(self) -> Ask:
        return Ask("stop strings", post(COMPLETIONS, self._fields() | {"prompt": self._text(), "stop": ["e", " the"]}))

    def _mistake(self) -> Ask:
        wrong: tuple[tuple[int, Mapping[str, object] | bytes], ...] = (
            (400, b'{"prompt":'),
            (400, {"prompt": "x", "temperature": 9}),
            (400, {"prompt": [1] * 100_000}),
            (404, {"prompt": "x", "model": "nobody"}),
        )
        status, body = self._draw.choice(wrong)
        return Ask("mistake", post(COMPLETIONS, body), status)

    def _leaver(self) -> Ask:
        body = self._fields() | {"prompt": self._text(), "max_tokens": 8 * self._max_output_tokens, "ignore_eos": True}
        return Ask("leaver", post(COMPLETIONS, body), leaves_after_s=self._draw.uniform(0, _PATIENCE_S))

    def _fields(self) -> dict[str, object]:
        stream = self._draw.random() < 0.5
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {"max_tokens": self._draw.randint(1, self._max_output_tokens), "stream": stream, "temperature": self._draw.choice((0, 0.8)), **usage}

    def _text(self) -> str:
        return " ".join(self._draw.choices(_WORDS, k=self._draw.randint(1, 40)))

    def _messages(self) -> list[dict[str, str]]:
        roles = ("user", "assistant") * self._draw.randint(0, 2)
        return [{"role": role, "content": self._text()} for role in (*roles, "user")]


async def clients_in_turn(client: Client, traffic: Traffic, num_clients: int, seconds: float) -> float:
    """Answers a second, with so many clients that each ask again at once."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    before = traffic.num_answered

    async def one_client() -> None:
        while loop.time() < end:
            await traffic.perform(client, traffic.next())

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return (traffic.num_answered - before) / (loop.time() - end + seconds)
