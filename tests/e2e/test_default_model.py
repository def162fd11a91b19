"""What somebody sees who starts the server with the default model and uses the official client.

One server with a small pool, so that 32 streams at once push each other out to the arena, and `--deterministic`,
so that nobody may notice. Its event log must replay to the same effects afterwards.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pagemill.model_download import ModelError
from pagemill.model_store import resolve
from tests.helpers.server import ROOT, Server, running_server

MODEL = "SmolLM2-135M-Instruct"
#: In blocks of 16 tokens: a quarter of what the 32 streams below would like to hold.
NUM_BLOCKS = 36
STREAMS = 32
TOKENS = 12

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Running:
    server: Server
    event_log: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    try:
        resolve("smollm2-135m-instruct", lambda phase, fraction, detail: None)
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    event_log = tmp_path_factory.mktemp("log") / "events"
    flags = ["--deterministic", "--num-blocks", str(NUM_BLOCKS), "--max-num-batched-tokens", "64", "--check-invariants", "--event-log", str(event_log)]
    flags += ["--preemption", "swap", "--swap-memory", "128MiB"]
    with running_server(*flags, model="smollm2-135m-instruct", timeout_s=240) as server:
        yield Running(server, event_log)


def question(number: int) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": f"Write one sentence about the number {number} and the town of {chr(65 + number % 26)}ville."}]


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    """One streamed reply; half of them greedy, half drawn with a seed."""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=question(number),
        max_tokens=TOKENS,
        temperature=0 if number % 2 else 0.9,
        seed=number,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_it_knows_the_capital_of_france(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=32).choices[0].message.content
        stream = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=32, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole is not None
    assert "Paris" in whole
    assert text == whole


def test_32_streams_at_once_each_equal_their_solo_run_though_the_pool_holds_few_of_them(running: Running) -> None:
    async def main() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{running.server.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(STREAMS)))
            alone = [await ask(client, number) for number in range(STREAMS)]
        return together, alone

    together, alone = asyncio.run(main())
    assert together == alone
    metrics = httpx.get(f"{running.server.url}/metrics").text
    counted = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("pagemill_"))}
    assert sum(value for name, value in counted.items() if name.startswith('pagemill_preemptions_total{kind="swap"')) > 0, "the pool was not small enough"
    assert all(counted[f'pagemill_swapped_bytes_total{{direction="{direction}"}}'] > 0 for direction in ("out", "in"))
    state = httpx.get(f"{running.server.url}/debug/state").json()
    assert state["blocks"]["used"] == state["swap_slots"]["held"] == 0
    assert state["invariants"]["ok"]


def test_the_recorded_events_replay_to_the_same_effects(running: Running) -> None:
    running.server.process.terminate()
    assert running.server.wait() == 0
    replay = [sys.executable, str(ROOT / "scripts" / "replay"), str(running.event_log), "--check-invariants"]
    result = subprocess.run(replay, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "events replayed to the same" in result.stdout
