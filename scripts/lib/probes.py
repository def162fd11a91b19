"""Probes of a server under load, by a process of its own: `with probing(host, port, paths, request) as probes:`.

Whoever makes the load is busy, and what it is late with would be charged to the server. So another process asks and
measures, which does little else and goes before all others where the system lets it. A latency counts from when the
probe leaves; how late it left stands beside it, and tells how far the figures can be trusted. Beside the paths it sends
the request now and then, to see how soon that is refused. Must not know how the server is started, nor what loads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from scripts.lib.http_load import Client, get
from scripts.lib.report import milliseconds

ROOT = Path(__file__).resolve().parents[2]
INTERVAL_S = 0.02
#: Probes from one scrape of this path to the next, five seconds: it costs the server more than a request.
SCRAPED = "/metrics"
SCRAPE_EVERY = 250
#: Probes from one request to the next.
REQUEST_EVERY = 5
REFUSED = 429
#: Of a process that must not wait for its turn; only a privileged one may set it.
_FIRST = -10
_END_TIMEOUT_S = 60.0


@dataclass
class Probes:
    """What was found; empty until the block has ended."""

    summary: Mapping[str, object] = field(default_factory=dict)


@contextmanager
def probing(host: str, port: int, paths: Sequence[str], request: bytes) -> Iterator[Probes]:
    """Asks each path in turn while the block runs. `request` is one that may be refused."""
    settings = json.dumps({"host": host, "port": port, "paths": list(paths), "request": request.decode("latin-1")})
    probes = Probes()
    with subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(settings + "\n")
            process.stdin.flush()
            process.stdout.readline()  # it has begun
            yield probes
        finally:
            process.stdin.close()  # it sees the end of the file, says what it has found and ends
            found = process.stdout.read()
            process.wait(_END_TIMEOUT_S)
        probes.summary = json.loads(found)


class _Prober:
    """The other process."""

    def __init__(self, client: Client, paths: Sequence[str], request: bytes) -> None:
        self._client = client
        self._quick = [path for path in paths if path != SCRAPED]
        self._scrapes = SCRAPED in paths
        self._request = request
        self._latencies_s: dict[str, list[float]] = {path: [] for path in paths}
        self._refused_s: list[float] = []
        self._lags_s: list[float] = []
        self._num_failed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        due = time.perf_counter()
        for number in range(1 << 62):
            self._lags_s.append(max(0.0, time.perf_counter() - due))
            is_scrape = self._scrapes and number % SCRAPE_EVERY == 0
            self._spawn(SCRAPED if is_scrape else self._quick[number % len(self._quick)])
            if number % REQUEST_EVERY == 0:
                self._spawn(None)
            due += INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def summary(self) -> Mapping[str, object]:
        found: dict[str, object] = {f"{path}_ms": milliseconds(values) for path, values in self._latencies_s.items()}
        found |= {"probed_refusals_ms": milliseconds(self._refused_s), "probed_refusals": len(self._refused_s)}
        return found | {"probes_failed": self._num_failed, "probe_lag_ms": milliseconds(self._lags_s)}

    def _spawn(self, path: str | None) -> None:
        task = asyncio.create_task(self._ask(path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, path: str | None) -> None:
        answer = await self._client.ask(self._request if path is None else get(path))
        if path is not None:
            self._latencies_s[path].append(answer.latency_s)
            self._num_failed += answer.status != 200
        elif answer.status == REFUSED:
            self._refused_s.append(answer.latency_s)


async def _probe() -> None:
    settings = json.loads(await asyncio.to_thread(sys.stdin.readline))
    with Client(settings["host"], settings["port"]) as client:
        prober = _Prober(client, settings["paths"], settings["request"].encode("latin-1"))
        running = asyncio.create_task(prober.run())
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        running.cancel()
        print(json.dumps(prober.summary()), flush=True)


def main() -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
    gc.disable()  # nothing here refers to itself, and a look would be counted as the server's
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_probe())


if __name__ == "__main__":
    main()
