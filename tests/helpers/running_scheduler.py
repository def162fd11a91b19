"""The scheduler's shell in a thread of this process, with a test as its launcher, as its workers and as a frontend.

    with RunningScheduler(num_workers=2) as scheduler:
        ranks = scheduler.start_workers([ready(0), ready(1)])

Everything goes over real sockets. Whatever is waited for comes within a deadline, or the test fails.
"""

from __future__ import annotations

import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from pagemill import PROTOCOL_VERSION
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import NONE
from pagemill.keys import root_key
from pagemill.messages.control import ChildToLauncher, LauncherToChild, PeerLost, PeerUp, Start
from pagemill.messages.frontend import AddRequest, FrontendToScheduler, SchedulerToFrontend
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from pagemill.messages.wire import Hello, ProcessKind
from pagemill.messages.worker import Plan, RowResult, SchedulerToWorker, StepDone, WorkerReady, WorkerToScheduler
from scheduler.process import SchedulerProcess
from tests.helpers.fake_launcher import CONFIG

TOKEN = b"0123456789abcdef"
DEADLINE_S = 60.0
Message = TypeVar("Message")


def ready(rank: int, **changes: Any) -> WorkerReady:
    """What a small worker says of itself."""
    numbers: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 16,
        "block_bytes": 1024,
        "max_model_len": 256,
        "deterministic": True,
        "weight_bytes": 1,
        "prefill_tok_s": 1000.0,
        "num_swap_slots": 0,
        "swap_out_bytes_s": 0.0,
        "swap_in_bytes_s": 0.0,
    }
    return WorkerReady(rank=rank, **numbers | changes)


class Peer:
    """Another process's end of a channel with the scheduler."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: ProcessKind, index: int, incarnation: int, address: str) -> None:
        incoming = SchedulerToWorker if kind == "worker" else SchedulerToFrontend
        hello = Hello(TOKEN, PROTOCOL_VERSION, kind, index, incarnation)
        self.index = index
        self.channel: Channel[WorkerToScheduler | FrontendToScheduler, Any] = Channel(
            context, address, bind=False, hello=hello, peer="scheduler", incoming=incoming
        )

    def send(self, message: WorkerToScheduler | FrontendToScheduler) -> None:
        self.channel.send(message)

    def wait_for(self, kind: type[Message]) -> Message:
        """The next message of this kind; others before it are passed over."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = self.channel.receive()
            if isinstance(message, kind):
                return message
            if message is None:
                self.channel.socket.poll(100)
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S} s")

    def receive(self) -> Any:
        """What has arrived, None if nothing has."""
        return self.channel.receive()

    def answer(self, plan: Plan, token: int) -> None:
        """Says, as a worker, that each sampling row drew this token."""
        results = tuple(RowResult(piece.row, piece.version, "accepted", (token,), (), "") for piece in plan.slices if piece.sample)
        self.send(StepDone(plan.epoch, self.index, plan.plan_id, results, {"forward": 0.001}))


class RunningScheduler:
    """`changes` are fields of `SchedulerConfig`."""

    def __init__(self, **changes: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scheduler-")
        ours, theirs = control_pair()
        ours.settimeout(DEADLINE_S)
        self.control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        start = Start(kind="scheduler", index=0, incarnation=0, epoch=1, token=TOKEN, config=msgspec.Raw(b""), listen_fd=NONE)
        config = msgspec.structs.replace(CONFIG, max_num_seqs=4, max_num_batched_tokens=64, max_num_queued=8, **changes)
        self._child = Child(start, config, ControlSocket[ChildToLauncher, LauncherToChild](theirs, LauncherToChild))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self._run, name="scheduler")

    def _run(self) -> None:
        try:
            SchedulerProcess(self._child).run()
        except SystemExit:  # it has said why
            pass

    def __enter__(self) -> RunningScheduler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.control.close()
        self._thread.join(DEADLINE_S)
        self._child.control.close()
        for peer in self._peers:
            peer.channel.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()
        assert not self._thread.is_alive(), "the scheduler outlives its launcher"

    def hear(self, kind: type[Message]) -> Message:
        """The next message of this kind for the launcher."""
        while True:
            message = self.control.receive()
            assert message is not None, f"the scheduler ended before {kind.__name__}"
            if isinstance(message, kind):
                return message

    def start_peer(self, kind: ProcessKind, index: int, incarnation: int = 0) -> Peer:
        address = f"ipc://{self._folder.name}/{kind}-{index}-{incarnation}"
        self.control.send(PeerUp(kind, index, incarnation, address))
        self._peers.append(Peer(self._context, kind, index, incarnation, address))
        return self._peers[-1]

    def start_workers(self, reports: Sequence[WorkerReady], incarnation: int = 0) -> list[Peer]:
        """One for each rank, all of which have said that they are ready."""
        workers = [self.start_peer("worker", report.rank, incarnation) for report in reports]
        for worker, report in zip(workers, reports, strict=True):
            worker.send(report)
        return workers

    def end_workers(self, workers: Sequence[Peer], incarnation: int = 0) -> None:
        for worker in workers:
            worker.channel.close()
            self.control.send(PeerLost("worker", worker.index, incarnation))


def request(number: int, prompt: Sequence[int], max_tokens: int) -> AddRequest:
    return AddRequest(
        key=SequenceKey(0, 0, number, 0),
        request_id=f"r{number}",
        prompt_ids=array("i", prompt).tobytes(),
        output_ids=b"",
        sampling=SamplingParams(),
        limits=Limits(max_tokens),
        seed=0,
        priority=0,
        arrival=float(number),
        root=root_key(b"model", b"", b"domain"),
        prefix_keys=b"",
    )
