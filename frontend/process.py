"""The frontend process: one event loop with the HTTP server, the engine and the launcher's control socket.

It serves from the first moment, though with 503 until the tokenizer is loaded and the scheduler is ready; then it says
`Ready`. Other processes come and go while it serves. `Drain` ends it: new requests are refused, running ones may finish and
be sent in the time given, the rest get their last chunk. This module must not know what requests are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path

import uvloop

from frontend.app import Application
from frontend.connection_limit import raise_descriptor_limit
from frontend.endpoints import discover
from frontend.engine import Engine
from frontend.garbage import GarbageWatch
from frontend.http_server import HttpServer
from frontend.metrics import FrontendMetrics
from frontend.metrics_exchange import MetricsExchange
from frontend.overload import Overload
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.services import Services
from frontend.token_bytes import UnsupportedTokenizerError
from frontend.tokenizer import Tokenizer
from frontend.waiting_room import WaitingRoom
from pagemill.child import Child
from pagemill.config import FrontendConfig
from pagemill.messages.control import Drain, LauncherToChild, PeerLost, PeerReady, PeerUp, Progress, Reload, Start
from pagemill.telemetry import get_logger

log = get_logger("frontend.process")

#: How often the event loop shows the launcher that it turns.
_ALIVE_S = 0.5
#: A frontend that replaces another begins to listen when it is ready, or after this time.
_TAKE_OVER_S = 2.0
#: While it drains, how often it looks whether everything has been sent.
_LOOK_S = 0.05


def run(child: Child[FrontendConfig]) -> None:
    """Returns when the process has drained or the launcher is gone."""
    # Requests are tokenized side by side, each on one core: the library's own threads would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(FrontendProcess(child).serve())


class FrontendProcess:
    """Wires the parts together and follows the launcher."""

    def __init__(self, child: Child[FrontendConfig]) -> None:
        config = child.config
        self._child = child
        self._readiness = Readiness()
        index = child.start.index
        self._metrics = FrontendMetrics(config.model_names[0], config.metrics_compat, str(index) if config.num_frontends > 1 else None)
        self._exchange = MetricsExchange(index, config.num_frontends, self._metrics.own)
        overload = Overload(config.max_num_queued)
        room = WaitingRoom(config.max_num_queued, config.max_queued_tokens)
        room.retry_after_s = overload.retry_after_s
        self._engine = Engine(child.hello(), self._readiness, (self._metrics, overload), room, on_ready=lambda: self._or_end(self._say_ready))
        ledger = RequestLedger(self._metrics)
        self._services = Services(config, self._readiness, self._engine, ledger, self._metrics, self._exchange, overload)
        application = Application(self._services, discover())
        self._server = HttpServer(application, config.max_connections, application.refusal)
        self._metrics.watch(self._engine, self._server)
        overload.num_unheard = lambda: self._engine.num_unheard
        self._garbage = GarbageWatch(lambda: self._engine.num_sequences == 0)
        self._said_ready = False
        self._is_ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        control = self._child.control
        control.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(control.fileno(), self._or_end, self._read_control)
        self._spawn(self._load_tokenizer())
        self._spawn(self._say_alive())
        if self._child.start.incarnation:
            await self._wait_until_ready()
        try:
            await self._server.serve(sockets=[socket.socket(fileno=self._child.start.listen_fd)])
        finally:
            loop.remove_reader(control.fileno())
            self._engine.close()
            self._exchange.close()
            if self._services.text is not None:
                self._services.text.submitter.close()
        if self._failure is not None:
            raise self._failure

    async def _wait_until_ready(self) -> None:
        """One that takes the place of another leaves connections to its siblings, or in the kernel's queue, until it can serve them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TAKE_OVER_S):
                await self._is_ready.wait()

    async def _load_tokenizer(self) -> None:
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, Path(self._child.config.model_path))
        except UnsupportedTokenizerError as error:
            self._child.fail(str(error))
        self._services.load_text(tokenizer)
        self._say_ready()

    async def _say_alive(self) -> None:
        while True:
            self._child.alive()
            self._garbage.look()
            await asyncio.sleep(_ALIVE_S)

    def _say_ready(self) -> None:
        if self._said_ready or not self._readiness.may_begin:
            return
        self._said_ready = True
        self._garbage.settle()
        self._is_ready.set()
        geometry = self._readiness.require()
        self._child.say_ready(f"serving {self._child.config.model_names[0]}, up to {geometry.max_model_len} tokens")

    def _read_control(self) -> None:
        try:
            while (message := self._child.receive()) is not None:
                self._obey(message)
        except BlockingIOError:
            return
        self._stop_at_once()

    def _or_end(self, work: Callable[[], None]) -> None:
        """For what the launcher relies on: a process that goes on without it could not be reached, or would never count as ready."""
        try:
            work()
        except Exception as error:
            self._failure = error
            self._stop_at_once()

    def _obey(self, message: LauncherToChild) -> None:
        match message:
            case PeerUp(kind="scheduler"):
                self._engine.connect(message.address)
                self._spawn(self._exchange.open(Path(message.address.removeprefix("ipc://")).parent))
            case PeerLost():
                self._peer_lost(message)
            case Progress():
                self._readiness.note_progress(message)
            case Reload():
                self._services.take_over(self._child.apply_reload(message))
                self._server.limit.maximum = self._services.config.max_connections
                log.info("reloaded")
            case Drain():
                self._spawn(self._drain(message.timeout_s))
            case PeerUp() | PeerReady() | Start():
                pass

    def _peer_lost(self, message: PeerLost) -> None:
        self._metrics.peer_lost(message.kind)
        self._readiness.peer_lost(message.kind, message.incarnation)
        if message.kind == "scheduler":
            self._engine.disconnect()

    def _stop_at_once(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        asyncio.get_running_loop().remove_reader(self._child.control.fileno())

    async def _drain(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._readiness.drain()
        # Less time may have been given meanwhile, and what was left has then been ended already.
        if not await self._engine.wait_idle(timeout_s) and self._engine.num_sequences:
            log.info("drain_timed_out", sequences=self._engine.num_sequences)
            self._engine.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._wait_until_sent()
        self._server.should_exit = True

    async def _wait_until_sent(self) -> None:
        """A reply has its end here long before a slow client has it. Whoever only asks or uploads is not waited for."""
        while self._services.ledger.is_generating or self._server.has_unsent:
            await asyncio.sleep(_LOOK_S)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs in the background; what goes wrong in there ends the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._server.should_exit = self._server.force_exit = True
