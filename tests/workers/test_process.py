"""The worker's answers: epochs, missing rows, transfers, and exactly one acknowledgement for each plan."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest
import torch
import zmq

from pagemill.arena_file import create_arena
from pagemill.messages.worker import Plan, RowMissing, RowResult, StepDone, TransferDone, WorkerToScheduler
from scripts.lib.offline import offline_config
from tests.helpers.copiers import DEADLINE_S, GatedCopier
from tests.helpers.plans import copy_in, copy_out, install, piece, plan
from tests.helpers.tiny_model import tiny_checkpoint
from workers.copiers import Copy, Places
from workers.loader import Loaded, load
from workers.process import Worker
from workers.runner import Runner
from workers.swapper import Swapper
from workers.transfer_order import Direction

NUM_SLOTS = 6
#: Of plans and of versions of rows: each higher than those before.
NUMBERS = itertools.count(100)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    arena_fd = create_arena(NUM_SLOTS * 4096)
    try:
        return load(offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16, swap_bytes=NUM_SLOTS * 4096), arena_fd=arena_fd)
    finally:
        os.close(arena_fd)


@pytest.fixture
def worker(loaded: Loaded) -> Worker:
    loaded.runner.reset()
    return Worker(loaded.runner, rank=0, epoch=1)


def answer(worker: Worker, message: Plan) -> WorkerToScheduler:
    """The only reply."""
    (reply,) = worker.handle(message)
    return reply


def done(worker: Worker, *args: object, **kwargs: object) -> StepDone:
    """The acknowledgement of a plan, which gets a number higher than any before unless it is given one."""
    reply = answer(worker, plan(*args, **({"plan_id": next(NUMBERS)} | kwargs)))  # type: ignore[arg-type]
    assert isinstance(reply, StepDone)
    return reply


def test_a_plan_is_acknowledged_with_its_number_and_results(worker: Worker) -> None:
    assert worker.handle(install(0, [5, 6, 7], [1])) == []
    reply = done(worker, piece(0, 0, 3), plan_id=17)
    assert (reply.epoch, reply.rank, reply.plan_id) == (1, 0, 17)
    assert [(result.row, result.outcome, len(result.token_ids)) for result in reply.results] == [(0, "accepted", 1)]


def test_an_empty_plan_is_acknowledged(worker: Worker) -> None:
    assert done(worker).results == ()


def test_a_plan_with_an_unknown_row_changes_nothing(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1]))
    reply = answer(worker, plan(piece(0, 3, 1, new_tokens=[8]), piece(3, 0, 1, version=2), plan_id=4, released=[0]))
    assert reply == RowMissing(epoch=1, rank=0, plan_id=plan(plan_id=4).plan_id, row=piece(3, 0, 1).row, version=2)
    # had token 8 been appended, position 2 would no longer be the last one and could not sample
    assert done(worker, piece(0, 0, 3)).results[0].outcome == "accepted"


def test_messages_of_an_older_epoch_are_dropped_and_counted(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1], epoch=3))
    assert worker.handle(plan(piece(0, 0, 3), epoch=2)) == []
    assert worker.handle(install(0, [9], [1], epoch=2)) == []
    assert worker.num_dropped == 2
    assert done(worker, piece(0, 0, 3), epoch=3).results[0].outcome == "accepted"


def test_a_newer_epoch_knows_none_of_the_old_rows(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1]))
    assert isinstance(answer(worker, plan(piece(0, 0, 3), epoch=2)), RowMissing)


def test_a_newer_epoch_finds_the_bytes_of_the_pool_and_counts_its_plans_anew(worker: Worker, loaded: Loaded) -> None:
    before = loaded.runner.kv_cache.blocks.random_(0, 256).clone()
    done(worker)
    assert done(worker, epoch=2, plan_id=1).plan_id == 1
    assert torch.equal(loaded.runner.kv_cache.blocks, before)


def test_what_comes_twice_or_late_is_dropped_and_counted(worker: Worker) -> None:
    first, step = install(0, [5, 6, 7], [1]), plan(piece(0, 0, 3), plan_id=7)
    worker.handle(first)
    drawn = answer(worker, step)
    assert isinstance(drawn, StepDone)
    assert worker.handle(step) == worker.handle(first) == worker.handle(plan(plan_id=6)) == []
    assert worker.num_dropped == 3
    # had the plan been carried out again, or the row made anew, its history would not end where this slice says
    assert done(worker, piece(0, 3, 1, new_tokens=drawn.results[0].token_ids)).results[0].outcome == "accepted"


def test_a_failing_row_is_reported_and_the_worker_goes_on(worker: Worker) -> None:
    worker.handle(install(0, [5, 600], [1]))
    worker.handle(install(1, [5, 6], [2]))
    outcomes = {result.row: result.outcome for result in done(worker, piece(0, 0, 2), piece(1, 0, 2)).results}
    assert outcomes == {0: "failed", 1: "accepted"}
    assert done(worker, piece(1, 0, 2), released=[0]).results[0].outcome == "accepted"


def test_one_rank_spends_no_time_on_agreement(worker: Worker) -> None:
    assert set(done(worker).seconds) == {"swap_wait", "prepare", "forward", "sample"}


# --- transfers --------------------------------------------------------------------------------------------


class Bench:
    """A worker whose background copies can be held up."""

    def __init__(self, loaded: Loaded, copier: type[GatedCopier] = GatedCopier) -> None:
        runner = loaded.runner
        self.blocks = runner.kv_cache.blocks
        self.slots = torch.zeros((NUM_SLOTS, 4096), dtype=torch.uint8)
        self.copier = copier(self.blocks, self.slots[:, : self.blocks.shape[1]])
        self.swapper = Swapper(runner.kv_cache, self.slots, copier=self.copier)
        self.worker = Worker(Runner(runner.model, runner.kv_cache, self.swapper, runner.rows, torch.device("cpu")), rank=3, epoch=1)

    def poll(self) -> list[TransferDone]:
        """What the worker says when its descriptor wakes the poller, as in `serve`."""
        poller = zmq.Poller()
        poller.register(self.worker.fileno(), zmq.POLLIN)
        assert poller.poll(int(1000 * DEADLINE_S)), "an idle worker was not woken"
        return self.worker.poll()

    def holds(self, slot: int, content: torch.Tensor) -> bool:
        return torch.equal(self.slots[slot, : self.blocks.shape[1]], content)


@pytest.fixture
def bench(loaded: Loaded) -> Iterator[Bench]:
    loaded.runner.reset()
    bench = Bench(loaded)
    yield bench
    bench.copier.gate.set()
    bench.swapper.close()


def test_urgent_transfers_are_acknowledged_together_before_the_step(bench: Bench) -> None:
    bench.copier.faulty = {("in", 5, 9)}
    transfers = [copy_out(1, 4, 0, needed_by=7), copy_out(2, 5, 1, needed_by=7), copy_in(3, 5, 9, needed_by=7)]
    *dones, step = bench.worker.handle(plan(plan_id=7, transfers=transfers))
    assert isinstance(step, StepDone)
    assert step.seconds["swap_wait"] > 0
    said = {(done.transfer_ids, done.ok) for done in dones if isinstance(done, TransferDone) and (done.epoch, done.rank) == (1, 3)}
    assert said == {((1, 2), True), ((3,), False)}
    assert len(dones) == 2


class LateCopier(GatedCopier):
    """As on a device whose copies fail: that shows when the forward which waits for them is done, and in another thread."""

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        return self

    def hold_forward(self) -> None:
        self.gate.clear()

    def is_over(self) -> bool:
        return False

    def wait(self) -> float:
        assert self.gate.wait(DEADLINE_S)
        raise RuntimeError("the device has lost the copy")


def test_a_copy_that_failed_on_the_device_is_told_before_the_step_that_waited_for_it(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.runner.reset()
    bench = Bench(loaded, LateCopier)
    run = bench.worker._runner.run

    def then_let_copies_end(plan: Plan) -> tuple[tuple[RowResult, ...], dict[str, float]]:
        outcome = run(plan)
        bench.copier.gate.set()
        return outcome

    monkeypatch.setattr(bench.worker._runner, "run", then_let_copies_end)
    transfers = [copy_in(1, 5, 2, needed_by=7), copy_in(2, 4, 3, needed_by=7)]
    failed, step = bench.worker.handle(plan(plan_id=7, transfers=transfers))
    assert isinstance(failed, TransferDone)
    assert (sorted(failed.transfer_ids), failed.ok, isinstance(step, StepDone)) == ([1, 2], False, True)
    bench.swapper.close()


def test_a_forward_finds_the_old_bytes_of_a_block_it_overwrites_in_the_arena(bench: Bench) -> None:
    before = bench.blocks[1].random_(0, 256).clone()
    bench.worker.handle(install(0, [5, 6, 7, 8], [1]))
    *_, step = bench.worker.handle(plan(piece(0, 0, 4), plan_id=7, transfers=[copy_out(1, 1, 2, needed_by=7)]))
    assert isinstance(step, StepDone)
    assert step.results[0].outcome == "accepted"
    assert not torch.equal(bench.blocks[1], before), "the forward wrote nothing"
    assert bench.holds(2, before)


def test_a_step_is_done_while_transfers_that_it_does_not_need_go_on(bench: Bench) -> None:
    bench.copier.gate.clear()
    bench.worker.handle(install(0, [5, 6, 7], [1]))
    (reply,) = bench.worker.handle(plan(piece(0, 0, 3), transfers=[copy_out(1, 4, 0), copy_out(2, 5, 1)]))
    assert isinstance(reply, StepDone)
    assert (reply.results[0].outcome, reply.seconds["swap_wait"]) == ("accepted", 0.0)
    assert bench.worker.poll() == []
    bench.copier.gate.set()
    (transfer_done,) = bench.poll()
    assert (transfer_done.transfer_ids, transfer_done.ok, transfer_done.epoch, transfer_done.rank) == ((1, 2), True, 1, 3)
    assert bench.worker.poll() == []


def test_what_was_copied_meanwhile_is_told_with_the_next_step(bench: Bench) -> None:
    bench.copier.gate.clear()
    bench.worker.handle(plan(transfers=[copy_out(1, 4, 0)]))
    bench.copier.gate.set()
    assert zmq.select([bench.worker], [], [], DEADLINE_S)[0]
    transfer_done, step = bench.worker.handle(plan(plan_id=2))
    assert isinstance(transfer_done, TransferDone)
    assert (transfer_done.transfer_ids, isinstance(step, StepDone)) == ((1,), True)


def test_a_plan_with_an_unknown_row_still_carries_out_its_transfers(bench: Bench) -> None:
    content = bench.blocks[4].random_(0, 256).clone()
    transfer_done, missing = bench.worker.handle(plan(piece(3, 0, 1), plan_id=7, transfers=[copy_out(1, 4, 0, needed_by=7)]))
    assert isinstance(transfer_done, TransferDone)
    assert isinstance(missing, RowMissing)
    assert transfer_done.ok
    assert bench.holds(0, content)


def test_transfers_of_an_older_epoch_are_not_carried_out(bench: Bench) -> None:
    bench.worker.handle(plan(epoch=2))
    assert bench.worker.handle(plan(epoch=1, transfers=[copy_out(1, 4, 0, needed_by=1)])) == []
    assert bench.copier.copied == []


def test_a_newer_epoch_hears_nothing_of_transfers_of_the_old_one(bench: Bench) -> None:
    bench.copier.gate.clear()
    bench.worker.handle(plan(transfers=[copy_out(1, 4, 0), copy_out(2, 4, 1)]))
    assert bench.copier.held_up.acquire(timeout=DEADLINE_S)
    bench.copier.gate.set()
    *dones, step = bench.worker.handle(plan(epoch=2, transfers=[copy_out(1, 6, 5, needed_by=1)]))
    assert isinstance(step, StepDone)
    assert [(done.epoch, done.transfer_ids) for done in dones if isinstance(done, TransferDone)] == [(2, (1,))]
    assert bench.worker.poll() == []
    assert ("background", "out", 4, 1) not in bench.copier.copied


def test_a_worker_with_an_arena_says_how_fast_it_copies(loaded: Loaded) -> None:
    assert loaded.ready.swap_out_bytes_s > 1e5
    assert loaded.ready.swap_in_bytes_s > 1e5
    assert loaded.runner.swapper.num_slots == loaded.ready.num_swap_slots == NUM_SLOTS
    assert loaded.runner.swapper.take_done() == []


def test_a_worker_in_place_of_another_finds_the_arena_as_it_was_and_divides_it_alike() -> None:
    config = offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16, swap_bytes=NUM_SLOTS * 4096)
    arena_fd = create_arena(NUM_SLOTS * 4096)
    try:
        first = load(config, arena_fd=arena_fd)
        content = os.urandom(NUM_SLOTS * 4096)
        os.pwrite(arena_fd, content, 0)
        first.runner.swapper.close()
        second = load(config, arena_fd=arena_fd)  # measures its link, warms up and tries out what it promises
        assert os.pread(arena_fd, len(content), 0) == content
        assert (second.ready.num_swap_slots, second.ready.block_bytes) == (first.ready.num_swap_slots, first.ready.block_bytes)
        worker = Worker(second.runner, rank=0, epoch=1)
        worker.handle(plan(transfers=[copy_in(1, 5, 2, needed_by=1)]))
        assert second.runner.kv_cache.blocks[2].numpy().tobytes() == content[5 * 4096 :][: second.ready.block_bytes]
    finally:
        os.close(arena_fd)


def test_a_worker_without_an_arena_refuses_transfers_and_goes_on() -> None:
    loaded = load(offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16))
    transfer_done, step = Worker(loaded.runner, rank=0, epoch=1).handle(plan(transfers=[copy_out(1, 0, 0)]))
    assert isinstance(transfer_done, TransferDone)
    assert (transfer_done.ok, transfer_done.transfer_ids, isinstance(step, StepDone)) == (False, (1,), True)


def test_a_sequence_swapped_out_and_into_other_blocks_goes_on_as_if_nothing_had_happened(worker: Worker) -> None:
    prompt = [5, 6, 7, 8, 9, 10]

    def generate(swap: bool) -> list[tuple[int, ...]]:
        version = next(NUMBERS)
        worker.handle(install(0, prompt, [1, 2], version=version))
        tokens = [done(worker, piece(0, 0, 6, version=version)).results[0].token_ids]
        if swap:
            now, version = next(NUMBERS), next(NUMBERS)
            out = [copy_out(1, 1, 3, needed_by=now), copy_out(2, 2, 0, needed_by=now), copy_in(3, 3, 9, needed_by=now), copy_in(4, 0, 8, needed_by=now)]
            worker.handle(plan(plan_id=now, transfers=out))
            worker.handle(install(1, [1] * 8, [1, 2]))
            done(worker, piece(1, 0, 8))
            worker.handle(install(0, prompt, [9, 8], version=version))
        for position in range(6, 8):
            new = list(tokens[-1])
            tokens.append(done(worker, piece(0, position, 1, version=version, new_tokens=new)).results[0].token_ids)
        return tokens

    assert generate(swap=True) == generate(swap=False)
