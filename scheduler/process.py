"""The scheduler's shell: sockets, clock and log around the pure core.

One loop: wait, drain every socket through the core, then ask for one `Turn`, and send what comes out. It
decides nothing. Plans and rows are encoded once and sent to every rank; sends never block, because what is
in flight is bounded by the number of plans and of requests.
"""

from __future__ import annotations

import time
from typing import assert_never

import msgspec
import zmq

from pagemill.channels import Channel, ChannelError
from pagemill.child import Child
from pagemill.config import SchedulerConfig
from pagemill.messages import (
    DebugStateQuery,
    DebugStateReply,
    DecisionsQuery,
    DecisionsReply,
    Drain,
    Effect,
    Event,
    FrontendToScheduler,
    InstallRow,
    PeerLost,
    PeerUp,
    Plan,
    Progress,
    Ready,
    SchedulerReady,
    SchedulerToFrontend,
    SchedulerToWorker,
    Start,
    StatsSnapshot,
    StepOutput,
    Turn,
    WorkerReady,
    WorkerToScheduler,
)
from pagemill.telemetry import get_logger
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.debug_state import debug_state
from scheduler.event_log import EventLog
from scheduler.invariants import check

log = get_logger("scheduler.process")

WorkerChannel = Channel[SchedulerToWorker, WorkerToScheduler]
FrontendChannel = Channel[SchedulerToFrontend, FrontendToScheduler]


