"""A whole frontend in this process: the real application behind a real HTTP server, against a fake scheduler.

`running_frontend` serves on an ephemeral port from a thread with its own event loop, and gives base URL, services and
the fake. Everything is real but the launcher and the scheduler.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import uvloop

from frontend.app import Application
from frontend.endpoints import discover
from frontend.engine import Engine
from frontend.http_server import HttpServer
from frontend.metrics import FrontendMetrics
from frontend.metrics_exchange import MetricsExchange
from frontend.overload import Overload
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.services import Services
from frontend.tokenizer import Tokenizer
from frontend.waiting_room import WaitingRoom
from pagemill.config import FrontendConfig
from tests.helpers.fake_scheduler import DEADLINE_S, FakeScheduler
from tests.helpers.tiny_model import tiny_model_path

MODEL = "tiny"


def frontend_config(**changes: object) -> FrontendConfig:
    config = FrontendConfig(
        model_path=str(tiny_model_path()),
        model_names=(MODEL, "org/tiny-alias"),
        model_fingerprint=b"f" * 32,
        api_keys=(),
        admin_keys=(),
        cache_secret=b"s" * 32,
        prefix_caching=True,
        shared_prefix_cache=False,
        priority_allowed=False,
        strict_request=False,
        metrics_compat="none",
        num_frontends=1,
        max_queue_time_s=0,
        max_queued_tokens=100_000,
        max_num_queued=1024,
        max_connections=1000,
        log_format="json",
        log_level="error",
        log_requests=False,
    )
    return msgspec.structs.replace(config, **changes)


@dataclass
class RunningFrontend:
    url: str
    port: int
    services: Services
    scheduler: FakeScheduler
    client: httpx.Client

    loop: asyncio.AbstractEventLoop

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def call_soon(self, work: Callable[[], object]) -> None:
        """In the frontend's event loop."""
        self.loop.call_soon_threadsafe(work)

    def run(self, work: Callable[[], object]) -> None:
        """In the frontend's event loop, until it is done."""
        done = threading.Event()

        def do() -> None:
            try:
                work()
            finally:
                done.set()

        self.call_soon(do)
        assert done.wait(DEADLINE_S), "the event loop stands still"

    def lose_scheduler(self) -> None:
        """As `PeerLost` says it."""
        self.run(self.services.engine.disconnect)

    def meet(self, scheduler: FakeScheduler) -> None:
        """As `PeerUp` says it. Waits until the frontend knows that this one is ready."""
        self.run(lambda: self.services.engine.connect(scheduler.address))
        self.scheduler = scheduler
        self.wait_ready()

    def wait_ready(self) -> None:
        self.wait_until(lambda: self.client.get("/readyz").status_code == 200, "the frontend does not become ready")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        pause = threading.Event()
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, what
            pause.wait(0.005)


@contextmanager
def running_frontend(scheduler: FakeScheduler | None = None, *, connect: bool = True, **changes: object) -> Iterator[RunningFrontend]:
    """Serves until the block ends. Waits for readiness if the fake is to be ready."""
    config = frontend_config(**changes)
    fake = FakeScheduler() if scheduler is None else scheduler
    thread = _Thread(config, fake.address if connect else None)
    with fake:
        thread.start()
        assert thread.serving.wait(DEADLINE_S), "the frontend does not serve"
        with httpx.Client(base_url=thread.url, timeout=DEADLINE_S) as client:
            running = RunningFrontend(thread.url, thread.port, thread.services, fake, client, thread.loop)
            if connect and fake.starts_ready:
                running.wait_ready()
            try:
                yield running
            finally:
                thread.stop()


class _Thread(threading.Thread):
    services: Services
    server: HttpServer
    loop: asyncio.AbstractEventLoop

    def __init__(self, config: FrontendConfig, address: str | None) -> None:
        super().__init__(name="frontend", daemon=True)
        self._config = config
        self._address = address
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.serving = threading.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.join(DEADLINE_S)
        assert not self.is_alive(), "the frontend does not end"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        config, readiness = self._config, Readiness()
        metrics, overload = FrontendMetrics(config.model_names[0], config.metrics_compat), Overload(config.max_num_queued)
        room = WaitingRoom(config.max_num_queued, config.max_queued_tokens)
        room.retry_after_s = overload.retry_after_s
        engine = Engine(FakeScheduler.hello("frontend"), readiness, (metrics, overload), room)
        overload.num_unheard = lambda: engine.num_unheard
        self.services = Services(config, readiness, engine, RequestLedger(metrics), metrics, MetricsExchange(0, 1, metrics.own), overload)
        self.services.load_text(Tokenizer(Path(config.model_path)))
        application = Application(self.services, discover())
        self.server = HttpServer(application, config.max_connections, application.refusal)
        metrics.watch(engine, self.server)
        if self._address is not None:
            engine.connect(self._address)
        self.loop.call_later(0.01, self.serving.set)
        try:
            await self.server.serve(sockets=[self._socket])
        finally:
            engine.close()
            assert self.services.text is not None
            self.services.text.submitter.close()
