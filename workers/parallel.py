"""Tensor parallelism as layers see it: which share of a weight is this rank's, and how shares meet again.

With one rank every operation is the identity and there is no process group. Layers take the object as an
argument and never ask how many ranks there are; model files do not see it at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a group. Groups of more than one rank do not exist yet and are refused."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise ValueError(f"rank {self.rank} of {self.size}: only one rank is supported")

    def share(self, length: int) -> slice:
        """This rank's part of a dimension. Raises ValueError if it cannot be divided evenly."""
        if length % self.size:
            raise ValueError(f"{length} cannot be divided among {self.size} ranks")
        width = length // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's partial result, added in rank order."""
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's part of the last dimension, in rank order."""
        return part
