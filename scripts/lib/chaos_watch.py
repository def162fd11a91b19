"""What can be seen of a server from outside while faults strike it: probes of /readyz, and lines of its log.

`disturb` brings about one fault and measures how long it takes to be noticed and repaired; what takes too long is a
breach, in words. Must not know how the server does it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import httpx

from scripts.lib.chaos_clients import Clients, connections
from scripts.lib.chaos_faults import REQUESTS, Fault, Limits, strike, thaw
from tests.helpers.answers import ConnectionBroken, RequestFailed, ask
from tests.helpers.server import Server

Result = TypeVar("Result")

#: The launcher's word for the death of a process and for its successor being ready; both name it in `child`.
LOST, RESTARTED = "process_lost", "process_restarted"
#: Between two looks.
_LOOK_S = 0.03
#: A probe that gets no answer tells nothing: the frontend it met may be the victim.
_PROBE_TIMEOUT_S = 1.0
#: Whatever is late gets so much more time to come at all, so that it can be said how late.
_PATIENCE_S = 60.0


class Watch:
    """Probes and log lines since the last `forget`. `run` goes on until it is cancelled."""

    def __init__(self, server: Server) -> None:
        self.deaths: Counter[str] = Counter()  #: by process, never forgotten
        self.down: set[str] = set()  #: processes that are gone and have no successor yet
        self._server = server
        self._log = server.follow()
        self._probes: list[tuple[float, int]] = []  #: when it was sent, and the status that came
        self._events: list[tuple[float, str, str]] = []  #: when, name, process

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                await self._probe(client)
                self._read_log()
                await asyncio.sleep(_LOOK_S)

    def forget(self) -> None:
        self._probes.clear()
        self._events.clear()

    @property
    def has_ended(self) -> bool:
        return self._server.process.poll() is not None

    def first_event(self, name: str, process: str, since: float) -> float | None:
        """When, by the wall clock."""
        return next((at for at, event, child in self._events if at >= since and (event, child) == (name, process)), None)

    def first_probe(self, status: int, since: float) -> float | None:
        return next((at for at, found in self._probes if at >= since and found == status), None)

    async def until(self, look: Callable[[], Result | None], deadline: float) -> Result | None:
        """What `look` finds before `deadline`, by the wall clock. None if it finds nothing or the server ends."""
        while (found := look()) is None and time.time() < deadline and not self.has_ended:
            await asyncio.sleep(_LOOK_S)
        return found

    async def _probe(self, client: httpx.AsyncClient) -> None:
        at = time.time()
        try:
            self._probes.append((at, (await client.get("/readyz")).status_code))
        except httpx.TransportError:
            pass

    def _read_log(self) -> None:
        for line in self._log.read():
            if line["event"] not in (LOST, RESTARTED):
                continue
            name, process = line["event"], line["child"]
            self._events.append((datetime.fromisoformat(line["timestamp"]).timestamp(), name, process))
            if name == LOST:
                # Ranks end together, which is one death.
                self.deaths[process] += not (process.startswith("worker ") and any(other.startswith("worker ") for other in self.down - {process}))
                self.down.add(process)
            else:
                self.down.discard(process)


@dataclass
class Report:
    """What came of one fault. Seconds are since it struck; None: did not happen, or could not be seen."""

    fault: Fault
    seen_s: float | None = None  #: until the launcher logged the death
    unready_s: float | None = None  #: until /readyz said 503
    back_s: float | None = None  #: until everything was as before, since it was seen
    breaches: list[str] = field(default_factory=list)

    def measure(self, what: str, since: float, at: float | None, limit_s: float) -> float | None:
        """Seconds, or None and a breach if it never came; a breach if it came late."""
        if at is None:
            self.breaches.append(f"{self.fault}: not {what} at all")
            return None
        if at - since > limit_s:
            self.breaches.append(f"{self.fault}: {what} after {at - since:.1f} s, of {limit_s:.1f} s")
        return at - since


async def disturb(server: Server, watch: Watch, clients: Clients, fault: Fault, limits: Limits) -> Report:
    """Strikes, and returns when everything goes on."""
    report = Report(fault)
    await asyncio.sleep(fault.after_s)
    if fault.kind == "freeze":
        await _freeze(server, clients, report)
        since = time.time()
    elif fault.kind in REQUESTS:
        since = await _ask_badly(server, watch, report, limits)
    else:
        since = await _break(server, watch, clients, report, limits)
    parts = clients.num_parts
    going_on = await watch.until(lambda: time.time() if clients.num_parts > parts else None, time.time() + limits.slack_s + _PATIENCE_S)
    report.back_s = report.measure("going on", since, going_on, limits.back_s(fault))
    return report


async def _break(server: Server, watch: Watch, clients: Clients, report: Report, limits: Limits) -> float:
    """Strikes; returns when that was seen, once the successor is ready."""
    fault = report.fault
    at, _ = await asyncio.to_thread(strike, server, fault, clients.excuse)
    latest = at + limits.seen_s(fault) + _PATIENCE_S
    lost_at = await watch.until(lambda: watch.first_event(LOST, fault.process, at), latest)
    report.seen_s = report.measure("seen", at, lost_at, limits.seen_s(fault))
    if fault.process_kind != "frontend":
        report.unready_s = report.measure("unready", at, await watch.until(lambda: watch.first_probe(503, at), latest), limits.seen_s(fault))
    since = lost_at or at
    restarted_at = await watch.until(lambda: watch.first_event(RESTARTED, fault.process, since), since + limits.back_s(fault) + _PATIENCE_S)
    report.measure("restarted", since, restarted_at, limits.back_s(fault))
    ready_at = await watch.until(lambda: watch.first_probe(200, restarted_at or since), since + limits.back_s(fault) + _PATIENCE_S)
    report.measure("ready", since, ready_at, limits.back_s(fault))
    return since


async def _freeze(server: Server, clients: Clients, report: Report) -> None:
    _, process = await asyncio.to_thread(strike, server, report.fault, clients.excuse)
    try:
        await asyncio.sleep(report.fault.seconds)
    finally:
        thaw(process)


async def _ask_badly(server: Server, watch: Watch, report: Report, limits: Limits) -> float:
    """Sends the request that no worker can compute; returns when the first died of it, once it alone has failed and a worker is ready."""
    at, bad = time.time(), report.fault.request
    try:
        async with connections(server.url) as client:
            await ask(client, {"prompt": [bad.token_id] * 4, "max_tokens": 4}, stream=False)
        report.breaches.append(f"{report.fault}: it was answered")
    except RequestFailed as failure:
        if (failure.status, failure.error.get("code")) != (httpx.codes.INTERNAL_SERVER_ERROR, bad.code):
            report.breaches.append(f"{report.fault}: it failed with {failure}")
    except (ConnectionBroken, httpx.TimeoutException) as error:
        report.breaches.append(f"{report.fault}: it got no answer, {error}")
    answered_at = time.time()
    lost_at = watch.first_event(LOST, report.fault.process, at) or answered_at
    latest = answered_at + limits.back_s(report.fault) + _PATIENCE_S
    ready_at = await watch.until(lambda: None if watch.down else watch.first_probe(200, answered_at), latest)
    report.measure("ready", lost_at, ready_at, limits.back_s(report.fault))
    return lost_at