class SchedulerProcess:
    """Owns the sockets; the core is built when all workers have reported."""

    def __init__(self, child: Child[SchedulerConfig]) -> None:
        self._child = child
        self._config = child.config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(child.control.fileno(), zmq.POLLIN)
        child.control.socket.setblocking(False)
        self._workers: dict[int, WorkerChannel] = {}
        self._frontends: dict[int, FrontendChannel] = {}
        self._incarnations: dict[int, int] = {}  #: of the frontends
        self._told: set[int] = set()  #: frontends that have been sent SchedulerReady
        self._ready: dict[int, WorkerReady] = {}
        self._core: SchedulerCore | None = None
        self._log: EventLog | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._schedule_s = 0.0
        self._deadline: float | None = None  #: of draining, once it is asked for

    def run(self) -> None:
        """Until the launcher hangs up, or what it wanted finished is finished."""
        try:
            while self._drain_control() and not self._is_drained():
                self._drain_workers()
                self._drain_frontends()
                if self._core is not None:
                    self._handle(Turn())
                self._poller.poll(self._timeout_ms())
        finally:
            if self._log is not None:
                self._log.close()
            self._context.destroy(linger=0)

    def _timeout_ms(self) -> int:
        """Until the next snapshot is due, if nothing arrives before."""
        if self._core is None:
            return 1000
        config, counters = self._core.config, self._core.counters
        return int(1000 * (config.snapshot_interval_s if counters.changed else config.idle_snapshot_interval_s))

    # --- in --------------------------------------------------------------------------------------------

    def _drain_control(self) -> bool:
        """False when the launcher is gone or wants us gone."""
        while True:
            try:
                message = self._child.control.receive()
            except BlockingIOError:
                return True
            match message:
                case None:
                    return False
                case PeerUp():
                    self._connect(message)
                case PeerLost():
                    self._disconnect(message)
                case Drain():
                    self._deadline = time.monotonic() + message.timeout_s
                    self._handle(message)
                case Start() | Progress():
                    pass  # Start was consumed on entry; progress is for frontends
                case _:
                    assert_never(message)

    def _is_drained(self) -> bool:
        if self._deadline is None:
            return False
        return self._core is None or not self._core.sequences or time.monotonic() >= self._deadline

    def _drain_workers(self) -> None:
        for channel in list(self._workers.values()):
            while (message := channel.receive()) is not None:
                if isinstance(message, WorkerReady):
                    self._worker_ready(message)
                else:
                    self._handle(message)

    def _drain_frontends(self) -> None:
        for index, channel in list(self._frontends.items()):
            try:
                while (message := channel.receive()) is not None:
                    self._from_frontend(channel, message)
                self._tell_ready(index, channel)
            except ChannelError as error:
                self._drop_frontend(index, str(error))

    def _from_frontend(self, channel: FrontendChannel, message: FrontendToScheduler) -> None:
        if self._core is None:
            log.warning("message_before_ready", kind=type(message).__name__)
        elif isinstance(message, DebugStateQuery):
            channel.send(DebugStateReply(message.query, debug_state(self._core)))
        elif isinstance(message, DecisionsQuery):
            channel.send(DecisionsReply(message.query, time.monotonic(), self._core.preemption.decisions.newest(message.limit)))
        else:
            self._handle(message)

    def _handle(self, event: Event) -> None:
        if self._core is None:
            return
        now = time.monotonic()
        effects: list[Effect] = []
        try:
            effects = self._core.handle(event, now)
        finally:  # above all the event that the core dies of: a replay dies of it too
            if self._log is not None:
                self._log.append(now, event, effects)
        if self._config.check_invariants:
            check(self._core)
        for effect in effects:
            self._carry_out(effect)
        self._schedule_s += time.monotonic() - now

    # --- out -------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case InstallRow() | Plan():
                frame = self._encoder.encode(effect)
                for worker in self._workers.values():
                    worker.send_frame(frame)
            case StepOutput():
                self._send_frontend(effect.frontend, self._encoder.encode(effect))
            case StatsSnapshot():
                seconds = {**effect.step_seconds, "schedule": self._schedule_s}
                dropped = effect.dropped_messages + self._num_undecodable()
                frame = self._encoder.encode(msgspec.structs.replace(effect, step_seconds=seconds, dropped_messages=dropped))
                for index in sorted(self._told):
                    self._send_frontend(index, frame)
                if self._log is not None:
                    self._log.flush()
            case _:
                assert_never(effect)

    def _num_undecodable(self) -> int:
        """Frames that the channels could not decode and dropped."""
        return sum(worker.num_dropped for worker in self._workers.values()) + sum(frontend.num_dropped for frontend in self._frontends.values())

    def _send_frontend(self, index: int, frame: bytes) -> None:
        """A frontend that cannot be reached is gone or stuck, whatever the launcher has noticed yet: it is dropped."""
        channel = self._frontends.get(index)
        if channel is None:
            return
        try:
            channel.send_frame(frame)
        except ChannelError as error:
            self._drop_frontend(index, str(error))

    def _drop_frontend(self, index: int, reason: str) -> None:
        log.warning("frontend_dropped", index=index, reason=reason)
        incarnation = self._incarnations[index]
        self._close_frontend(index)
        self._handle(PeerLost("frontend", index, incarnation))

    def _tell_ready(self, index: int, channel: FrontendChannel) -> None:
        if self._core is None or not channel.greeted or index in self._told:
            return
        config = self._core.config
        channel.send(
            SchedulerReady(
                epoch=config.epoch,
                max_model_len=self._core.longest,
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                num_swap_slots=config.num_swap_slots,
                max_num_seqs=config.max_num_seqs,
                deterministic=all(ready.deterministic for ready in self._ready.values()),
            )
        )
        self._told.add(index)

    # --- peers -----------------------------------------------------------------------------------------

    def _connect(self, peer: PeerUp) -> None:
        hello = self._child.hello()
        if peer.kind == "worker":
            worker: WorkerChannel = Channel(self._context, peer.address, bind=True, hello=hello, peer="worker", incoming=WorkerToScheduler)
            self._workers[peer.index] = worker
            self._poller.register(worker.socket, zmq.POLLIN)
        elif peer.kind == "frontend":
            frontend: FrontendChannel = Channel(self._context, peer.address, bind=True, hello=hello, peer="frontend", incoming=FrontendToScheduler)
            self._frontends[peer.index] = frontend
            self._incarnations[peer.index] = peer.incarnation
            self._poller.register(frontend.socket, zmq.POLLIN)

    def _disconnect(self, peer: PeerLost) -> None:
        if peer.kind == "frontend":
            self._close_frontend(peer.index)
        self._handle(peer)

    def _close_frontend(self, index: int) -> None:
        channel = self._frontends.pop(index, None)
        self._told.discard(index)
        if channel is not None:
            self._poller.unregister(channel.socket)
            channel.close()

    def _worker_ready(self, ready: WorkerReady) -> None:
        if self._core is not None:
            log.warning("worker_ready_again", rank=ready.rank)  # a restart of workers is a new epoch, which does not exist yet
            return
        self._ready[ready.rank] = ready
        if len(self._ready) < self._config.num_workers:
            return
        reports = list(self._ready.values())
        config = CoreConfig(
            num_blocks=min(report.num_blocks for report in reports),
            block_size=ready.block_size,
            max_model_len=min(report.max_model_len for report in reports),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_num_queued=self._config.max_num_queued,
            max_plans_in_flight=self._config.max_plans_in_flight,
            num_swap_slots=min(report.num_swap_slots for report in reports),
            preemption=self._config.preemption,
            block_bytes=max(report.block_bytes for report in reports),
            prefill_tok_s=min(report.prefill_tok_s for report in reports),
            swap_out_bytes_s=min(report.swap_out_bytes_s for report in reports),
            swap_in_bytes_s=min(report.swap_in_bytes_s for report in reports),
            num_workers=self._config.num_workers,
            scheduling_policy=self._config.scheduling_policy,
            prefix_caching=self._config.prefix_caching,
            epoch=self._child.start.epoch,
        )
        self._core = SchedulerCore(config)
        if self._config.event_log:
            self._log = EventLog(self._config.event_log, config)
        log.debug("core_built", num_blocks=config.num_blocks, block_size=config.block_size, max_model_len=config.max_model_len)
        self._child.control.send(Ready(f"{config.num_blocks} KV blocks of {config.block_size} tokens"))
