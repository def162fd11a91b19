"""The worker's shell: messages in, plans run, acknowledgements out.

`Worker.handle` turns one message into at most one reply and is all there is to test without a socket;
`serve` connects it to the scheduler's channel and to the control socket. Messages of an older epoch are
dropped and counted; a newer epoch means a new core, which knows none of the old rows. Must not know
requests or policies.
"""

from __future__ import annotations

from typing import assert_never

import zmq

from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.messages import Drain, InstallRow, PeerUp, Plan, Ready, RowMissing, SchedulerToWorker, StepDone, WorkerReady, WorkerToScheduler
from pagemill.telemetry import get_logger
from workers.loader import Loaded
from workers.runner import Runner

SchedulerChannel = Channel[WorkerToScheduler, SchedulerToWorker]


class Worker:
    """One rank's answers. Stateless between plans but for the rows, which may be dropped at any time."""

    def __init__(self, runner: Runner, rank: int, epoch: int) -> None:
        self.num_dropped = 0  #: messages of older epochs
        self._runner, self._rank, self._epoch = runner, rank, epoch

    def handle(self, message: SchedulerToWorker) -> WorkerToScheduler | None:
        """The reply to one message, if it has one."""
        match message:
            case InstallRow():
                if self._is_current(message.epoch):
                    self._runner.rows.install(message)
                return None
            case Plan():
                return self._run(message) if self._is_current(message.epoch) else None
            case _:
                assert_never(message)

    def _run(self, plan: Plan) -> StepDone | RowMissing:
        missing = self._runner.rows.missing(plan)
        if missing is not None:
            return RowMissing(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, row=missing.row, version=missing.version)
        results, seconds = self._runner.run(plan)
        return StepDone(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, results=results, seconds=seconds)

    def _is_current(self, epoch: int) -> bool:
        if epoch < self._epoch:
            self.num_dropped += 1
            return False
        if epoch > self._epoch:
            self._epoch = epoch
            self._runner.rows.clear()
        return True


class _Link:
    """The channel to the scheduler that exists now. A new incarnation of the scheduler is a new channel."""

    def __init__(self, child: Child[WorkerConfig], ready: WorkerReady, poller: zmq.Poller) -> None:
        self._child, self._ready, self._poller = child, ready, poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.channel: SchedulerChannel | None = None

    def connect(self, address: str) -> None:
        self.close()
        self.channel = Channel(self._context, address, bind=False, hello=self._child.hello(), peer="scheduler", incoming=SchedulerToWorker)
        self._poller.register(self.channel.socket, zmq.POLLIN)
        self.channel.send(self._ready)

    def answer(self, worker: Worker) -> None:
        """Handles all that has arrived."""
        while self.channel is not None and (message := self.channel.receive()) is not None:
            reply = worker.handle(message)
            if reply is not None:
                self.channel.send(reply)

    def close(self) -> None:
        if self.channel is not None:
            self._poller.unregister(self.channel.socket)
            self.channel.close()
            self.channel = None


def serve(child: Child[WorkerConfig], loaded: Loaded) -> None:
    """Answers the scheduler until the launcher says `Drain`, which it does when nothing runs any more, or is gone."""
    log = get_logger("workers.process")
    poller = zmq.Poller()
    poller.register(child.control.fileno(), zmq.POLLIN)
    worker = Worker(loaded.runner, loaded.ready.rank, child.start.epoch)
    link = _Link(child, loaded.ready, poller)
    child.control.send(Ready(f"{loaded.ready.num_blocks} blocks of {loaded.ready.block_size} tokens"))
    while True:
        events = dict(poller.poll())
        if child.control.fileno() in events:
            frame = child.control.receive()
            if frame is None or isinstance(frame, Drain):
                log.info("stopped", reason="drain" if frame else "launcher is gone", dropped=worker.num_dropped)
                return link.close()
            if isinstance(frame, PeerUp) and frame.kind == "scheduler":
                link.connect(frame.address)
        link.answer(worker)
