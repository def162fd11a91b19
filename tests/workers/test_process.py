"""The worker's answers: epochs, missing rows, and exactly one acknowledgement for each plan."""

from __future__ import annotations

import pytest

from pagemill.messages import RowMissing, StepDone
from scripts.lib.offline import offline_config
from tests.helpers.plans import install, piece, plan
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded, load
from workers.process import Worker


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=16))


@pytest.fixture
def worker(loaded: Loaded) -> Worker:
    loaded.runner.rows.clear()
    return Worker(loaded.runner, rank=0, epoch=1)


def done(worker: Worker, *args: object, **kwargs: object) -> StepDone:
    reply = worker.handle(plan(*args, **kwargs))  # type: ignore[arg-type]
    assert isinstance(reply, StepDone)
    return reply


def test_a_plan_is_acknowledged_with_its_number_and_results(worker: Worker) -> None:
    assert worker.handle(install(0, [5, 6, 7], [1])) is None
    reply = done(worker, piece(0, 0, 3), plan_id=17)
    assert (reply.epoch, reply.rank, reply.plan_id) == (1, 0, 17)
    assert [(result.row, result.outcome, len(result.token_ids)) for result in reply.results] == [(0, "accepted", 1)]


def test_an_empty_plan_is_acknowledged(worker: Worker) -> None:
    assert done(worker).results == ()


def test_a_plan_with_an_unknown_row_changes_nothing(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1]))
    reply = worker.handle(plan(piece(0, 3, 1, new_tokens=[8]), piece(3, 0, 1, version=2), plan_id=4, released=[0]))
    assert reply == RowMissing(epoch=1, rank=0, plan_id=plan(plan_id=4).plan_id, row=piece(3, 0, 1).row, version=2)
    # had token 8 been appended, position 2 would no longer be the last one and could not sample
    assert done(worker, piece(0, 0, 3)).results[0].outcome == "accepted"


def test_messages_of_an_older_epoch_are_dropped_and_counted(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1], epoch=3))
    assert worker.handle(plan(piece(0, 0, 3), epoch=2)) is None
    assert worker.handle(install(0, [9], [1], epoch=2)) is None
    assert worker.num_dropped == 2
    assert done(worker, piece(0, 0, 3), epoch=3).results[0].outcome == "accepted"


def test_a_newer_epoch_knows_none_of_the_old_rows(worker: Worker) -> None:
    worker.handle(install(0, [5, 6, 7], [1]))
    assert isinstance(worker.handle(plan(piece(0, 0, 3), epoch=2)), RowMissing)


def test_a_failing_row_is_reported_and_the_worker_goes_on(worker: Worker) -> None:
    worker.handle(install(0, [5, 600], [1]))
    worker.handle(install(1, [5, 6], [2]))
    outcomes = {result.row: result.outcome for result in done(worker, piece(0, 0, 2), piece(1, 0, 2)).results}
    assert outcomes == {0: "failed", 1: "accepted"}
    assert done(worker, piece(1, 0, 2), released=[0]).results[0].outcome == "accepted"
