"""Two ranks are one model: what clients get of them is what they get of one, whatever memory is short of and whoever dies.

The server has a pool that its clients fill several times over, and an arena too small for those who have to yield, so that
some of them are computed again. Under `--deterministic` even log probabilities of a busy server are those of an idle
one, bit for bit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.answers import Answer, ask
from tests.helpers.server import Server, running_server
from tests.helpers.tiny_model import tiny_checkpoint

CLIENTS = 8
#: In blocks of 16 tokens: what two of the requests below would like to hold.
NUM_BLOCKS = 9
#: Fewer blocks than one of them has.
SWAP_MEMORY = "192KiB"
#: Each time all clients ask at once; after so many memory has been short in both ways.
MAX_PRESSES = 5
RANKS = ("worker 0", "worker 1")
PROMPTS = ("The mill stands where the river bends, and every page", "What is the capital of France? The capital", "One, two, three, four, five")

pytestmark = pytest.mark.timeout(300)


def body(number: int) -> dict[str, Any]:
    """What client `number` asks for: half of it greedy; half drawn, of which some from all tokens and some from the likeliest."""
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": number, "top_p": (1.0, 0.8)[number // 2 % 2]}
    return {
        "prompt": PROMPTS[number % 3] + f" {number}",
        "max_tokens": 24 + 3 * number,
        "logprobs": (None, 0, 2)[number % 3],
        **(drawn if number % 2 else {"temperature": 0}),
    }


async def ask_one(client: httpx.AsyncClient, number: int, on_part: Callable[[], None] = lambda: None) -> Answer:
    return await ask(client, body(number), stream=True, on_part=on_part)


def ask_in_turn(server: Server) -> list[Answer]:
    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return [await ask_one(client, number) for number in range(CLIENTS)]

    return asyncio.run(run())


def ask_together(server: Server, after_parts: int = 0, strike: Callable[[], None] = lambda: None) -> list[Answer]:
    """All at once. `strike` is called when they have got so many parts of their answers together."""
    num_parts = 0

    def count() -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts == after_parts:
            strike()

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=CLIENTS)) as client:
            return await asyncio.gather(*(ask_one(client, number, count) for number in range(CLIENTS)))

    return asyncio.run(run())


def texts(answers: list[Answer]) -> list[str]:
    return [answer.choices[0].text for answer in answers]


@dataclass(frozen=True)
class Pair:
    """A server with two ranks, and what it answers while it has nothing else to do."""

    server: Server
    known: list[Answer]


@pytest.fixture(scope="module")
def texts_of_one() -> list[str]:
    """What one rank answers to each client alone."""
    with running_server("--deterministic", model=tiny_checkpoint("vector-heads")) as server:
        return texts(ask_in_turn(server))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    flags = ["-tp", "2", "--deterministic", "--frontends", "2", "--num-blocks", str(NUM_BLOCKS), "--block-size", "16", "--swap-memory", SWAP_MEMORY]
    with running_server(*flags, "--max-num-batched-tokens", "32", "--check-invariants", model=tiny_checkpoint("vector-heads")) as server:
        yield Pair(server, ask_in_turn(server))


def has_preempted(server: Server, *kinds: str) -> bool:
    """In each of these ways."""
    families = parse_text(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "pagemill_preemptions_total"]
    return all(sum(sample.value for sample in samples if sample.labels["kind"] == kind) > 0 for kind in kinds)


def test_two_ranks_answer_as_one_does_and_alike_when_memory_is_short(pair: Pair, texts_of_one: list[str]) -> None:
    assert texts(pair.known) == texts_of_one
    for _ in range(MAX_PRESSES):
        assert ask_together(pair.server) == pair.known
        if has_preempted(pair.server, "swap", "recompute"):
            break
    assert has_preempted(pair.server, "swap", "recompute"), "memory was not short enough to prove anything"
    state = httpx.get(f"{pair.server.url}/debug/state").json()
    assert state["blocks"]["used"] == state["swap_slots"]["held"] == 0
    assert state["invariants"]["ok"]


def test_ranks_talk_to_each_other_where_nobody_else_can_listen_or_call(pair: Pair) -> None:
    between_ranks = 0
    for child in pair.server.children():
        connections = child.net_connections(kind="inet")
        between_ranks += len(connections) if child.pid in pids(pair.server) else 0
        for address in (end for connection in connections for end in (connection.laddr, connection.raddr) if end):
            assert ipaddress.ip_address(address.ip).is_loopback, connections
    assert between_ranks > 0, "they met in some other way, which this test should look at"


def test_each_rank_computes_on_the_processors_that_were_announced(pair: Pair) -> None:
    (threads,) = pair.server.events("threads_set")
    everywhere = sorted(os.sched_getaffinity(0))
    for pid, cpus in zip(pids(pair.server), threads["cpus"], strict=True):
        found = Counter(tuple(sorted(os.sched_getaffinity(int(path.name)))) for path in Path(f"/proc/{pid}/task").iterdir())
        elsewhere = found.total() - found[tuple(cpus or everywhere)]
        assert elsewhere <= 1, "the thread that watches the launcher is older, and computes nothing"


def test_a_rank_that_is_lost_costs_a_pause_and_no_token(pair: Pair) -> None:
    before = pids(pair.server)
    assert ask_together(pair.server, after_parts=40, strike=lambda: os.kill(before[1], signal.SIGKILL)) == pair.known
    assert sorted(event["child"] for event in pair.server.events("process_restarted")) == list(RANKS)
    lost = pair.server.events("process_lost")
    assert sorted(event["child"] for event in lost) == list(RANKS)
    assert [event["reason"] for event in lost if event["child"] == "worker 1"] == ["worker 1 was killed by SIGKILL"]
    assert {event["deaths"] for event in lost} == {1}
    assert not set(before) & set(pids(pair.server)), "ranks of two groups would not agree"
    assert all(not psutil.pid_exists(pid) for pid in before)


def pids(server: Server) -> list[int]:
    """Of the ranks, in their order."""
    return [server.child(title).pid for title in RANKS]
