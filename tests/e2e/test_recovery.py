"""No request dies with a process: one server, and every way in which a process of it can come to its end.

Clients that know their answers ask again and again while memory is short. Each test strikes in the middle of their
requests and looks at what they got, how long it took, and what was left. What else a server does when it loses somebody
(giving up, draining) is shown on servers of their own.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from scripts.lib.chaos import TINY, chaos_server, press
from scripts.lib.chaos_audit import Holdings, leaks, settle
from scripts.lib.chaos_clients import Asked, Clients, make_request
from scripts.lib.chaos_faults import Fault, Limits, strike
from scripts.lib.chaos_watch import LOST, RESTARTED, Report, Watch, disturb
from tests.helpers.answers import Answer
from tests.helpers.event_stream import parse
from tests.helpers.server import Server, client_ports, running_server, wait_for
from tests.helpers.tiny_model import tiny_checkpoint

#: Half of them stream.
NUM_CLIENTS = 10
SCALE = replace(TINY, max_tokens=(60, 90), step_timeout_s=1, num_batched_tokens=32)
#: This machine has other tests to run at the same time.
SLACK_S = 10.0
#: Each step takes so long where a request is to be found under way.
SLOW_STEP = ("--inject", "worker.plan=pause:0.03@*")

pytestmark = pytest.mark.timeout(300)


@dataclass
class Bench:
    """A server that is struck again and again, and what was known of it before."""

    server: Server
    run_folder: Path
    requests: list[Asked]
    known: dict[int, Answer]
    holdings: Holdings  #: at rest, before anything happened
    limits: Limits

    async def strike(self, fault: Fault, num_under_way: int = 3) -> tuple[Report, Clients, Watch]:
        """Strikes when so many streams are under way; returns when everybody has got an answer that began after the repair."""
        clients, watch = Clients(self.server.url, self.requests, self.known), Watch(self.server)
        async with asyncio.TaskGroup() as tasks:
            watching, asking = tasks.create_task(watch.run()), tasks.create_task(clients.run())
            async with asyncio.timeout(60):
                while clients.num_under_way < num_under_way:
                    await asyncio.sleep(0.01)
            report = await disturb(self.server, watch, clients, fault, self.limits)
            clients.stop()
            await asking
            watching.cancel()
        return report, clients, watch

    def leaks(self) -> list[str]:
        return leaks(self.holdings, settle(self.server, self.run_folder, self.holdings))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with chaos_server(SCALE, NUM_CLIENTS) as (server, run_folder):
        requests = [make_request(number, SCALE.max_tokens) for number in range(NUM_CLIENTS)]
        clients = Clients(server.url, requests)
        asyncio.run(clients.learn())
        preempted = asyncio.run(press(clients, server, SCALE))
        assert clients.failures == []
        assert all(preempted[kind] > 0 for kind in SCALE.preemptions), "memory was not short"
        limits = Limits(float(server.wait_for_event("ready")["seconds"]), SCALE.longest_step_s, SLACK_S)
        yield Bench(server, run_folder, requests, clients.known, settle(server, run_folder), limits)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", "worker 0"),
        Fault("segv", "worker 0"),
        Fault("stop", "worker 0"),
        Fault("kill", "scheduler 0"),
        Fault("segv", "scheduler 0"),
        Fault("stop", "scheduler 0"),
    ],
    ids=str,
)
def test_nobody_can_tell_that_a_process_was_lost(bench: Bench, fault: Fault) -> None:
    report, clients, watch = asyncio.run(bench.strike(fault))
    assert clients.failures == report.breaches == []
    assert clients.outcomes["broken"] == 0
    assert clients.outcomes["completed"] >= NUM_CLIENTS
    assert watch.deaths == {fault.process: 1}
    assert bench.leaks() == []


@pytest.mark.parametrize("kind", ["kill", "segv"])
def test_only_the_connections_of_a_lost_frontend_break(bench: Bench, kind: str) -> None:
    report, clients, watch = asyncio.run(bench.strike(Fault(kind, "frontend 1")))
    assert clients.failures == report.breaches == []
    assert watch.deaths == {"frontend 1": 1}
    assert bench.leaks() == []


@pytest.mark.parametrize(("kind", "deaths"), [("poison", {2, 3}), ("raise", {0}), ("nan", {0})])
def test_a_request_that_no_worker_can_compute_fails_alone(bench: Bench, kind: str, deaths: set[int]) -> None:
    report, clients, watch = asyncio.run(bench.strike(Fault(kind, "worker 0")))
    assert clients.failures == report.breaches == []
    assert clients.outcomes["completed"] >= NUM_CLIENTS
    assert watch.deaths["worker 0"] == watch.deaths.total() in deaths
    assert bench.leaks() == []


def test_what_goes_wrong_inside_a_worker_changes_no_answer_and_one_death_more_than_the_limit_ends_the_server(bench: Bench) -> None:
    """Once in a forward and once in its logits, which both concern rows; then outside of them, which ends the worker and is the one death allowed."""
    faults = ("worker.forward=raise@20", "worker.logits=corrupt@40", "worker.plan=raise@60")
    with running_server("--deterministic", "--restart-limit", "1", "--inject", *faults, model=tiny_checkpoint("vector-heads")) as server:
        clients = Clients(server.url, bench.requests, bench.known)
        asyncio.run(clients.run(once=True))
        assert clients.failures == []
        assert clients.outcomes == {"completed": NUM_CLIENTS}
        (lost,) = server.events(LOST)
        assert lost["child"] == "worker 0"
        assert "InjectedFault: worker.plan" in lost["reason"]

        strike(server, Fault("kill", "scheduler 0"), lambda ports: None)
        assert server.wait() == 1
        last = json.loads(server.log.splitlines()[-1])["reason"]
        assert last.startswith("scheduler 0 was killed by SIGKILL")
        assert "--restart-limit 1" in last
        assert server.leftovers() == []


# --- streams that are cut off, or not --------------------------------------------------------------------


class Stream(threading.Thread):
    """A client that reads to the end, whichever it is."""

    def __init__(self, url: str, max_tokens: int = 4000) -> None:
        super().__init__(daemon=True)
        self.body = ""
        self.port = 0
        self.is_cut_off = False
        self._url, self._max_tokens = url, max_tokens
        self.start()

    @property
    def request_id(self) -> str:
        """As the scheduler knows it; "" until something has come."""
        lines = [line for line in self.body.splitlines() if line.startswith("data: {")]
        return str(json.loads(lines[0].removeprefix("data: "))["id"]).removeprefix("cmpl-") if lines else ""

    def run(self) -> None:
        body = {"prompt": "Once", "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.Client(base_url=self._url, timeout=60) as client, client.stream("POST", "/v1/completions", json=body) as response:
                self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                for line in response.iter_lines():
                    self.body += line + "\n"
        except httpx.TransportError:
            self.is_cut_off = True

    def ends_well(self) -> bool:
        """With a reason for its end, as a client that was never told of any trouble expects."""
        self.join(60)
        return not self.is_alive() and not self.is_cut_off and parse(self.body).done and len(parse(self.body).finish_reasons()) == 1


def begin(server: Server, *lengths: int) -> list[Stream]:
    """Streams of so many tokens each, all of which have begun."""
    streams = [Stream(server.url, max_tokens) for max_tokens in lengths]
    wait_for(lambda: all(stream.request_id for stream in streams), 60, lambda: "a stream did not begin")
    return streams


def sequences(server: Server) -> set[str]:
    return {sequence["request_id"] for sequence in httpx.get(f"{server.url}/debug/state", timeout=20).json()["sequences"]}


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """It takes its time for everything, and lets nobody wait for less than ten minutes when it is to stop."""
    with running_server("--frontends", "2", "--drain-timeout", "600", *SLOW_STEP) as server:
        yield server


def test_the_sequences_of_a_lost_frontend_end_at_once_and_those_of_others_go_on(patient: Server) -> None:
    streams = begin(patient, *[4000] * 8)
    ports = client_ports(patient.child("frontend 0").pid)
    on_first, on_second = ({stream.request_id for stream in streams if (stream.port in ports) == is_first} for is_first in (True, False))
    assert sequences(patient) == on_first | on_second
    victim, kept = ("frontend 0", on_second) if on_first else ("frontend 1", on_first)
    strike(patient, Fault("kill", victim), lambda ports: None)
    wait_for(lambda: sequences(patient) == kept, 2 + SLACK_S, lambda: f"there are {sequences(patient)}, of which {kept} should be left")
    wait_for(lambda: patient.events(RESTARTED), 30, lambda: "the frontend did not come back")
    assert httpx.get(f"{patient.url}/readyz").status_code == 200
    assert [event["child"] for event in patient.events(LOST)] == [victim]
    assert {stream.request_id for stream in streams if stream.is_alive()} == kept


def test_a_second_sigterm_ends_a_server_at_once_that_still_waits_for_streams(patient: Server) -> None:
    """Ends the server of the test before."""
    (stream,) = begin(patient, 4000)
    patient.process.send_signal(signal.SIGTERM)
    patient.wait_for_event("stopping")
    length = len(stream.body)
    wait_for(lambda: len(stream.body) > length + 8000, 60, lambda: "the stream does not go on")  # signals that follow each other at once are one
    began = time.monotonic()
    patient.process.send_signal(signal.SIGTERM)
    patient.wait()
    assert time.monotonic() - began < SLACK_S
    assert '"length"' not in stream.body
    assert patient.leftovers() == []


def test_sigterm_lets_streams_come_to_their_end_and_gives_one_to_those_that_take_too_long() -> None:
    with running_server("--drain-timeout", "5", *SLOW_STEP) as server:
        short, long = begin(server, 30, 4000)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert short.ends_well()
        assert long.ends_well()
        assert parse(short.body).finish_reasons() == ["length"]
        assert parse(long.body).finish_reasons() != ["length"]
        assert server.wait() == 0
        assert time.monotonic() - began < 5 + SLACK_S
        assert server.leftovers() == []
