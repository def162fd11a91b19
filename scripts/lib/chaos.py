"""A server under faults: clients that know their answers, faults drawn from a seed, and what is left at the end.

    with chaos_server(settings.scale, settings.num_streams) as (server, run_folder):
        outcome = asyncio.run(Chaos(settings, server, run_folder).run())

Clients first learn their answers and then ask all at once, undisturbed; only after this does anything strike. Whatever
must not be is a breach, in words; no breach, no fault of the server. Must not know how results are shown.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.chaos_audit import Holdings, leaks, settle
from scripts.lib.chaos_clients import HUNG_S, Clients, make_request
from scripts.lib.chaos_faults import KINDS, REQUESTS, Fault, FaultSource, Limits
from scripts.lib.chaos_watch import Report, Watch, disturb
from tests.helpers.server import Server, running_server
from tests.helpers.tiny_model import tiny_checkpoint

NUM_FRONTENDS = 2
#: What a step's tokens add to the time it may take: the server's own figure, on a CPU.
_STEP_S_PER_TOKEN = 0.1
_MAX_PRESSES = 5
#: The launcher keeps no books of requests. What it may grow by is the odd arena of its allocator.
MAX_LAUNCHER_GROWTH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Scale:
    """A model, and a pool that is too small for what the clients ask of it."""

    blocks_per_stream: int
    swap_memory: str
    max_tokens: tuple[int, ...]
    step_timeout_s: int
    num_batched_tokens: int
    preemptions: tuple[str, ...] = ("swap", "recompute")  #: ways to preempt that must have been taken

    @property
    def longest_step_s(self) -> float:
        """Before a watchdog counts its worker as hung."""
        return self.step_timeout_s + _STEP_S_PER_TOKEN * self.num_batched_tokens

    def flags(self, num_streams: int) -> list[str]:
        return [
            *("--frontends", str(NUM_FRONTENDS), "--deterministic", "--restart-limit", "1000", "--block-size", "16"),
            *("--num-blocks", str(self.blocks_per_stream * num_streams), "--swap-memory", self.swap_memory),
            *("--step-timeout", str(self.step_timeout_s), "--max-num-batched-tokens", str(self.num_batched_tokens)),
            *("--inject", *(request.fault for request in REQUESTS.values())),
        ]


TINY = Scale(blocks_per_stream=3, swap_memory="512KiB", max_tokens=(40, 120, 200), step_timeout_s=2, num_batched_tokens=64)
DEFAULT = Scale(blocks_per_stream=2, swap_memory="4MiB", max_tokens=(24, 48, 72), step_timeout_s=10, num_batched_tokens=128, preemptions=("swap",))


@dataclass(frozen=True)
class Settings:
    seconds: float = 600.0  #: in which faults strike
    num_streams: int = 32
    every_s: float = 5.0  #: between the end of one round of faults and the next, on average
    seed: int = 1
    kinds: Sequence[str] = KINDS
    num_ranks: int = 1
    scale: Scale = TINY
    slack_s: float = 0.0  #: added to every limit


@dataclass
class Outcome:
    """What came of it all. Empty `breaches`: nobody but a killed frontend's clients could tell."""

    clients: Clients
    before: Holdings
    after: Holdings
    preemptions: dict[str, float]  #: by kind, undisturbed
    seconds: float = 0.0
    num_deaths: int = 0
    reports: list[Report] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    @property
    def launcher_growth_bytes(self) -> int:
        return self.after.private_bytes["launcher"] - self.before.private_bytes["launcher"]


@contextmanager
def chaos_server(scale: Scale, num_streams: int, model: str | Path | None = None, num_ranks: int = 1) -> Iterator[tuple[Server, Path]]:
    """A server of this scale for so many streams, and the folder in which it keeps its sockets. The tiny model unless told otherwise."""
    with TemporaryDirectory(prefix="chaos-") as folder:
        path = tiny_checkpoint("vector-heads") if model is None else model
        flags = [*scale.flags(num_streams), "--tensor-parallel-size", str(num_ranks)]
        with running_server(*flags, model=path, env={"TMPDIR": folder}, timeout_s=600.0) as server:
            yield server, Path(folder)


