"""Several ranks in their loops, between a launcher and schedulers that may die before all ranks have heard of what they said."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pytest
import torch
import zmq

from pagemill import PROTOCOL_VERSION
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import NONE
from pagemill.messages.control import ChildToLauncher, Drain, Failed, LauncherToChild, PeerLost, PeerUp, Ready, Start
from pagemill.messages.wire import Hello
from pagemill.messages.worker import Plan, SchedulerToWorker, StepDone, WorkerReady, WorkerToScheduler
from scripts.lib.offline import offline_config
from tests.helpers.copiers import DEADLINE_S
from tests.helpers.plans import install, piece, plan
from tests.helpers.rank_threads import RankThread, thread_group
from tests.helpers.server import wait_for
from tests.helpers.tiny_model import tiny_checkpoint
from workers import process
from workers.loader import Loaded, load
from workers.process import serve
from workers.rows import RowTable
from workers.runner import Runner

SIZE = 2
CONFIG = offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16)
TOKEN = b"t"
Reply = TypeVar("Reply", WorkerReady, StepDone)


class Scheduler:
    """The other ends of the ranks' channels, of one incarnation."""

    def __init__(self, folder: str, incarnation: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.incarnation = incarnation
        self.addresses = [f"ipc://{folder}/{incarnation}-{rank}" for rank in range(SIZE)]
        hello = Hello(TOKEN, PROTOCOL_VERSION, "scheduler", 0, incarnation)
        self._channels: list[Channel[SchedulerToWorker, WorkerToScheduler]] = [
            Channel(self._context, address, bind=True, hello=hello, peer="worker", incoming=WorkerToScheduler) for address in self.addresses
        ]

    def send(self, rank: int, message: SchedulerToWorker) -> None:
        self._channels[rank].send(message)

    def expect(self, rank: int, kind: type[Reply]) -> Reply:
        """The next message of a rank, which is of this kind."""
        channel = self._channels[rank]
        while (message := channel.receive()) is None:
            assert channel.socket.poll(int(1000 * DEADLINE_S)), f"no {kind.__name__} arrived"
        assert isinstance(message, kind), message
        return message

    def step(self, message: Plan) -> list[StepDone]:
        for rank in range(SIZE):
            self.send(rank, message)
        return [self.expect(rank, StepDone) for rank in range(SIZE)]

    def has_news(self, rank: int) -> bool:
        return self._channels[rank].receive() is not None

    def die(self) -> None:
        self._context.destroy(linger=0)


class Member:
    """One rank in a thread, whose launcher is the test. When it ends, for whatever reason, the other has lost it."""

    def __init__(self, loaded: Loaded, group: RankThread) -> None:
        runner = loaded.runner
        self.runner = Runner(runner.model, runner.kv_cache, runner.swapper, RowTable(runner.rows.bounds), torch.device("cpu"), group)
        self.group = group
        ours, theirs = control_pair()
        ours.settimeout(DEADLINE_S)
        self.launcher: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        self._control: ControlSocket[ChildToLauncher, LauncherToChild] = ControlSocket(theirs, LauncherToChild)
        start = Start("worker", group.rank, 0, 0, TOKEN, msgspec.Raw(msgspec.msgpack.encode(CONFIG)), NONE)
        child: Child[WorkerConfig] = Child(start, CONFIG, self._control)
        self.ready = msgspec.structs.replace(loaded.ready, rank=group.rank)
        self.error: BaseException | None = None  #: what ended it
        self._thread = threading.Thread(target=self._serve, args=(child,), name=f"rank {group.rank}")
        self._thread.start()
        assert isinstance(self.launcher.receive(), Ready)

    def wait_until_ended(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self.launcher.send(Drain(0.0))
        self.wait_until_ended()
        self.launcher.close()
        self._control.close()

    def _serve(self, child: Child[WorkerConfig]) -> None:
        try:
            serve(child, Loaded(self.runner, self.ready))
        except BaseException as error:
            self.error = error
        self.group.leave()


class Bench:
    def __init__(self, loaded: Loaded, folder: str) -> None:
        self.members = [Member(loaded, group) for group in thread_group(SIZE)]
        self._folder, self._schedulers = folder, list[Scheduler]()

    def start_scheduler(self) -> Scheduler:
        self._schedulers.append(Scheduler(self._folder, len(self._schedulers)))
        return self._schedulers[-1]

    def announce(self, scheduler: Scheduler, rank: int) -> None:
        self.members[rank].launcher.send(PeerUp("scheduler", 0, scheduler.incarnation, scheduler.addresses[rank]))

    def meet(self) -> Scheduler:
        """A new scheduler, which all ranks have reported to."""
        scheduler = self.start_scheduler()
        for rank in range(SIZE):
            self.announce(scheduler, rank)
        assert [scheduler.expect(rank, WorkerReady) for rank in range(SIZE)] == [member.ready for member in self.members]
        return scheduler

    def lose(self, scheduler: Scheduler) -> None:
        scheduler.die()
        for member in self.members:
            member.launcher.send(PeerLost("scheduler", 0, scheduler.incarnation, "was killed by SIGKILL"))

    def wait_until_alone(self, rank: int) -> None:
        """Until this rank waits for all others."""
        group = self.members[rank - 1].group
        wait_for(group.others_wait, DEADLINE_S, lambda: f"rank {rank} waits for nobody")

    def close(self) -> None:
        for member in self.members:
            member.close()
        for scheduler in self._schedulers:
            scheduler.die()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(CONFIG)


@pytest.fixture
def bench(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # All members have the one swapper of `loaded`, and nothing to copy.
    monkeypatch.setattr(loaded.runner.swapper, "close", lambda: None)
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        bench = Bench(loaded, folder)
        yield bench
        bench.close()


def test_a_scheduler_hears_of_no_rank_before_all_have_met_it(bench: Bench) -> None:
    scheduler = bench.start_scheduler()
    bench.announce(scheduler, 0)
    bench.wait_until_alone(0)
    assert not scheduler.has_news(0)
    bench.announce(scheduler, 1)
    assert [scheduler.expect(rank, WorkerReady).rank for rank in range(SIZE)] == [0, 1]


@pytest.mark.parametrize("lucky", [0, 1])
def test_a_rank_that_alone_was_sent_a_plan_gets_on_when_the_next_scheduler_comes(bench: Bench, lucky: int) -> None:
    first = bench.meet()
    first.step(plan())
    first.send(lucky, install(0, [5, 6, 7], [1]))
    first.send(lucky, plan(piece(0, 0, 3), plan_id=2))
    bench.wait_until_alone(lucky)
    bench.lose(first)
    second = bench.meet()
    assert [done.plan_id for done in second.step(plan(epoch=2))] == [1, 1]
    assert not second.has_news(lucky)


def test_schedulers_that_die_at_once_leave_the_ranks_with_the_one_that_lives(bench: Bench) -> None:
    first = bench.meet()
    first.send(0, plan())
    bench.wait_until_alone(0)
    for _ in range(2):
        gone = bench.start_scheduler()
        bench.announce(gone, 0)
        bench.announce(gone, 1)
        bench.lose(gone)
    bench.lose(first)
    last = bench.meet()
    assert [done.plan_id for done in last.step(plan(epoch=2))] == [1, 1]


def test_a_scheduler_that_one_rank_was_started_too_late_to_meet_is_passed_over(bench: Bench) -> None:
    bench.announce(bench.start_scheduler(), 0)
    bench.wait_until_alone(0)
    assert [done.plan_id for done in bench.meet().step(plan())] == [1, 1]


def test_a_rank_that_waits_when_all_is_over_ends_in_peace(bench: Bench) -> None:
    scheduler = bench.meet()
    scheduler.send(0, plan())
    bench.wait_until_alone(0)
    for member in reversed(bench.members):
        member.launcher.send(Drain(0.0))
    for member in bench.members:
        member.wait_until_ended()
        assert member.error is None


def test_a_rank_hears_from_the_launcher_that_all_is_over_after_it_has_lost_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PARTING_S", DEADLINE_S)
    scheduler = bench.meet()
    scheduler.send(0, plan())
    bench.wait_until_alone(0)
    bench.members[1].launcher.send(Drain(0.0))
    bench.members[1].wait_until_ended()
    bench.members[0].launcher.send(PeerLost("scheduler", 0, scheduler.incarnation))
    bench.members[0].launcher.send(Drain(0.0))
    bench.members[0].wait_until_ended()
    assert bench.members[0].error is None


def test_a_rank_that_loses_another_fails_with_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PARTING_S", 0.05)
    scheduler = bench.meet()
    bench.members[1].group.leave()
    scheduler.send(0, plan())
    bench.members[0].wait_until_ended()
    assert isinstance(bench.members[0].error, SystemExit)
    assert bench.members[0].error.code == 1
    assert bench.members[0].launcher.receive() == Failed("rank 0 of 2 has lost another rank")
