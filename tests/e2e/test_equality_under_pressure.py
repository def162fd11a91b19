"""What clients of a server with too little memory get is, bit for bit, what they get when they are alone.

Many clients at once, streaming or not, with stop strings, several choices, seeds, penalties, biases and log
probabilities. Swapped out, dropped and brought back between two tokens, no answer may show it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.server import Server, running_server
from tests.helpers.tiny_model import tiny_checkpoint

#: In blocks of 16 tokens: what three or four of the choices below would like to hold.
NUM_BLOCKS = 14
CLIENTS = 24
STEMS = ("The mill stands where the river bends, and every page", "What is the capital of France? The capital", "One, two, three, four, five")

pytestmark = pytest.mark.timeout(300)


@dataclass
class Choice:
    """All that a client sees of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: dict[str, Any]) -> None:
        self.text += part["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            getattr(self, name).extend((part["logprobs"] or {}).get(name) or ())
        self.finish_reason = part["finish_reason"] or self.finish_reason
        self.stop_reason = part.get("stop_reason") or self.stop_reason


Answer = dict[int, Choice]


def body(number: int) -> dict[str, Any]:
    """What client `number` asks for."""
    draw = random.Random(number)
    stem = draw.choice(STEMS)
    return {
        "prompt": stem[: draw.choice((len(stem), len(stem), 20))] + draw.choice(("", " and then", f" {number}")),
        "max_tokens": draw.choice((12, 40, 70)),
        "temperature": draw.choice((0, 0.8, 1.2)),
        "seed": number,
        "n": draw.choice((1, 1, 2, 3)),
        "stop": draw.choice((None, ["qu", " the"], ["s", "1"])),
        "logprobs": draw.choice((None, 0, 2)),
        "presence_penalty": draw.choice((0, 0.6)),
        "repetition_penalty": draw.choice((1.0, 1.2)),
        "logit_bias": draw.choice(({}, {"70": 4.0, "80": -4.0})),
    }


async def ask(client: httpx.AsyncClient, number: int, *, stream: bool) -> Answer:
    answer: Answer = {}
    if not stream:
        response = await client.post("/v1/completions", json=body(number))
        assert response.status_code == 200, response.text
        for part in response.json()["choices"]:
            answer.setdefault(part["index"], Choice()).add(part)
        return answer
    async with client.stream("POST", "/v1/completions", json=body(number) | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for part in json.loads(line.removeprefix("data: "))["choices"]:
                    answer.setdefault(part["index"], Choice()).add(part)
    return answer


async def ask_all(server: Server) -> tuple[list[Answer], list[Answer]]:
    """Together, every second client streaming; then one after another, the others streaming."""
    async with httpx.AsyncClient(base_url=server.url, timeout=200, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        together = await asyncio.gather(*(ask(client, number, stream=number % 2 == 0) for number in range(CLIENTS)))
        alone = [await ask(client, number, stream=number % 2 == 1) for number in range(CLIENTS)]
    return together, alone


def preemptions(server: Server, kind: str) -> float:
    families = parse_text(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "pagemill_preemptions_total"]
    return sum(sample.value for sample in samples if sample.labels["kind"] == kind)


@pytest.fixture(scope="module", params=[("recompute", "float32", "1"), ("swap", "bfloat16", "2")], ids=lambda param: "-".join(param))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    """A server, and the way in which it preempts."""
    preemption, dtype, plans = request.param
    flags = ["--dtype", dtype, "--preemption", preemption, "--max-plans-in-flight", plans, "--num-blocks", str(NUM_BLOCKS), "--block-size", "16"]
    with running_server(*flags, "--deterministic", "--max-num-batched-tokens", "32", "--check-invariants", model=tiny_checkpoint("vector-heads")) as server:
        yield server, preemption


def test_clients_get_when_memory_runs_out_what_they_get_alone(served: tuple[Server, str]) -> None:
    server, preemption = served
    together, alone = asyncio.run(ask_all(server))
    for number, (got, expected) in enumerate(zip(together, alone, strict=True)):
        assert got == expected, body(number)
    choices = [choice for answer in alone for choice in answer.values()]
    assert {"stop", "length"} <= {choice.finish_reason for choice in choices}
    assert preemptions(server, preemption) > 0, "the pool was not small enough to prove anything"
    state = httpx.get(f"{server.url}/debug/state").json()
    assert state["blocks"]["used"] == state["swap_slots"]["held"] == 0
    assert state["invariants"]["ok"]
