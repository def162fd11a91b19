"""The worker's loop between a launcher and its schedulers, which come and go while it keeps what it has."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pytest
import torch
import zmq

from pagemill import PROTOCOL_VERSION, injection
from pagemill.channels import Channel
from pagemill.child import Child
from pagemill.config import WorkerConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.ids import NONE
from pagemill.messages.control import ChildToLauncher, Drain, LauncherToChild, PeerLost, PeerUp, Progress, Ready, Reload, Start
from pagemill.messages.wire import Hello
from pagemill.messages.worker import Plan, SchedulerToWorker, StepDone, TransferDone, WorkerReady, WorkerToScheduler
from scripts.lib.offline import offline_config
from tests.helpers.copiers import DEADLINE_S, GatedCopier
from tests.helpers.plans import copy_in, copy_out, install, piece, plan
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded, load
from workers.process import serve
from workers.runner import Runner
from workers.swapper import Swapper

CONFIG = offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16)
NUM_SLOTS = 6
TOKEN = b"t"
Reply = TypeVar("Reply", WorkerReady, StepDone, TransferDone)


class Scheduler:
    """The other end of a worker's channel, of one incarnation."""

    def __init__(self, folder: str, incarnation: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peer = PeerUp("scheduler", 0, incarnation, f"ipc://{folder}/{incarnation}")
        hello = Hello(TOKEN, PROTOCOL_VERSION, "scheduler", 0, incarnation)
        self.channel: Channel[SchedulerToWorker, WorkerToScheduler] = Channel(
            self._context, self.peer.address, bind=True, hello=hello, peer="worker", incoming=WorkerToScheduler
        )

    def expect(self, kind: type[Reply]) -> Reply:
        """The next message, which is of this kind."""
        while (message := self.channel.receive()) is None:
            assert self.channel.socket.poll(int(1000 * DEADLINE_S)), f"no {kind.__name__} arrived"
        assert isinstance(message, kind), message
        return message

    def has_news(self) -> bool:
        return self.channel.receive() is not None

    def die(self) -> PeerLost:
        self._context.destroy(linger=0)
        return PeerLost("scheduler", 0, self.peer.incarnation, "was killed by SIGKILL")


class Bench:
    """A worker in a thread, whose launcher is the test. Its background copies can be held up."""

    def __init__(self, loaded: Loaded, folder: str) -> None:
        runner = loaded.runner
        self.blocks = runner.kv_cache.blocks
        self.slots = torch.zeros((NUM_SLOTS, 4096), dtype=torch.uint8)
        self.copier = GatedCopier(self.blocks, self.slots[:, : self.blocks.shape[1]])
        swapper = Swapper(runner.kv_cache, self.slots, copier=self.copier)
        self._loaded = Loaded(Runner(runner.model, runner.kv_cache, swapper, runner.rows, torch.device("cpu")), loaded.ready)
        ours, theirs = control_pair()
        ours.settimeout(DEADLINE_S)
        self.launcher: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
        self._control: ControlSocket[ChildToLauncher, LauncherToChild] = ControlSocket(theirs, LauncherToChild)
        start = Start("worker", 0, 0, 0, TOKEN, msgspec.Raw(msgspec.msgpack.encode(CONFIG)), NONE)
        self._child: Child[WorkerConfig] = Child(start, CONFIG, self._control)
        self.error: BaseException | None = None  #: what ended the worker
        self._folder, self._schedulers = folder, list[Scheduler]()
        self._thread = threading.Thread(target=self._serve, name="worker")
        self._thread.start()
        assert isinstance(self.launcher.receive(), Ready)

    def new_scheduler(self) -> Scheduler:
        """Comes up; the worker hears of it and reports."""
        self._schedulers.append(Scheduler(self._folder, len(self._schedulers)))
        self.launcher.send(self._schedulers[-1].peer)
        assert self._schedulers[-1].expect(WorkerReady) == self._loaded.ready
        return self._schedulers[-1]

    def lose(self, scheduler: Scheduler) -> None:
        self.launcher.send(scheduler.die())

    def take_address_of(self, scheduler: Scheduler) -> Scheduler:
        self._schedulers.append(Scheduler(self._folder, scheduler.peer.incarnation))
        return self._schedulers[-1]

    def wait_until_ended(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.copier.gate.set()
        self.launcher.send(Drain(0.0))
        self.wait_until_ended()
        self._loaded.runner.swapper.close()
        for scheduler in self._schedulers:
            scheduler.die()
        self.launcher.close()
        self._control.close()

    def _serve(self) -> None:
        try:
            serve(self._child, self._loaded)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(CONFIG)


@pytest.fixture
def bench(loaded: Loaded) -> Iterator[Bench]:
    loaded.runner.reset()
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        bench = Bench(loaded, folder)
        yield bench
        bench.close()
    injection.disarm()


def step(scheduler: Scheduler, message: Plan) -> StepDone:
    scheduler.channel.send(message)
    return scheduler.expect(StepDone)


def test_each_new_scheduler_hears_what_the_worker_has_and_starts_from_nothing(bench: Bench) -> None:
    tokens = []
    for epoch in (1, 2, 3):
        scheduler = bench.new_scheduler()
        scheduler.channel.send(install(0, [5, 6, 7], [1], epoch=epoch))
        tokens.append(step(scheduler, plan(piece(0, 0, 3), epoch=epoch)).results[0].token_ids)
        bench.lose(scheduler)
    assert len(set(tokens)) == 1
    assert len(tokens[0]) == 1


def test_kv_in_the_pool_and_in_the_slots_outlives_the_scheduler_that_put_it_there(bench: Bench) -> None:
    def computed(first: Scheduler, epoch: int) -> tuple[int, ...]:
        first.channel.send(install(0, [5, 6, 7, 8, 9], [1, 2], epoch=epoch))
        return step(first, plan(piece(0, 0, 5), epoch=epoch)).results[0].token_ids

    first = bench.new_scheduler()
    expected = computed(first, 1)
    first.channel.send(plan(plan_id=2, transfers=[copy_out(1, 1, 3, needed_by=2)]))
    first.expect(TransferDone)
    first.expect(StepDone)
    bench.lose(first)
    second = bench.new_scheduler()
    second.channel.send(plan(epoch=2, plan_id=1, transfers=[copy_in(1, 3, 7, needed_by=1)]))
    second.expect(TransferDone)
    second.expect(StepDone)
    second.channel.send(install(0, [5, 6, 7, 8, 9], [7, 2], epoch=2))
    assert step(second, plan(piece(0, 4, 1), epoch=2, plan_id=2)).results[0].token_ids == expected


def test_copies_under_way_are_over_before_the_first_plan_of_a_new_scheduler_and_told_to_nobody(bench: Bench) -> None:
    first = bench.new_scheduler()
    bench.copier.gate.clear()
    step(first, plan(transfers=[copy_out(1, 4, 0), copy_out(2, 4, 1)]))
    assert bench.copier.held_up.acquire(timeout=DEADLINE_S)
    bench.lose(first)
    second = bench.new_scheduler()
    second.channel.send(plan(epoch=2, transfers=[copy_in(7, 0, 5, needed_by=1)]))
    assert not second.channel.socket.poll(50), "it began while something of the old scheduler could still be written"
    bench.copier.gate.set()
    done = second.expect(TransferDone)
    assert (done.epoch, done.transfer_ids, done.ok) == (2, (7,), True)
    assert second.expect(StepDone).epoch == 2
    assert not second.has_news()
    assert ("background", "out", 4, 1) not in bench.copier.copied


def test_a_plan_in_progress_is_finished_and_its_answer_lost(bench: Bench) -> None:
    first = bench.new_scheduler()
    bench.copier.gate.clear()
    first.channel.send(plan(transfers=[copy_out(1, 4, 0)]))
    first.expect(StepDone)
    assert bench.copier.held_up.acquire(timeout=DEADLINE_S)
    first.channel.send(plan(plan_id=2, transfers=[copy_in(2, 0, 5, needed_by=2)]))  # waits for the copy that is held up
    bench.lose(first)
    bench.copier.gate.set()
    second = bench.new_scheduler()
    assert step(second, plan(epoch=2)).plan_id == 1
    assert not second.has_news()


def test_a_lost_scheduler_is_told_nothing_more_even_if_somebody_takes_its_address(bench: Bench) -> None:
    first = bench.new_scheduler()
    bench.copier.gate.clear()
    step(first, plan(transfers=[copy_out(1, 4, 0)]))
    assert bench.copier.held_up.acquire(timeout=DEADLINE_S)
    bench.lose(first)
    other = bench.take_address_of(first)
    bench.copier.gate.set()
    assert not other.channel.socket.poll(400)


def test_what_an_older_scheduler_said_is_dropped(bench: Bench) -> None:
    scheduler = bench.new_scheduler()
    step(scheduler, plan(epoch=5))
    scheduler.channel.send(plan(epoch=4))
    assert step(scheduler, plan(epoch=5, plan_id=2)).plan_id == 2


@pytest.mark.parametrize("news", [PeerLost("scheduler", 0, 7), PeerLost("worker", 1, 0), PeerUp("worker", 1, 0, "ipc:///nowhere"), Progress("swap", 0.5, "")])
def test_news_that_do_not_concern_its_scheduler_change_nothing(bench: Bench, news: LauncherToChild) -> None:
    scheduler = bench.new_scheduler()
    bench.launcher.send(news)
    bench.launcher.send(news)
    assert step(scheduler, plan()).plan_id == 1
    assert step(scheduler, plan(plan_id=2)).plan_id == 2


def test_a_config_that_comes_anew_is_taken_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Reload] = []
    monkeypatch.setattr(Child, "apply_reload", lambda child, message: taken.append(message))
    scheduler = bench.new_scheduler()
    bench.launcher.send(Reload(msgspec.Raw(b"\x90")))
    bench.lose(scheduler)
    bench.new_scheduler()
    assert taken == [Reload(msgspec.Raw(b"\x90"))]


@pytest.mark.parametrize("point", ["worker.plan", "worker.step_done", "worker.step_sent"])
def test_a_fault_outside_the_rows_ends_the_worker(bench: Bench, point: str) -> None:
    scheduler = bench.new_scheduler()
    injection.arm([f"{point}=raise@2"], incarnation=0)
    step(scheduler, plan())
    scheduler.channel.send(plan(plan_id=2))
    bench.wait_until_ended()
    assert isinstance(bench.error, injection.InjectedFault)
    assert point == "worker.step_sent" or not scheduler.has_news()
