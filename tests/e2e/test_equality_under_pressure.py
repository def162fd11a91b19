"""What clients of a server with too little memory get is, bit for bit, what they get when they are alone.

Many clients at once, streaming or not, with stop strings, several choices, seeds, penalties, biases and log
probabilities. Swapped out, dropped and brought back between two tokens, no answer may show it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.answers import Answer, ask
from tests.helpers.server import Server, running_server
from tests.helpers.tiny_model import tiny_checkpoint

#: In blocks of 16 tokens: what three or four of the choices below would like to hold.
NUM_BLOCKS = 14
CLIENTS = 24
STEMS = ("The mill stands where the river bends, and every page", "What is the capital of France? The capital", "One, two, three, four, five")

pytestmark = pytest.mark.timeout(300)


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


async def ask_all(server: Server) -> tuple[list[Answer], list[Answer]]:
    """Together, every second client streaming; then one after another, the others streaming."""
    async with httpx.AsyncClient(base_url=server.url, timeout=200, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        together = await asyncio.gather(*(ask(client, body(number), stream=number % 2 == 0) for number in range(CLIENTS)))
        alone = [await ask(client, body(number), stream=number % 2 == 1) for number in range(CLIENTS)]
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
    flags += ["--swap-memory", "0" if preemption == "recompute" else "16MiB"]
    with running_server(*flags, "--deterministic", "--max-num-batched-tokens", "32", "--check-invariants", model=tiny_checkpoint("vector-heads")) as server:
        yield server, preemption


def test_clients_get_when_memory_runs_out_what_they_get_alone(served: tuple[Server, str]) -> None:
    server, preemption = served
    together, alone = asyncio.run(ask_all(server))
    for number, (got, expected) in enumerate(zip(together, alone, strict=True)):
        assert got == expected, body(number)
    choices = [choice for answer in alone for choice in answer.choices.values()]
    assert {"stop", "length"} <= {choice.finish_reason for choice in choices}
    assert preemptions(server, preemption) > 0, "the pool was not small enough to prove anything"
    state = httpx.get(f"{server.url}/debug/state").json()
    assert state["blocks"]["used"] == state["swap_slots"]["held"] == 0
    assert state["invariants"]["ok"]
