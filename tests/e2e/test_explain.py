"""Preemptions of a real server under pressure: what it counts, what it keeps and what `pagemill explain` says agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pagemill.preemption_report import PreemptionReport, concerns
from tests.helpers.server import ROOT, Server, running_server, wait_for

REQUESTS = 4


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with running_server("--num-blocks", "20", "--block-size", "16") as server:
        yield server


@pytest.fixture(scope="module")
def reply_ids(started: Server) -> list[str]:
    """Of four requests of 9 blocks each that have been through a pool of 20."""
    with httpx.Client(base_url=started.url, timeout=120) as client:

        def complete(number: int) -> httpx.Response:
            prompt = [number * 10 + 20 + index % 7 for index in range(64)]
            return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 80, "ignore_eos": True, "temperature": 0})

        with ThreadPoolExecutor(REQUESTS) as pool:
            replies = list(pool.map(complete, range(REQUESTS)))
        assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [80] * REQUESTS
    return [reply.json()["id"] for reply in replies]


@pytest.fixture(scope="module")
def server(started: Server, reply_ids: list[str]) -> Server:
    """It has decided who yields."""
    return started


def preemptions(server: Server) -> dict[str, int]:
    """By kind and reason, as /metrics has them."""
    families = parse_text(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "pagemill_preemptions_total"]
    return {f"{sample.labels['kind']}/{sample.labels['reason']}": int(sample.value) for sample in samples if sample.value}


def report(server: Server) -> PreemptionReport:
    return msgspec.json.decode(httpx.get(f"{server.url}/debug/preemptions", params={"limit": 1000}).content, type=PreemptionReport)


def test_what_is_counted_is_what_was_decided(server: Server) -> None:
    made = report(server).decisions
    stopped = Counter(f"{victim.kind}/{decision.reason}" for decision in made for victim in decision.victims if victim.yielded and victim.was_running)
    assert stopped.total() > 0, "the pool was not small enough to prove anything"
    wait_for(lambda: preemptions(server) == dict(stopped), 10.0, lambda: f"{preemptions(server)} are counted, {dict(stopped)} were decided")
    wait_for(lambda: report(server).preemptions == dict(stopped), 10.0, lambda: "the report lags")
    assert [decision.number for decision in made] == list(range(1, len(made) + 1))
    assert [decision.at_s for decision in made] == sorted(decision.at_s for decision in made)


def test_a_request_is_known_by_the_id_that_its_client_saw(server: Server, reply_ids: list[str]) -> None:
    made = report(server).decisions
    known = [name for name in reply_ids if any(concerns(decision, name) for decision in made)]
    assert known, f"{reply_ids} are not in {made}"


def test_every_decision_is_told_and_every_sequence_that_yielded_has_its_line(server: Server) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PAGEMILL_API_KEY", "FORCE_COLOR")}
    command = [sys.executable, "-m", "pagemill", "explain", "--url", server.url, "--limit", "1000"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    made = report(server).decisions
    yielded = [victim for decision in made for victim in decision.victims if victim.yielded]
    assert len(re.findall(r"^Decision \d+, step", result.stdout, re.MULTILINE)) == len(made)
    assert len(re.findall(r"^  \S+ \(sequence \d+\), .*(?:wapped|ropped|ept) ", result.stdout, re.MULTILINE)) == len(yielded)
    assert f"{len(made):,} decision" in result.stdout
