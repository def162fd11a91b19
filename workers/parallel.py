"""Tensor parallelism as layers see it: which share of a weight is this rank's, and how shares meet again.

`TensorParallel` is a group of one: every operation is the identity and there is no process group. `open_group`
makes a member of a larger one, with gloo between CPUs and NCCL between GPUs; ranks find each other through a file
in a folder that nobody else can enter, and gloo's sockets bind loopback only. Layers take the object as an
argument and never ask how many ranks there are; model files do not see it at all.

All ranks call the same operations in the same order, or wait for each other for ever: there are no deadlines here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch forgets to say that it exports it
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from pagemill.tensor_parallel import VOCABULARY_UNIT, first_kv_head, kv_heads_per_rank

#: Who waits too long is found by the deadline of the step, which knows how much there is to do.
_FOREVER = timedelta(days=365)


class PeerRankLost(RuntimeError):
    """Another rank of the group is gone, and with it the group; the message is one sentence for the operator."""


class TensorParallel:
    """One rank of a group, here the only one."""

    rank = 0
    size = 1
    met_s = 0.0  #: seconds spent in the operations below so far, waiting for other ranks included

    def share(self, length: int) -> slice:
        """This rank's part of a dimension. Raises ValueError if it cannot be divided evenly."""
        if length % self.size:
            raise ValueError(f"{length} cannot be divided among {self.size} ranks")
        width = length // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def kv_share(self, num_kv_heads: int) -> slice:
        """The KV heads that this rank holds. Where there are more ranks than heads, several hold the same one."""
        first = first_kv_head(self.rank, self.size, num_kv_heads)
        return slice(first, first + kv_heads_per_rank(num_kv_heads, self.size))

    def vocabulary_share(self, vocab_size: int) -> slice:
        """The token ids that this rank embeds and predicts. Ranks may have unequal numbers of them."""
        return _vocabulary_share(self.rank, self.size, vocab_size)

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's partial result, the same bits on all of them. `partial` may be overwritten."""
        return partial

    def gather(self, part: Tensor, vocab_size: int) -> Tensor:
        """The whole of the last dimension, of which every rank has its `vocabulary_share`."""
        return part

    def exchange(self, values: Tensor) -> Tensor:
        """Every rank's few numbers, [size, n], in rank order. `values` [n] is on the CPU wherever the model runs, and of one type on all ranks."""
        return values[None]

    def close(self) -> None:
        """Leaves the group; the others lose this rank."""


ALONE = TensorParallel()


class RankGroup(TensorParallel):
    """One rank of several. Operations raise PeerRankLost if gloo notices that a rank is gone, which it does for those that exchange with it.

    Others wait for ranks that will not come: whoever has lost one must leave in turn.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup, ordered: bool) -> None:
        self.rank, self.size = rank, size
        self._group: ProcessGroup | None = group
        # Of two summands the order does not matter; of more, a ring adds each part of a tensor in another one.
        self._gathers_sums = ordered and size > 2

    def reduce(self, partial: Tensor) -> Tensor:
        if self._gathers_sums:
            return _sum_in_order(self._all_gather(partial))
        total = partial.contiguous()
        self._meet(lambda group: group.allreduce([total]))
        return total

    def gather(self, part: Tensor, vocab_size: int) -> Tensor:
        shares = [_vocabulary_share(rank, self.size, vocab_size) for rank in range(self.size)]
        widths = [share.stop - share.start for share in shares]
        padded = torch.nn.functional.pad(part, (0, max(widths) - part.shape[-1]))
        return torch.cat([each[..., :width] for each, width in zip(self._all_gather(padded), widths, strict=True)], dim=-1)

    def exchange(self, values: Tensor) -> Tensor:
        return self._all_gather(values)

    def close(self) -> None:
        self._group = None  # what closes the sockets is that nobody refers to it; its own `shutdown` does not

    def _members(self) -> ProcessGroup:
        if self._group is None:
            raise PeerRankLost(f"rank {self.rank} of {self.size} has left the group")
        return self._group

    def _all_gather(self, part: Tensor) -> Tensor:
        """[size, *part.shape]"""
        gathered = part.new_empty(self.size * part.numel())
        self._meet(lambda group: group._allgather_base(gathered, part.contiguous().view(-1)))
        return gathered.view(self.size, *part.shape)

    def _meet(self, operation: Callable[[ProcessGroup], Work]) -> None:
        started = time.perf_counter()
        try:
            operation(self._members()).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self.met_s += time.perf_counter() - started

    def _lost(self, error: RuntimeError) -> PeerRankLost:
        reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
        return PeerRankLost(f"rank {self.rank} of {self.size} has lost another rank: {reason}")


def open_group(rank: int, size: int, rendezvous: str, device: torch.device, *, ordered: bool) -> TensorParallel:
    """Joins the group, and returns when all its ranks have. `rendezvous` names a file that no group has used before.

    `ordered`: sums are added up in rank order, so that each depends on its own summands alone, and not on what else is summed with it.
    """
    if size == 1:
        return ALONE
    store = FileStore(rendezvous, size)
    store.set_timeout(_FOREVER)
    group = ProcessGroup(store, rank, size)
    try:
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, _open_gloo(PrefixStore("gloo", store), rank, size))
        if device.type == "cuda":
            group._register_backend(device, ProcessGroup.BackendType.NCCL, _open_nccl(PrefixStore("nccl", store), rank, size, device))
    except RuntimeError as error:
        raise PeerRankLost(f"rank {rank} of {size} cannot join the others: {error}") from error
    return RankGroup(rank, size, group, ordered)


def _open_gloo(store: Store, rank: int, size: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub calls it by another name
    options._timeout, options._threads = _FOREVER, 1
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, size, options)


def _open_nccl(store: Store, rank: int, size: int, device: torch.device) -> torch.distributed.ProcessGroupNCCL:
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    group = torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def _vocabulary_share(rank: int, size: int, vocab_size: int) -> slice:
    units = -(-vocab_size // VOCABULARY_UNIT)
    first, end = (min(index * units // size * VOCABULARY_UNIT, vocab_size) for index in (rank, rank + 1))
    if first == end:
        raise ValueError(f"a vocabulary of {vocab_size} tokens cannot be divided among {size} ranks")
    return slice(first, end)


def _sum_in_order(parts: Tensor) -> Tensor:
    """[ranks, ...]: the first plus the second plus the third, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
