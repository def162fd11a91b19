"""The worker's shell: messages in, transfers and plans carried out, acknowledgements out.

`Worker.handle` turns one message into its replies, `Worker.poll` tells what has been copied meanwhile, and
they are all there is to test without a socket; `serve` connects them to the scheduler's channel and to the
control socket. Messages of an older epoch, and those that come late or twice, are dropped and counted; a newer
epoch means a new core, which knows none of the old rows and transfers. The scheduler may go and another one
come: what is being computed and copied is finished, and told to nobody. Where there are several ranks, nothing of a
plan is begun, and no scheduler met, before all have it (`workers.agreement`). Must not know requests or policies.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import assert_never

import zmq

from pagemill import injection
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.ids import NO_PLAN, NONE, PlanId
from pagemill.messages.control import Drain, LauncherToChild, PeerLost, PeerUp, Reload
from pagemill.messages.worker import InstallRow, Plan, RowMissing, SchedulerToWorker, StepDone, TransferDone, WorkerReady, WorkerToScheduler
from pagemill.telemetry import get_logger
from workers.agreement import Agreement
from workers.loader import Loaded
from workers.parallel import PeerRankLost
from workers.runner import Runner

SchedulerChannel = Channel[WorkerToScheduler, SchedulerToWorker]

#: After another rank's end, which the launcher sees as well, this one waits so long for word from it: it may all be over.
_PARTING_S = 1.0


class Worker:
    """One rank's answers. Stateless between plans but for the rows, which may be dropped at any time, and what is being copied."""

    def __init__(self, runner: Runner, rank: int, epoch: int) -> None:
        self.num_dropped = 0  #: messages of older epochs, those that came late or twice, and plans given up
        self.agreement = Agreement(runner.parallel)
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
        started = time.perf_counter()
        missing = self._runner.rows.missing(plan)
        agreed = self.agreement.on_plan(plan.epoch, plan.plan_id, None if missing is None else (missing.row, missing.version))
        if agreed is None:
            self._runner.rows.clear()  # what it would have told them is lost with it
            self.num_dropped += 1
            return []
        seconds = {"agree": time.perf_counter() - started} if self._runner.parallel.size > 1 else {}
        seconds["swap_wait"] = self._runner.swapper.start(plan.transfers, plan.plan_id)
        answer: StepDone | RowMissing
        if agreed.missing is None:
            results, parts = self._runner.run(plan)
            answer = StepDone(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, results=results, seconds=seconds | parts)
        else:
            row, version = agreed.missing
            answer = RowMissing(epoch=plan.epoch, rank=self._rank, plan_id=plan.plan_id, row=row, version=version)
        self._runner.swapper.wait_until_reported()
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

    def __init__(self, child: Child[WorkerConfig], ready: WorkerReady, agreement: Agreement, poller: zmq.Poller) -> None:
        self._child, self._ready, self._agreement, self._poller = child, ready, agreement, poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.channel: SchedulerChannel | None = None
        self._incarnation = NONE  #: of the scheduler at the other end

    def connect(self, peer: PeerUp) -> None:
        """Meets a scheduler and says what this rank has. It may know nothing of this rank, or of the bytes in its pool and slots a good deal."""
        self.close()
        if not self._agreement.on_scheduler(peer.incarnation):
            return  # it is gone again
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
    """Answers the scheduler until the launcher says `Drain`, which it does when nothing runs any more, or is gone. Fails when another rank is lost."""
    poller = zmq.Poller()
    worker = Worker(loaded.runner, loaded.ready.rank, child.start.epoch)
    poller.register(child.control.fileno(), zmq.POLLIN)
    poller.register(worker.fileno(), zmq.POLLIN)
    link = Link(child, loaded.ready, worker.agreement, poller)
    child.say_ready(f"{loaded.ready.num_blocks} blocks of {loaded.ready.block_size} tokens")
    try:
        reason = _answer_until_ended(child, worker, link, poller)
    except PeerRankLost as lost:
        loaded.runner.parallel.close()  # who waits for this rank, and not for the one that is gone, hears of it only so
        reason = end_without(child, lost)
    finally:
        link.close()
    get_logger("workers.process").info("stopped", reason=reason, dropped=worker.num_dropped)
    loaded.runner.swapper.close()


def end_without(child: Child[WorkerConfig], lost: PeerRankLost) -> str:
    """Another rank is gone. If all are to end anyway, says so; else this one fails."""
    deadline = time.monotonic() + _PARTING_S
    while select.select([child.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
        frame = child.receive()
        if frame is None or isinstance(frame, Drain):
            return _reason(frame)
    child.fail(str(lost))


def _answer_until_ended(child: Child[WorkerConfig], worker: Worker, link: Link, poller: zmq.Poller) -> str:
    """Why it ended."""
    while True:
        events = dict(poller.poll())
        if child.control.fileno() in events:
            frame = child.receive()
            if frame is None or isinstance(frame, Drain):
                return _reason(frame)
            _obey(frame, child, link)
        link.answer(worker)


def _reason(end: Drain | None) -> str:
    return "drain" if end else "launcher is gone"


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
