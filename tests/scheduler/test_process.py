"""The scheduler's shell with peers that are played by the test: who keeps it waiting, and what nobody should send.

It runs in a thread, with real channels and a real control socket; the test is launcher, worker and frontends.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from pagemill import PROTOCOL_VERSION, channels
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import SchedulerConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import PlanId
from pagemill.messages.control import Alive, ChildToLauncher, Drain, LauncherToChild, PeerLost, PeerReady, PeerUp, Ready, Start, Stuck
from pagemill.messages.debug_state import DebugState
from pagemill.messages.frontend import (
    AbortRequest,
    AddRequest,
    DebugStateQuery,
    DebugStateReply,
    FinishRequest,
    FrontendToScheduler,
    SchedulerReady,
    SchedulerToFrontend,
    StatsSnapshot,
    StepOutput,
)
from pagemill.messages.sequences import KvGroup, Limits, SamplingParams, SequenceKey
from pagemill.messages.wire import Hello, ProcessKind
from pagemill.messages.worker import InstallRow, Plan, RowMissing, RowResult, SchedulerToWorker, StepDone, TransferDone, WorkerReady, WorkerToScheduler
from scheduler.peers import Peers
from scheduler.process import SchedulerProcess
from tests.helpers.fake_launcher import CONFIG

TOKEN = b"0123456789abcdef"
DEADLINE_S = 30.0
WORKER_INCARNATION = 3
MAX_FRAME_BYTES = 65536
READY = WorkerReady(0, 16, 4, 1024, 64, False, 0, 1000.0, 0, 0.0, 0.0)

Wanted = TypeVar("Wanted")
Worker = Channel[WorkerToScheduler, SchedulerToWorker]
Frontend = Channel[FrontendToScheduler, SchedulerToFrontend]


def hello(kind: ProcessKind, index: int, incarnation: int) -> Hello:
    return Hello(TOKEN, PROTOCOL_VERSION, kind, index, incarnation)


class Bench:
    """The launcher's end of a scheduler, and whoever meets it."""

    def __init__(self, folder: Path, config: SchedulerConfig) -> None:
        ours, theirs = control_pair()
        ours.settimeout(DEADLINE_S)
        self._folder = folder
        self._channels: list[Channel[Any, Any]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        start = Start("scheduler", 0, 0, 100, TOKEN, msgspec.Raw(msgspec.msgpack.encode(config)), -1)
        self._theirs: ControlSocket[ChildToLauncher, LauncherToChild] = ControlSocket(theirs, LauncherToChild)
        child: Child[SchedulerConfig] = Child(start, config, self._theirs)
        self._process = SchedulerProcess(child)
        self._thread = threading.Thread(target=self._process.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.tell(Drain(0.0))
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the scheduler does not end"
        for channel in self._channels:
            channel.close()
        self._control.close()
        self._theirs.close()
        self._context.destroy(linger=0)

    def tell(self, message: LauncherToChild) -> None:
        self._control.send(message)

    def hear(self, kind: type[Wanted]) -> Wanted:
        """The next thing that the launcher is told, but for signs of life, which has to be of this kind."""
        while isinstance(message := self._control.receive(), Alive):
            pass
        assert isinstance(message, kind), message
        return message

    def hear_nothing_but_life(self, count: int) -> None:
        """For so many seconds."""
        for _ in range(count):
            message = self._control.receive()
            assert isinstance(message, Alive), message

    def worker(self, incarnation: int = WORKER_INCARNATION) -> Worker:
        return self._meet(hello("worker", 0, incarnation), SchedulerToWorker)

    def frontend(self, index: int, incarnation: int = 1) -> Frontend:
        return self._meet(hello("frontend", index, incarnation), SchedulerToFrontend)

    def _meet(self, peer: Hello, incoming: Any) -> Channel[Any, Any]:
        address = f"ipc://{self._folder}/{peer.kind[0]}{peer.index}.{peer.incarnation}"
        self.tell(PeerUp(peer.kind, peer.index, peer.incarnation, address))
        self._channels.append(Channel(self._context, address, bind=False, hello=peer, peer="scheduler", incoming=incoming))
        return self._channels[-1]


@contextmanager
def scheduler(folder: Path, **changes: Any) -> Iterator[Bench]:
    bench = Bench(folder, msgspec.structs.replace(CONFIG, max_num_seqs=8, max_num_queued=8, log_level="error", **changes))
    try:
        yield bench
    finally:
        bench.close()


def wait_for(channel: Channel[Any, Any], kind: type[Wanted], matches: Callable[[Wanted], bool] = lambda _: True) -> Wanted:
    """The next message of this kind that matches; what comes before it is passed over."""
    end = time.monotonic() + DEADLINE_S
    while True:
        assert channel.socket.poll(max(0, int(1000 * (end - time.monotonic())))), f"no {kind.__name__} arrives"
        message = channel.receive()
        if isinstance(message, kind) and matches(message):
            return message


def add(key: SequenceKey, **changes: Any) -> AddRequest:
    prompt = array("i", range(1, 6)).tobytes()
    return msgspec.structs.replace(AddRequest(key, f"r{key.frontend}.{key.request}", prompt, b"", SamplingParams(), Limits(4), 0, 0, 0.0, b"", b""), **changes)


def state(frontend: Frontend, query: int) -> DebugState:
    frontend.send(DebugStateQuery(query))
    return wait_for(frontend, DebugStateReply, lambda reply: reply.query == query).state


# --- workers that keep it waiting ------------------------------------------------------------------------


def test_a_worker_that_has_loaded_and_does_not_report_is_said_to_be_stuck(tmp_path: Path) -> None:
    with scheduler(tmp_path, step_timeout_s=1.0, step_timeout_s_per_token=0.0) as bench:
        bench.worker()
        bench.tell(PeerReady("worker", 0, WORKER_INCARNATION))
        assert bench.hear(Stuck) == Stuck("worker", 0, WORKER_INCARNATION, "did not report to the scheduler in 1 s")
        bench.tell(PeerLost("worker", 0, WORKER_INCARNATION))
        bench.worker(WORKER_INCARNATION + 1).send(READY)
        assert bench.hear(Ready).worker_incarnation == WORKER_INCARNATION + 1


def test_a_worker_that_still_loads_takes_its_time(tmp_path: Path) -> None:
    with scheduler(tmp_path, step_timeout_s=0.5, step_timeout_s_per_token=0.0) as bench:
        bench.worker()
        bench.tell(PeerReady("worker", 0, WORKER_INCARNATION - 1))  # of one who has ended
        bench.hear_nothing_but_life(3)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_worker_that_has_reported_owes_nothing_more(tmp_path: Path, is_early: bool) -> None:
    with scheduler(tmp_path, step_timeout_s=0.5, step_timeout_s_per_token=0.0) as bench:
        worker = bench.worker()
        if not is_early:
            bench.tell(PeerReady("worker", 0, WORKER_INCARNATION))
        worker.send(READY)
        assert bench.hear(Ready) == Ready("16 KV blocks of 4 tokens", WORKER_INCARNATION)
        if is_early:
            bench.tell(PeerReady("worker", 0, WORKER_INCARNATION))
        bench.hear_nothing_but_life(3)


def test_a_worker_may_finish_what_a_former_scheduler_has_sent_it(tmp_path: Path) -> None:
    with scheduler(tmp_path, step_timeout_s=0.5, step_timeout_s_per_token=1.0, max_num_batched_tokens=16, max_plans_in_flight=2) as bench:
        worker = bench.worker()
        bench.tell(PeerReady("worker", 0, WORKER_INCARNATION))
        bench.hear_nothing_but_life(3)
        worker.send(READY)
        bench.hear(Ready)


def test_frontends_are_told_the_geometry_that_the_workers_report(tmp_path: Path) -> None:
    groups = (KvGroup(), KvGroup(window=64))
    with scheduler(tmp_path) as bench:
        worker, frontend = bench.worker(), bench.frontend(0)
        worker.send(msgspec.structs.replace(READY, groups=groups))
        told = wait_for(frontend, SchedulerReady)
        assert (told.num_blocks, told.block_size, told.groups) == (READY.num_blocks, READY.block_size, groups)


def test_workers_are_sent_the_next_step_before_frontends_hear_of_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def noting(send: Callable[..., None]) -> Callable[..., None]:
        def send_and_note(*args: object) -> None:
            sent.append(args[-1])
            send(*args)

        return send_and_note

    monkeypatch.setattr(Peers, "send_workers", noting(Peers.send_workers))
    monkeypatch.setattr(Peers, "send_frontend", noting(Peers.send_frontend))
    with scheduler(tmp_path) as bench:
        worker, frontend = bench.worker(), bench.frontend(0)
        worker.send(READY)
        wait_for(frontend, SchedulerReady)
        frontend.send(add(SequenceKey(0, 1, 1, 0)))
        row, first = wait_for(worker, InstallRow), wait_for(worker, Plan)
        worker.send(StepDone(first.epoch, 0, first.plan_id, (RowResult(row.row, row.version, "accepted", (42,), (), ""),), {}))
        told, second = wait_for(frontend, StepOutput), wait_for(worker, Plan)
    assert [message for message in sent if isinstance(message, Plan | StepOutput)][:3] == [first, second, told]


# --- frames that nobody should send ----------------------------------------------------------------------


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def test_frames_that_are_malformed_replayed_or_misdirected_are_dropped_and_counted(tmp_path: Path) -> None:
    with scheduler(tmp_path, step_timeout_s=600.0) as bench:
        worker, (first, second) = bench.worker(), (bench.frontend(0), bench.frontend(1))
        worker.send(READY)
        assert wait_for(second, SchedulerReady).worker_incarnation == WORKER_INCARNATION
        key = SequenceKey(1, 1, 1, 0)
        second.send(add(key))
        row, plan = wait_for(worker, InstallRow), wait_for(worker, Plan)

        right = packed(add(SequenceKey(0, 1, 5, 0)))
        malformed = [b"", b"\xc1", bytes(100), right[:-1], right + b"\x00", packed(plan), msgspec.msgpack.encode(["AddRequest", "r"])]
        misdirected = [add(SequenceKey(1, 1, 6, 0)), add(SequenceKey(0, 0, 7, 0)), AbortRequest(key), FinishRequest(key, "stop", 0)]
        unknown = [AbortRequest(SequenceKey(0, 1, 99, 0)), FinishRequest(SequenceKey(0, 1, 99, 0), "stop", 0)]
        for frame in (*malformed, *map(packed, misdirected), *map(packed, unknown)):
            first.send_frame(frame)
        second.send(add(key))  # once more: the same sequence, and not an error
        old = StepDone(plan.epoch - 1, 0, plan.plan_id, (), {})
        stale = [
            old,
            StepDone(plan.epoch, 0, PlanId(77), (), {}),
            TransferDone(plan.epoch - 1, 0, (1,), True, 0.0),
            RowMissing(plan.epoch - 1, 0, PlanId(1), row.row, 1),
        ]
        for frame in (*malformed, *map(packed, stale)):
            worker.send_frame(frame)
        worker.send(READY)  # nobody asked
        expected = 2 * len(malformed) + len(misdirected) + len(unknown) + len(stale)
        dropped = wait_for(second, StatsSnapshot, lambda snapshot: snapshot.dropped_messages >= expected).dropped_messages
        assert dropped == expected
        assert [sequence.request_id for sequence in state(second, 1).sequences] == ["r1.1"]

        done = StepDone(plan.epoch, 0, plan.plan_id, (RowResult(row.row, row.version, "accepted", (42,), (), ""),), {})
        worker.send(done)
        (output,) = wait_for(second, StepOutput).outputs
        assert (output.key, output.token_ids) == (key, (42,))
        worker.send(done)
        wait_for(second, StatsSnapshot, lambda snapshot: snapshot.dropped_messages == expected + 1)
        assert state(second, 2).invariants.ok
        assert [sequence.num_tokens for sequence in state(second, 3).sequences] == [6], "the token counts once"


def test_each_frontend_is_told_how_much_of_what_it_sent_is_counted(tmp_path: Path) -> None:
    with scheduler(tmp_path) as bench:
        worker, first, second = bench.worker(), bench.frontend(0), bench.frontend(1)
        worker.send(READY)
        for frontend in (first, second):
            wait_for(frontend, SchedulerReady)
            wait_for(frontend, StatsSnapshot, lambda snapshot: snapshot.requests_heard == 0)
        for number in range(3):
            first.send(add(SequenceKey(0, 1, number, 0)))
        second.send(add(SequenceKey(1, 1, 1, 0)))
        second.send(add(SequenceKey(1, 1, 1, 0)))  # once more: the same sequence, but sent
        told = [wait_for(frontend, StatsSnapshot, lambda snapshot: snapshot.sequences_received == 4).requests_heard for frontend in (first, second)]
        assert told == [3, 2]


def test_a_frame_past_the_longest_reaches_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_FRAME_BYTES", MAX_FRAME_BYTES)
    with scheduler(tmp_path) as bench:
        worker, large, other = bench.worker(), bench.frontend(0), bench.frontend(1)
        worker.send(READY)
        wait_for(large, SchedulerReady)
        large.send(add(SequenceKey(0, 1, 1, 0), prompt_ids=bytes(MAX_FRAME_BYTES + 4)))
        other.send(add(SequenceKey(1, 1, 1, 0)))
        wait_for(worker, Plan)
        assert [sequence.request_id for sequence in state(other, 1).sequences] == ["r1.1"]


@pytest.mark.parametrize("wrong", [{"token": b"x" * 16}, {"kind": "worker"}, {"protocol_version": 0}], ids=["token", "kind", "version"])
def test_a_stranger_is_cut_off_and_reported_and_others_are_served(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with scheduler(tmp_path) as bench:
        worker, stranger, other = bench.worker(), bench.frontend(0), bench.frontend(1)
        worker.send(READY)
        bench.hear(Ready)
        wait_for(stranger, SchedulerReady)
        stranger.send(add(SequenceKey(0, 1, 1, 0)))
        wait_for(worker, Plan)
        stranger.send_frame(packed(msgspec.structs.replace(hello("frontend", 0, 1), **wrong)))
        assert bench.hear(Stuck) == Stuck("frontend", 0, 1, "took no messages")
        assert state(other, 1).sequences == []
