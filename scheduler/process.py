"""The scheduler's shell: sockets, clock and log around the pure core.

One loop: wait, drain every socket through the core's keeper, then ask for one `Turn`, and send what comes out: to workers at
once, to frontends when there is nothing left to plan. It decides nothing. Plans and rows are encoded once and sent to every
rank; sends never block, because what is in flight is bounded by the number of plans and of requests. A step past its deadline
is reported to the launcher, who replaces the workers.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import assert_never

import msgspec
import zmq

from pagemill.child import Child
from pagemill.config import SchedulerConfig
from pagemill.ids import NONE
from pagemill.injection import reach
from pagemill.messages.control import Drain, Explained, PeerLost, PeerReady, PeerUp, Progress, Reload, Start, Stuck
from pagemill.messages.frontend import (
    AddRequest,
    DebugStateQuery,
    DebugStateReply,
    DecisionsQuery,
    DecisionsReply,
    FrontendToScheduler,
    SchedulerReady,
    StatsSnapshot,
    StepOutput,
)
from pagemill.messages.worker import InstallRow, Plan, RowMissing, StepDone, TransferDone, WorkerReady, WorkerToScheduler
from pagemill.supervision import Patience
from pagemill.telemetry import get_logger
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.debug_state import debug_state, debug_state_without_core
from scheduler.event_log import EventLogs
from scheduler.events import Adopt, Distrust, Effect, Event, Turn
from scheduler.keeper import CoreKeeper
from scheduler.peers import Peers
from scheduler.step_watch import StepWatch
from scheduler.surviving_kv import SurvivingKv
from scheduler.worker_group import RanksDiffer, core_config

log = get_logger("scheduler.process")

#: With nothing to do, the books are checked this often.
_AUDIT_EVERY_S = 60.0


class SchedulerProcess:
    """Owns the sockets. Workers and frontends come and go; the keeper has the sequences."""

    def __init__(self, child: Child[SchedulerConfig]) -> None:
        self._child = child
        self._config = child.config
        self._poller = zmq.Poller()
        self._poller.register(child.control.fileno(), zmq.POLLIN)
        child.control.socket.setblocking(False)
        self._peers = Peers(child.hello(), self._poller)
        self._peers.on_lost, self._peers.on_unusable = self._replace_frontend, self._replace_worker
        self._ready: dict[int, WorkerReady] = {}
        self._kv = SurvivingKv(_map(child.start.directory_fd), on_write=lambda: reach("scheduler.directory"))
        self._logs = EventLogs(self._config.event_log, child.start.incarnation, child.start.epoch)
        self._keeper = CoreKeeper(
            child.start.epoch,
            max_num_held=self._config.max_num_queued + self._config.max_num_seqs,
            max_tokens_held=self._config.max_queued_tokens,
            check_invariants=self._config.check_invariants,
        )
        self._keeper.on_core, self._keeper.on_event, self._keeper.on_failure = self._on_core, self._logs.append, self._on_failure
        # A worker that has lost its scheduler finishes what it was sent before it meets the next one.
        num_tokens = self._config.max_num_batched_tokens * self._config.max_plans_in_flight
        self._reports: Patience[int] = Patience(self._config.step_timeout_s + self._config.step_timeout_s_per_token * num_tokens)  #: ranks that owe one
        self._watch = StepWatch(self._config.step_timeout_s, self._config.step_timeout_s_per_token, self._config.num_workers)
        self._schedule_s = 0.0  #: spent in the present core
        self._num_dropped = 0  #: frames that nobody could read, since it exists
        self._next_audit = 0.0
        self._deadline: float | None = None  #: of draining, once it is asked for
        self._untold: list[StepOutput | StatsSnapshot] = []  #: for frontends, in order: they hear of a step when the next one is under way

    def run(self) -> None:
        """Until the launcher hangs up, or what it wanted finished is finished."""
        try:
            while self._drain_control() and not self._is_drained():
                for rank, answer in self._peers.from_workers():
                    self._from_worker(rank, answer)
                for frontend, request in self._peers.from_frontends():
                    self._from_frontend(frontend, request)
                self._tell_ready()
                self._handle(Turn())
                self._child.alive()
                self._look_after()
                self._tell()
                self._poller.poll(self._timeout_ms())
        finally:
            self._logs.close()
            self._peers.close()

    def _timeout_ms(self) -> int:
        """Until the next snapshot is due, if nothing arrives before."""
        core = self._keeper.core
        if core is None:
            return 1000
        return int(1000 * (core.config.snapshot_interval_s if core.counters.changed else core.config.idle_snapshot_interval_s))

    def _look_after(self) -> None:
        """Workers that hang are reported, once; with nothing to do, the books are checked."""
        now = time.monotonic()
        ranks, reason = self._watch.late(now)
        if ranks:
            self._watch.clear()
        for rank in ranks:
            self._replace_worker(rank, reason)
        for rank in self._reports.exhausted():
            self._reports.end(rank)
            self._replace_worker(rank, f"did not report to the scheduler in {self._reports.limit_s:.0f} s")
        if self._keeper.num_sequences:
            self._next_audit = now + _AUDIT_EVERY_S
        elif now >= self._next_audit:
            self._next_audit = now + _AUDIT_EVERY_S
            self._carry_out(self._keeper.audit(now))

    # --- in --------------------------------------------------------------------------------------------

    def _drain_control(self) -> bool:
        """False when the launcher is gone or wants us gone."""
        while True:
            try:
                message = self._child.receive()
            except BlockingIOError:
                return True
            match message:
                case None:
                    return False
                case PeerUp():
                    self._peers.connect(message)
                case PeerReady():
                    self._await_report(message)
                case PeerLost():
                    self._lost(message)
                case Drain():
                    self._deadline = time.monotonic() + message.timeout_s
                    self._handle(message)
                case Reload():
                    self._child.apply_reload(message)
                case Start() | Progress():
                    pass  # Start was consumed on entry; progress is for frontends
                case _:
                    assert_never(message)

    def _await_report(self, peer: PeerReady) -> None:
        """A worker that has loaded has no reason to keep us waiting, unless it has reported already."""
        if peer.kind == "worker" and peer.index not in self._ready and peer.incarnation == self._peers.incarnation("worker", peer.index):
            self._reports.begin(peer.index)

    def _is_drained(self) -> bool:
        if self._deadline is None:
            return False
        return not self._keeper.num_sequences or time.monotonic() >= self._deadline

    def _lost(self, peer: PeerLost) -> None:
        if not self._peers.disconnect(peer):
            return
        if peer.kind == "frontend":
            self._handle(peer)
        elif peer.kind == "worker":
            # One rank's end is the group's: the others hold parts of what it computed.
            self._watch.clear()
            self._ready.clear()
            self._reports.end(peer.index)
            before = self._keeper.num_explained
            self._carry_out(self._keeper.workers_lost(time.monotonic()))
            if self._keeper.num_explained > before:
                self._child.say(Explained(self._keeper.num_explained - before))

    def _replace_frontend(self, peer: PeerLost) -> None:
        """It cannot be reached, and what it was served is gone: one that lives on would wait for ever."""
        self._child.say(Stuck("frontend", peer.index, peer.incarnation, "took no messages"))
        self._handle(peer)

    def _replace_worker(self, rank: int, reason: str) -> None:
        log.error("worker_stuck", rank=rank, reason=reason)
        self._child.say(Stuck("worker", rank, self._peers.incarnation("worker", rank), reason))

    def _from_worker(self, rank: int, message: WorkerToScheduler) -> None:
        if message.rank != rank:
            self._replace_worker(rank, f"speaks for rank {message.rank}")
            return
        match message:
            case WorkerReady():
                self._worker_ready(message)
                return
            case StepDone() | RowMissing():
                reach("scheduler.step_done")
                if message.epoch == self._keeper.epoch:
                    self._watch.answered(message.plan_id, message.rank, time.monotonic())
            case TransferDone():
                reach("scheduler.transfer_done")
                if message.epoch == self._keeper.epoch:
                    self._watch.copied(message, time.monotonic())
            case _:
                assert_never(message)
        self._handle(message)

    def _from_frontend(self, index: int, message: FrontendToScheduler) -> None:
        core = self._keeper.core
        if isinstance(message, DebugStateQuery):
            state = debug_state(core) if core is not None else debug_state_without_core(self._keeper)
            self._peers.send_frontend(index, DebugStateReply(message.query, state))
        elif isinstance(message, DecisionsQuery):
            decisions = core.preemption.decisions.newest(message.limit) if core is not None else []
            self._peers.send_frontend(index, DecisionsReply(message.query, time.monotonic(), decisions))
        else:
            if isinstance(message, AddRequest):
                reach("scheduler.add")
            self._handle(message)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        effects = self._keeper.handle(event, now)
        if effects:
            self._carry_out(effects)
        self._schedule_s += time.monotonic() - now

    # --- the core comes and goes -----------------------------------------------------------------------

    def _worker_ready(self, ready: WorkerReady) -> None:
        if self._keeper.core is not None or not 0 <= ready.rank < self._config.num_workers:
            log.warning("worker_ready_unasked", rank=ready.rank)
            return
        self._ready[ready.rank] = ready
        self._reports.end(ready.rank)
        if len(self._ready) < self._config.num_workers:
            return
        reach("scheduler.workers_ready")
        try:
            config = core_config(self._config, self._ready)
        except RanksDiffer as error:
            self._child.fail(str(error))
        self._carry_out(self._keeper.workers_ready(config, self._adopted(config), time.monotonic()))
        log.debug("core_built", num_blocks=config.num_blocks, block_size=config.block_size, max_model_len=config.max_model_len)
        self._child.say_ready(f"{config.num_blocks} KV blocks of {config.block_size} tokens", self._peers.incarnation("worker", 0))

    def _adopted(self, config: CoreConfig) -> Adopt | None:
        """What KV has outlived the former core, or the former scheduler."""
        try:
            adopt = self._kv.open(config, self._peers.incarnation("worker", 0))
        except ValueError as error:  # more blocks than the launcher has provided for: then nothing outlives the scheduler
            log.warning("no_kv_directory", error=str(error))
            return None
        if adopt is not None:
            log.info("kv_adopted", blocks=len(adopt.blocks), swap_slots=len(adopt.swap_slots))
        return adopt

    def _on_core(self, core: SchedulerCore) -> None:
        """A core is about to get its first event. It counts from zero, and so do we."""
        self._schedule_s, self._num_dropped = 0.0, 0
        self._kv.follow(core)
        self._logs.begin(core.config)

    def _on_failure(self, error: Exception) -> None:
        """The core is going to be rebuilt, and nothing that it said of KV is to be believed."""
        log.error("core_failed", error=str(error), recent=list(self._keeper.recent), exc_info=error)
        self._watch.clear(still_computing=True)
        self._kv.disown()

    def _distrust(self, effect: Distrust) -> None:
        """The workers are to be replaced. What they have left in the arena goes with them: nobody knows since when they are wrong."""
        self._watch.clear()
        self._kv.disown()
        self._replace_worker(effect.rank, effect.reason)

    # --- out -------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case InstallRow():
                    self._peers.send_workers(effect)
                case Plan():
                    reach("scheduler.plan")
                    self._watch.sent(effect, time.monotonic())
                    self._peers.send_workers(effect)
                    reach("scheduler.planned")
                case StepOutput() | StatsSnapshot():
                    self._untold.append(effect)
                case Distrust():
                    self._distrust(effect)
                case _:
                    assert_never(effect)

    def _tell(self) -> None:
        """Frontends read and write while the workers compute: told before the plan is sent, they would take the workers' processors first."""
        untold, self._untold = self._untold, []
        for effect in untold:
            if isinstance(effect, StatsSnapshot):
                self._send_snapshot(effect)
                continue
            reach("scheduler.output")
            self._peers.send_frontend(effect.frontend, effect)
            reach("scheduler.output_sent")

    def _send_snapshot(self, snapshot: StatsSnapshot) -> None:
        self._num_dropped += self._peers.take_dropped()
        seconds = {**snapshot.step_seconds, "schedule": self._schedule_s}
        snapshot = msgspec.structs.replace(snapshot, step_seconds=seconds, dropped_messages=snapshot.dropped_messages + self._num_dropped)
        self._peers.send_snapshot(snapshot)
        self._logs.flush()

    def _tell_ready(self) -> None:
        """Every frontend hears once of each core."""
        core = self._keeper.core
        untold = self._peers.untold(core.config.epoch) if core is not None else []
        if core is None or not untold:
            return
        self._tell()  # what a former core had to say comes before its successor
        config = core.config
        ready = SchedulerReady(
            epoch=config.epoch,
            max_model_len=core.longest,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_swap_slots=config.num_swap_slots,
            max_num_seqs=config.max_num_seqs,
            deterministic=all(ready.deterministic for ready in self._ready.values()),
            worker_incarnation=self._peers.incarnation("worker", 0),
            groups=config.groups,
        )
        for index in untold:
            self._peers.tell_ready(index, ready)


def _map(fd: int) -> memoryview | None:
    """The memory behind a descriptor, writable and shared; None without one."""
    if fd == NONE:
        return None
    memory = memoryview(mmap.mmap(fd, 0))
    os.close(fd)
    return memory
