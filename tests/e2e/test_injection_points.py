"""Crash at every point where state changes its owner: what clients get is what they get undisturbed.

One server goes through many lives. In the first, every point is reached and paused at; in each later one, a worker and the
scheduler die at another point, while clients that know their answers ask on and memory is short. Frontends, which take
connections with them, have a server of their own.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from pagemill.injection import POINTS
from scripts.lib.chaos_clients import Asked, Clients, make_request
from tests.helpers.server import ROOT, Server, running_server, wait_for
from tests.helpers.tiny_model import tiny_checkpoint

NUM_CLIENTS = 6
#: Small enough that sequences are swapped out and dropped all the time.
MEMORY = ("--block-size", "16", "--num-blocks", "16", "--swap-memory", "512KiB", "--max-num-batched-tokens", "64", "--check-invariants")
WALK = ("--deterministic", "--restart-limit", "1000", *MEMORY)
#: Late enough that whoever is suspected of the death before has cleared itself.
WORKER_LIVES = (
    ("worker.loaded=kill",),
    ("worker.install=kill@40",),
    ("worker.forward=raise@10", "worker.logits=raise@20", "worker.logits=corrupt@30", "worker.plan=kill@90"),
    ("transfer.copy=raise@2", "transfer.copied=raise@4", "worker.step_done=kill@90"),
    ("transfer.copied=corrupt@2", "worker.step_sent=segv@90"),
    ("transfer.copied=kill@12",),
)
SCHEDULER_LIVES = (
    ("scheduler.workers_ready=kill",),
    ("scheduler.add=kill@12",),
    ("scheduler.core=raise@60", "scheduler.plan=kill@80"),  # the core hears of more than it plans
    ("scheduler.planned=kill@50",),
    ("scheduler.step_done=kill@50",),
    ("scheduler.transfer_done=kill@8",),
    ("scheduler.output=kill@50",),
    ("scheduler.output_sent=segv@50",),
    ("scheduler.directory=kill@20",),
)

#: This machine has other tests to run at the same time.
LIVES_S = 200

pytestmark = pytest.mark.timeout(300)


def inject(*faults: str) -> list[str]:
    return [argument for fault in faults for argument in ("--inject", fault)]


def in_lives(lives: Sequence[Sequence[str]]) -> list[str]:
    """Each group in an incarnation of its own, from the second on."""
    return [f"{fault}#{number}" for number, faults in enumerate(lives, start=1) for fault in faults]


@dataclass(frozen=True)
class Struck:
    """One fault as the log tells it."""

    process: str
    point: str
    action: str


def struck(server: Server) -> list[Struck]:
    return [Struck(event["process"], event["point"], event["action"]) for event in server.events("fault_injected")]


def num_adds_failed(server: Server) -> int:
    """Requests on whose arrival the core was made to fail: they alone are to blame for it, as far as anybody can see."""
    return sum(event["recent"][-1].startswith("AddRequest") for event in server.events("core_failed"))


# --- workers, the scheduler, transfers, control ----------------------------------------------------------


@dataclass
class Walk:
    """A server in its first life, all of whose points have been passed but those of its end."""

    server: Server
    requests: list[Asked]
    clients: Clients


@pytest.fixture(scope="module")
def walk() -> Iterator[Walk]:
    pauses = [f"{point}=pause:0.01" for point in POINTS]
    faults = inject(*pauses, *in_lives(WORKER_LIVES), *in_lives(SCHEDULER_LIVES))
    with running_server(*WALK, *faults, model=tiny_checkpoint("vector-heads")) as server:
        requests = [make_request(number, (40, 80)) for number in range(NUM_CLIENTS)]
        clients = Clients(server.url, requests)
        asyncio.run(clients.learn())
        asyncio.run(clients.run(once=True))
        yield Walk(server, requests, clients)


def test_no_answer_shows_at_which_point_a_worker_or_the_scheduler_died(walk: Walk) -> None:
    server, clients, log = walk.server, walk.clients, walk.server.follow()
    missing = {fault.split("@")[0] for life in (*WORKER_LIVES, *SCHEDULER_LIVES) for fault in life}

    async def go_through_all_lives() -> None:
        asking = asyncio.create_task(clients.run())
        deadline = time.monotonic() + LIVES_S
        while missing and len(clients.failures) <= num_adds_failed(server) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            missing.difference_update(f"{event['point']}={event['action']}" for event in log.read() if event["event"] == "fault_injected")
        clients.stop()
        await asking

    leave_a_stream(server)
    stop_at_a_string(server)
    server.process.send_signal(signal.SIGHUP)
    for name in ("worker 0", "scheduler 0"):
        server.child(name).kill()
    asyncio.run(go_through_all_lives())
    assert len(clients.failures) <= num_adds_failed(server), clients.failures
    assert missing == set(), f"not struck within {LIVES_S} s:\n{server.log}"
    state = wait_for(lambda: at_rest(server), 30, lambda: httpx.get(f"{server.url}/debug/state").text)
    assert state["invariants"]["ok"], state


def test_then_every_point_has_been_passed(walk: Walk) -> None:
    walk.server.process.terminate()
    assert walk.server.wait(60) == 0
    assert walk.server.leftovers() == []
    passed = {fault.point for fault in struck(walk.server) if fault.action == "pause"}
    assert set(POINTS) - passed == set()


def at_rest(server: Server) -> dict[str, dict[str, int]] | None:
    """What the scheduler holds, when it holds nothing for anybody."""
    state: dict[str, dict[str, int]] = httpx.get(f"{server.url}/debug/state", timeout=20).json()
    return None if state["sequences"] or state["blocks"]["used"] or state["swap_slots"]["held"] else state


BODY = {"prompt": "The mill stands where the river bends", "max_tokens": 40, "temperature": 0}


def text_of(server: Server, **changes: object) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=BODY | changes, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def stop_at_a_string(server: Server) -> None:
    text = text_of(server)
    stop = text[len(text) // 2 :][:6]
    assert text_of(server, stop=stop) == text[: text.index(stop)]


def leave_a_stream(server: Server) -> None:
    """The worker stands still until we are gone: the stream must not come to its end first."""
    worker, address = server.child("worker 0"), urlsplit(server.url)
    worker.suspend()
    try:
        with closing(HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(BODY | {"stream": True, "max_tokens": 150}), {"Content-Type": "application/json"})
            wait_for(lambda: at_rest(server) is None, 20, lambda: "the stream does not begin")
    finally:
        worker.resume()


# --- frontends -------------------------------------------------------------------------------------------


def ask_in_vain(server: Server, **changes: object) -> None:
    with pytest.raises(httpx.TransportError):
        text_of(server, **changes)


def lose_the_scheduler_during_a_stream(server: Server) -> None:
    scheduler = server.child("scheduler 0")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True, "max_tokens": 150}, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        scheduler.kill()
        with pytest.raises(httpx.TransportError):
            list(lines)


FRONTEND_LIVES = {
    "frontend.request": ask_in_vain,
    "frontend.submit": ask_in_vain,
    "frontend.submitted": ask_in_vain,
    "frontend.output": ask_in_vain,
    "frontend.finish": lambda server: ask_in_vain(server, stop="e"),
    "frontend.abort": leave_a_stream,
    "frontend.resubmit": lose_the_scheduler_during_a_stream,
}


def test_a_frontend_that_dies_at_any_point_takes_its_own_connections_along_and_nothing_else() -> None:
    faults = [f"{point}=kill#{life}" for life, point in enumerate(FRONTEND_LIVES)]
    slow = ("--inject", "worker.plan=pause:0.02@*")  # so that streams are long
    with running_server("--deterministic", "--restart-limit", "100", *slow, *inject(*faults), model=tiny_checkpoint("vector-heads")) as server:
        for life, (point, strike) in enumerate(FRONTEND_LIVES.items(), start=1):
            strike(server)
            wait_until_back(server, "frontend 0", life, f"{point} was not reached")
        assert {fault.point for fault in struck(server) if fault.action == "kill"} == set(FRONTEND_LIVES)
        assert text_of(server)
        assert wait_for(lambda: at_rest(server), 30, lambda: "a dead frontend's sequences are still there")
        assert {event["child"] for event in server.events("process_lost")} == {"frontend 0", "scheduler 0"}


def wait_until_back(server: Server, child: str, times: int, complaint: str) -> None:
    """Until so many have taken the place of one that was lost."""

    def is_back() -> bool:
        return [event["child"] for event in server.events("process_restarted")].count(child) == times

    wait_for(is_back, 30, lambda: f"{complaint}\n{server.log}")


# --- the table -------------------------------------------------------------------------------------------


def test_the_table_lists_every_point_with_what_it_is_where_it_stands_and_a_test_that_exists() -> None:
    table = (ROOT / "docs/injection-points.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \| `([a-z_/]+\.py)` \| `([a-z_0-9/]+\.py)` ([^|`]+) \|$", table, re.MULTILINE)
    assert [(point, what) for point, what, *_ in rows] == list(POINTS.items())
    for point, _, source, test_file, test in rows:
        assert f'reach("{point}"' in (ROOT / source).read_text(), f"{source} does not reach {point}"
        assert f"def test_{test.replace(' ', '_')}(" in (ROOT / "tests" / test_file).read_text(), f"{test_file} has no such test: {test}"
