"""The frontend process: one event loop with the HTTP server, the engine and the launcher's control socket.

It serves from the first moment, though with 503 until the tokenizer is loaded and the scheduler is ready; then it says
`Ready`. `Drain` ends it: new requests are refused, running ones may finish in the time given, the rest get their last
chunk. This module must not know what requests are.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from pathlib import Path

import uvloop

from frontend.app import Application
from frontend.endpoints import discover
from frontend.engine import Engine
from frontend.http_server import HttpServer
from frontend.metrics import FrontendMetrics
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.services import Services
from frontend.token_bytes import UnsupportedTokenizerError
from frontend.tokenizer import Tokenizer
from pagemill.child import Child
from pagemill.config import FrontendConfig
from pagemill.messages import Drain, PeerLost, PeerUp, Progress, Ready, Start
from pagemill.telemetry import get_logger

log = get_logger("frontend.process")


def run(child: Child[FrontendConfig]) -> None:
    """Returns when the process has drained or the launcher is gone."""
    # Requests are tokenized side by side, each on one core: the library's own threads would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(FrontendProcess(child).serve())


class FrontendProcess:
    """Wires the parts together and follows the launcher."""

    def __init__(self, child: Child[FrontendConfig]) -> None:
        config = child.config
        self._child = child
        self._readiness = Readiness()
        metrics = FrontendMetrics(config.model_names[0], config.metrics_compat)
        self._engine = Engine(child.hello(), self._readiness, metrics, on_ready=self._say_ready)
        self._services = Services(config, self._readiness, self._engine, RequestLedger(metrics), metrics)
        self._server = HttpServer(Application(self._services, discover()))
        self._said_ready = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        control = self._child.control
        control.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(control.fileno(), self._read_control)
        self._spawn(self._load_tokenizer())
        try:
            await self._server.serve(sockets=[socket.socket(fileno=self._child.start.listen_fd)])
        finally:
            loop.remove_reader(control.fileno())
            self._engine.close()
            if self._services.text is not None:
                self._services.text.submitter.close()
        if self._failure is not None:
            raise self._failure

    async def _load_tokenizer(self) -> None:
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, Path(self._child.config.model_path))
        except UnsupportedTokenizerError as error:
            self._child.fail(str(error))
        self._services.load_text(tokenizer)
        self._say_ready()

    def _say_ready(self) -> None:
        if self._readiness.state != "ready" or self._said_ready:
            return
        self._said_ready = True
        geometry = self._readiness.require()
        self._child.control.send(Ready(detail=f"serving {self._child.config.model_names[0]}, up to {geometry.max_model_len} tokens"))

    def _read_control(self) -> None:
        while True:
            try:
                message = self._child.control.receive()
            except BlockingIOError:
                return
            match message:
                case None:
                    self._server.should_exit = self._server.force_exit = True
                    asyncio.get_running_loop().remove_reader(self._child.control.fileno())
                    return
                case PeerUp(kind="scheduler"):
                    self._engine.connect(message.address)
                case PeerLost(kind="scheduler"):
                    self._engine.disconnect()
                case Progress():
                    self._readiness.note_progress(message)
                case Drain():
                    self._spawn(self._drain(message.timeout_s))
                case PeerUp() | PeerLost() | Start():
                    pass

    async def _drain(self, timeout_s: float) -> None:
        self._readiness.drain()
        if not await self._engine.wait_idle(timeout_s):
            log.info("drain_timed_out", sequences=self._engine.num_sequences)
            self._engine.end_all()
        self._server.should_exit = True

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
