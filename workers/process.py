"""The worker's shell: messages in, transfers and plans carried out, acknowledgements out.

`Worker.handle` turns one message into its replies, `Worker.poll` tells what has been copied meanwhile, and
they are all there is to test without a socket; `serve` connects them to the scheduler's channel and to the
control socket. Messages of an older epoch, and those that come late or twice, are dropped and counted; a newer
epoch means a new core, which knows none of the old rows and transfers. The scheduler may go and another one
come: what is being computed and copied is finished, and told to nobody. Must not know requests or policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import zmq

from pagemill import injection
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.messages import (
    NO_PLAN,
    NONE,
    Drain,
    InstallRow,
    LauncherToChild,
    PeerLost,
    PeerUp,
    Plan,
    PlanId,
    Reload,
    RowMissing,
    SchedulerToWorker,
    StepDone,
    TransferDone,
    WorkerReady,
    WorkerToScheduler,
)
from pagemill.telemetry import get_logger
from workers.loader import Loaded
from workers.runner import Runner

SchedulerChannel = Channel[WorkerToScheduler, SchedulerToWorker]


class Worker:
    """One rank's answers. Stateless between plans but for the rows, which may be dropped at any time, and what is being copied."""

    def __init__(self, runner: Runner, rank: int, epoch: int) -> None:
        self.num_dropped = 0  #: messages of older epochs, and those that came late or twice
        self._runner, self._rank, self._epoch = runner, rank, epoch
        self._last_plan = NO_PLAN  #: of this epoch; their numbers rise

    def fileno(self) -> int:
        """Readable while `poll` has something to say."""
        return self._runner.swapper.fileno()

    def handle(self, message: SchedulerToWorker) -> list[WorkerToScheduler]:
        """The replies to one message, in order. A plan's acknowledgement is the last of them, after all transfers known to be done."""
        match message:
            case InstallRow():
                if self._is_current(message.epoch):
                    injection.reach("worker.install")
                    self.num_dropped += not self._runner.rows.install(message)
                return []
            case Plan():
                return self._carry_out(message) if self._is_current(message.epoch) and self._is_next(message.plan_id) else []
            case _:
                assert_never(message)

    def poll(self) -> list[TransferDone]:
        """What has been copied, or could not be, since the last look."""
        finished = self._runner.swapper.take_done()
        if finished:
            injection.reach("transfer.done")
        return [TransferDone(epoch=self._epoch, rank=self._rank, transfer_ids=tuple(done.transfer_ids), ok=done.ok, seconds=done.seconds) for done in finished]

    def _carry_out(self, plan: Plan) -> list[WorkerToScheduler]:
        injection.reach("worker.plan")
        waited = self._runner.swapper.start(plan.transfers, plan.plan_id)
        missing = self._runner.rows.missing(plan)
        answer: StepDone | RowMissing
        if missing is None:
            results, seconds = self._runner.run(plan)
            answer = StepDone(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, results=results, seconds={"swap_wait": waited} | seconds)
        else:
            answer = RowMissing(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, row=missing.row, version=missing.version)
        return [*self.poll(), answer]

    def _is_current(self, epoch: int) -> bool:
        if epoch < self._epoch:
            self.num_dropped += 1
            return False
        if epoch > self._epoch:
            self._epoch, self._last_plan = epoch, NO_PLAN
            self._runner.reset()
        return True

    def _is_next(self, plan_id: PlanId) -> bool:
        """Done twice, a plan would tell its rows twice what is new."""
        if plan_id <= self._last_plan:
            self.num_dropped += 1
            return False
        self._last_plan = plan_id
        return True


class Link:
    """The channel to the scheduler that exists now. A new incarnation of the scheduler is a new channel."""

    def __init__(self, child: Child[WorkerConfig], ready: WorkerReady, poller: zmq.Poller) -> None:
        self._child, self._ready, self._poller = child, ready, poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.channel: SchedulerChannel | None = None
        self._incarnation = NONE  #: of the scheduler at the other end

    def connect(self, peer: PeerUp) -> None:
        """Meets a scheduler and says what this rank has. It may know nothing of this rank, or of the bytes in its pool and slots a good deal."""
        self.close()
        self.channel = Channel(self._context, peer.address, bind=False, hello=self._child.hello(), peer="scheduler", incoming=SchedulerToWorker)
        self._incarnation = peer.incarnation
        self._poller.register(self.channel.socket, zmq.POLLIN)
        self.channel.send(self._ready)

    def disconnect(self, peer: PeerLost) -> None:
        """Parts with a scheduler that is gone, and with what it had sent and nobody has read."""
        if peer.incarnation == self._incarnation:
            self.close()

    def answer(self, worker: Worker) -> None:
        """Handles all that has arrived, and tells what has been copied."""
        while self.channel is not None and (message := self.channel.receive()) is not None:
            self._send(worker.handle(message))
        self._send(worker.poll())

    def _send(self, replies: Sequence[WorkerToScheduler]) -> None:
        """Without a scheduler they are lost: the next one has another epoch."""
        if self.channel is None:
            return
        for reply in replies:
            is_step = isinstance(reply, StepDone)
            if is_step:
                injection.reach("worker.step_done")
            self.channel.send(reply)
            if is_step:
                injection.reach("worker.step_sent")

    def close(self) -> None:
        if self.channel is not None:
            self._poller.unregister(self.channel.socket)
            self.channel.close()
            self.channel = None


def serve(child: Child[WorkerConfig], loaded: Loaded) -> None:
    """Answers the scheduler until the launcher says `Drain`, which it does when nothing runs any more, or is gone."""
    poller = zmq.Poller()
    worker = Worker(loaded.runner, loaded.ready.rank, child.start.epoch)
    poller.register(child.control.fileno(), zmq.POLLIN)
    poller.register(worker.fileno(), zmq.POLLIN)
    link = Link(child, loaded.ready, poller)
    child.say_ready(f"{loaded.ready.num_blocks} blocks of {loaded.ready.block_size} tokens")
    try:
        while True:
            events = dict(poller.poll())
            if child.control.fileno() in events:
                frame = child.receive()
                if frame is None or isinstance(frame, Drain):
                    get_logger("workers.process").info("stopped", reason="drain" if frame else "launcher is gone", dropped=worker.num_dropped)
                    return loaded.runner.swapper.close()
                _obey(frame, child, link)
            link.answer(worker)
    finally:
        link.close()


def _obey(frame: LauncherToChild, child: Child[WorkerConfig], link: Link) -> None:
    match frame:
        case PeerUp(kind="scheduler"):
            link.connect(frame)
        case PeerLost(kind="scheduler"):
            link.disconnect(frame)
        case Reload():
            child.apply_reload(frame)  # of which the log level alone concerns a worker
        case _:
            pass  # other peers are the scheduler's affair
