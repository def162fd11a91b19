"""Faults at the worker's points: what each strikes, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagemill import injection
from pagemill.ids import NO_PLAN, PlanId
from pagemill.injection import InjectedFault
from pagemill.messages.worker import RowResult, StepDone, TransferDone, WorkerToScheduler
from scripts.lib.offline import offline_config
from tests.helpers.copiers import DEADLINE_S, GatedCopier
from tests.helpers.plans import copy_out, install, piece, plan
from tests.helpers.server import wait_for
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded, load
from workers.probe import DeviceFault
from workers.process import Worker
from workers.runner import NOT_FINITE, STEP_FAILED, Runner
from workers.swapper import Swapper

HISTORIES = ([5, 6, 7], [8, 9], [10, 11, 12, 13])


class Bench:
    """A worker with three rows, and an arena."""

    def __init__(self, loaded: Loaded) -> None:
        runner = loaded.runner
        runner.reset()
        self.slots = torch.zeros((6, 4096), dtype=torch.uint8)
        copier = GatedCopier(runner.kv_cache.blocks, self.slots[:, : runner.kv_cache.blocks.shape[1]])
        self.swapper = Swapper(runner.kv_cache, self.slots, copier=copier)
        self.worker = Worker(Runner(runner.model, runner.kv_cache, self.swapper, runner.rows, torch.device("cpu")), rank=0, epoch=1)
        self.plan_id = 0
        for number, tokens in enumerate(HISTORIES):
            self.worker.handle(install(number, tokens, [number]))

    def step(self) -> dict[int, RowResult]:
        """Computes all rows from the start; the result of each."""
        self.plan_id += 1
        (reply,) = self.worker.handle(plan(*(piece(row, 0, len(tokens)) for row, tokens in enumerate(HISTORIES)), plan_id=self.plan_id))
        assert isinstance(reply, StepDone)
        return {result.row: result for result in reply.results}

    def copy(self, needed_by: PlanId) -> bool:
        """Whether a block reached the arena, as it was reported."""
        self.plan_id += 1
        *dones, _ = self.worker.handle(plan(plan_id=self.plan_id, transfers=[copy_out(1, 0, 3, needed_by=needed_by)]))
        (done,) = dones or wait_for(lambda: list[WorkerToScheduler](self.worker.poll()), DEADLINE_S, lambda: "the transfer was not reported")
        assert isinstance(done, TransferDone)
        return done.ok


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16))


@pytest.fixture
def bench(loaded: Loaded) -> Iterator[Bench]:
    bench = Bench(loaded)
    yield bench
    injection.disarm()
    bench.swapper.close()


def arm(*faults: str) -> None:
    injection.arm(faults, incarnation=0)


@pytest.mark.parametrize("fault", ["worker.forward=raise", "worker.logits=raise", "worker.logits=corrupt"])
def test_a_fault_that_strikes_one_step_fails_no_row(bench: Bench, fault: str) -> None:
    expected = bench.step()
    arm(fault)
    assert bench.step() == expected


@pytest.mark.parametrize("fault", ["worker.forward=raise@*", "worker.logits=raise@*", "worker.logits=corrupt@*"])
def test_a_fault_that_strikes_every_step_is_the_devices(bench: Bench, fault: str) -> None:
    arm(fault)
    with pytest.raises(DeviceFault):
        bench.step()


@pytest.mark.parametrize(("fault", "error"), [("worker.forward=raise~9", STEP_FAILED), ("worker.logits=corrupt~9", NOT_FINITE)])
def test_a_fault_for_a_token_strikes_the_row_that_holds_it(bench: Bench, fault: str, error: str) -> None:
    expected = bench.step()
    arm(fault)
    results = bench.step()
    assert (results[1].outcome, results[1].error) == ("failed", error)
    assert (results[0], results[2]) == (expected[0], expected[2])


@pytest.mark.parametrize("point", ["worker.plan", "worker.install", "transfer.start", "transfer.done"])
def test_faults_outside_rows_and_copies_end_the_worker(bench: Bench, point: str) -> None:
    arm(f"{point}=raise")
    with pytest.raises(InjectedFault, match=point):
        bench.worker.handle(install(7, [1], [7])) if point == "worker.install" else bench.copy(PlanId(1))


@pytest.mark.parametrize("needed_by", [NO_PLAN, PlanId(2)], ids=["background", "urgent"])
@pytest.mark.parametrize("fault", ["transfer.copy=raise", "transfer.copied=raise", "transfer.copied=corrupt"])
def test_a_fault_of_one_copy_fails_that_copy(bench: Bench, fault: str, needed_by: PlanId) -> None:
    assert bench.copy(PlanId(1))
    arm(fault)
    assert not bench.copy(needed_by)
    assert bench.copy(PlanId(3))


def test_a_fault_of_several_copies_at_once_fails_none_of_them(bench: Bench) -> None:
    arm("transfer.copy=raise")
    transfers = [copy_out(number, number, number, needed_by=1) for number in range(4)]
    done, _ = bench.worker.handle(plan(transfers=transfers))
    assert isinstance(done, TransferDone)
    assert (done.ok, done.transfer_ids) == (True, (0, 1, 2, 3))
