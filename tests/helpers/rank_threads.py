"""A tensor-parallel group whose ranks are threads of one process: their collectives meet at a barrier.

For what ranks agree on, where it must be tried which of them hears what, and when. How real ranks meet is tried in
processes of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from workers.parallel import PeerRankLost, TensorParallel

DEADLINE_S = 60.0
T = TypeVar("T")


class RankThread(TensorParallel):
    """One rank. `leave` is its death: whoever meets the others from then on, or waits for them, has lost it."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self.num_exchanges = 0
        self.num_rows_gathered = 0
        self._meeting = meeting

    def exchange(self, values: Tensor) -> Tensor:
        assert values.device.type == "cpu"
        self.num_exchanges += 1
        return torch.stack(self._meeting.show(self.rank, values))

    def reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._meeting.show(self.rank, partial)).sum(dim=0)

    def gather(self, part: Tensor, vocab_size: int) -> Tensor:
        self.num_rows_gathered += len(part)
        return torch.cat(self._meeting.show(self.rank, part), dim=-1)

    def leave(self) -> None:
        self._meeting.barrier.abort()

    def others_wait(self) -> bool:
        """Whether all but this rank have come to a collective."""
        return self._meeting.barrier.n_waiting == self.size - 1


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self._shown: list[Tensor] = [torch.empty(0)] * size

    def show(self, rank: int, values: Tensor) -> list[Tensor]:
        """What every rank shows, when all have come."""
        try:
            self._shown[rank] = values.clone()
            self.barrier.wait()
            shown = list(self._shown)
            self.barrier.wait()  # before anybody shows something else
        except threading.BrokenBarrierError:
            raise PeerRankLost(f"rank {rank} of {self.size} has lost another rank") from None
        return shown


def thread_group(size: int) -> list[RankThread]:
    meeting = _Meeting(size)
    return [RankThread(rank, meeting) for rank in range(size)]


def on_all_ranks(size: int, work: Callable[[RankThread], T]) -> list[T]:
    """What the work of each rank returns. If one raises, the others have lost it."""
    futures = start_ranks(thread_group(size), work)
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, PeerRankLost):
            raise error
    return [future.result() for future in futures]


def start_ranks(ranks: list[RankThread], work: Callable[[RankThread], T]) -> list[Future[T]]:
    """The same, of which each may be waited for."""

    def run(rank: RankThread) -> T:
        try:
            return work(rank)
        except BaseException:
            rank.leave()
            raise

    with_threads = ThreadPoolExecutor(len(ranks))
    futures = [with_threads.submit(run, rank) for rank in ranks]
    with_threads.shutdown(wait=False)
    return futures
