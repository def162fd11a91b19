"""Tensor-parallel ranks for tests: threads of this process that form a real gloo group, so that one more costs next to nothing.

    groups = open_groups(2)
    sums = together(lambda group: group.reduce(torch.ones(3)), groups)

`load_ranks` loads a model on each, and `RanksEngine` is the whole engine with all of them. What ranks do not have in
common (signals, deaths, sockets) is tested with processes, elsewhere.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from pagemill.ids import NONE
from pagemill.messages.worker import SchedulerToWorker, StepDone, TransferDone, WorkerToScheduler
from scripts.lib.offline import OfflineEngine, offline_config
from workers.loader import Loaded, OnProgress, load
from workers.parallel import TensorParallel, open_group
from workers.process import Worker

DEADLINE_S = 60.0

Given = TypeVar("Given")
Result = TypeVar("Result")


def together(work: Callable[[Given], Result], ranks: Sequence[Given]) -> list[Result]:
    """What `work` makes of each, all at once. The first exception is raised; the others are left waiting for who raised it."""
    answers: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()

    def run(index: int) -> None:
        try:
            answers.put((index, work(ranks[index]), None))
        except BaseException as error:
            answers.put((index, None, error))

    for index in range(len(ranks)):
        threading.Thread(target=run, args=(index,), name=f"rank {index}", daemon=True).start()
    results: dict[int, Result | None] = {}
    for _ in ranks:
        index, result, error = answers.get(timeout=DEADLINE_S)
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in range(len(ranks))]  # type: ignore[misc]  # None only where that is the result


@contextmanager
def rendezvous() -> Iterator[str]:
    """The name of a file that does not exist yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "rendezvous")


def open_groups(size: int, *, ordered: bool = True) -> list[TensorParallel]:
    """The members of one group, in rank order."""
    with rendezvous() as path:
        return together(lambda rank: open_group(rank, size, path, torch.device("cpu"), ordered=ordered), range(size))


def load_ranks(
    model_path: Path, size: int, *, on_progress: OnProgress = lambda phase, fraction, detail: None, arena_fd: int = NONE, **changes: object
) -> list[Loaded]:
    """The same model as `size` ranks hold it, each computing with one thread."""

    def load_rank(rank: int) -> Loaded:
        return load(
            offline_config(str(model_path), rank=rank, num_workers=size, num_threads=1, **({"max_num_batched_tokens": 64} | changes)),
            on_progress,
            arena_fd,
            path,
        )

    with rendezvous() as path:
        return together(load_rank, range(size))


class RanksEngine(OfflineEngine):
    """The engine with several ranks, which get every message and must answer alike."""

    def __init__(self, ranks: Sequence[Loaded], *, check_invariants: bool = False, **limits: object) -> None:
        super().__init__(ranks[0], check_invariants=check_invariants, **limits)
        self.worker = _Group([Worker(loaded.runner, loaded.ready.rank, self.core.config.epoch - 1) for loaded in ranks])


class _Group:
    """Looks to the core like one worker, rank 0. A transfer is done when every rank has said so."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._num_done: Counter[int] = Counter()

    def handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        answers = together(lambda worker: list(worker.handle(message)), self._workers)
        transfers = [answer for rank in answers for answer in rank if isinstance(answer, TransferDone)]
        acknowledged = [[_without_rank(answer) for answer in rank if not isinstance(answer, TransferDone)] for rank in answers]
        if any(rank != acknowledged[0] for rank in acknowledged):
            raise AssertionError(f"ranks answer differently: {acknowledged}")
        return [*self._done(transfers), *acknowledged[0]]

    def poll(self) -> Sequence[TransferDone]:
        return self._done([answer for worker in self._workers for answer in worker.poll()])

    def _done(self, answers: Iterable[TransferDone]) -> list[TransferDone]:
        done = []
        for answer in answers:
            if not answer.ok:
                raise AssertionError(f"rank {answer.rank} cannot copy")
            self._num_done.update(answer.transfer_ids)
            whole = tuple(number for number in answer.transfer_ids if self._num_done[number] == len(self._workers))
            if whole:
                done.append(msgspec.structs.replace(answer, rank=0, transfer_ids=whole))
        return done


def _without_rank(answer: WorkerToScheduler) -> WorkerToScheduler:
    """What must be equal on all ranks."""
    if isinstance(answer, StepDone):
        return msgspec.structs.replace(answer, rank=0, seconds={})
    return msgspec.structs.replace(answer, rank=0)


def close(ranks: Iterable[Loaded]) -> None:
    for loaded in ranks:
        loaded.runner.parallel.close()
        loaded.runner.swapper.close()