class Chaos:
    """Used once."""

    def __init__(self, settings: Settings, server: Server, run_folder: Path) -> None:
        self._settings, self._server, self._run_folder = settings, server, run_folder
        self.clients = Clients(server.url, [make_request(number, settings.scale.max_tokens) for number in range(settings.num_streams)])
        self._watch = Watch(server)
        self._limits = Limits(
            load_s=float(server.wait_for_event("ready")["seconds"]),
            step_s=settings.scale.longest_step_s,
            slack_s=settings.slack_s,
        )

    async def run(self, on_round: Callable[[Sequence[Report]], None] = lambda reports: None) -> Outcome:
        await self.clients.learn()
        preempted = await press(self.clients, self._server, self._settings.scale)
        before = await self._settle(None)
        outcome = Outcome(self.clients, before, before, preempted)
        async with asyncio.TaskGroup() as tasks:
            watching, asking = tasks.create_task(self._watch.run()), tasks.create_task(self.clients.run())
            await self._strike(outcome, on_round)
            self.clients.stop()
            await asyncio.wait([asking], timeout=2 * HUNG_S)
            watching.cancel()
        if not self._watch.has_ended:
            outcome.after = await self._settle(before)
        self._judge(outcome)
        return outcome

    async def _strike(self, outcome: Outcome, on_round: Callable[[Sequence[Report]], None]) -> None:
        source, draw = FaultSource(self._settings.seed, self._settings.kinds, NUM_FRONTENDS, self._settings.num_ranks), random.Random(self._settings.seed)
        started = time.monotonic()
        while time.monotonic() - started < self._settings.seconds and not self._watch.has_ended:
            await asyncio.sleep(self._settings.every_s * draw.uniform(0.5, 1.5))
            self._watch.forget()
            faults = source.next_round()
            reports = await asyncio.gather(*(self._disturb(fault, faults) for fault in faults))
            outcome.reports += reports
            on_round(reports)
        outcome.seconds = time.monotonic() - started

    async def _disturb(self, fault: Fault, faults: Sequence[Fault]) -> Report:
        limits = self._limits.beside(other for other in faults if other is not fault)
        return await disturb(self._server, self._watch, self.clients, fault, limits)

    async def _settle(self, before: Holdings | None) -> Holdings:
        return await asyncio.to_thread(settle, self._server, self._run_folder, before)

    def _judge(self, outcome: Outcome) -> None:
        """Collects every breach."""
        outcome.num_deaths = self._watch.deaths.total()
        breaches = outcome.breaches
        if self._watch.has_ended:
            breaches.append(f"the server ended with code {self._server.process.returncode}: {self._server.log.splitlines()[-1]}")
        breaches += [breach for report in outcome.reports for breach in report.breaches]
        breaches += self.clients.failures
        breaches += leaks(outcome.before, outcome.after)
        fewest, most = (sum(report.fault.deaths[end] for report in outcome.reports) for end in (0, 1))
        if not fewest <= outcome.num_deaths <= most:
            breaches.append(f"{outcome.num_deaths} processes died, and {fewest} to {most} were made to")
        breaches += [f"nobody was preempted by {kind}" for kind in self._settings.scale.preemptions if not outcome.preemptions.get(kind)]
        if outcome.launcher_growth_bytes > MAX_LAUNCHER_GROWTH_BYTES:
            breaches.append(f"the launcher grew by {outcome.launcher_growth_bytes:,} bytes")


async def press(clients: Clients, server: Server, scale: Scale) -> dict[str, float]:
    """Everybody asks at once, undisturbed, until memory has been short in every way, or long enough. How many preemptions, by kind."""
    for _ in range(_MAX_PRESSES):
        await clients.run(once=True)
        found = await asyncio.to_thread(preemptions, server)
        if all(found.get(kind) for kind in scale.preemptions):
            break
    return found


def preemptions(server: Server) -> dict[str, float]:
    """How many there have been, by kind."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=10).text):
        for sample in family.samples:
            if sample.name == "pagemill_preemptions_total":
                found[sample.labels["kind"]] = found.get(sample.labels["kind"], 0.0) + sample.value
    return found
