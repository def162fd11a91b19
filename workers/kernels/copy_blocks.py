"""copy_blocks: rows of bytes from one table to another, past the caches, on the calling thread alone.

source [N, size], target [M, size], uint8, rows contiguous; for each (a, b) of pairs: target[b] = source[a]

A swapped block is not looked at again soon, so it should not push weights and KV out of the caches, and its
destination need not be read first: against memmove this measured a third faster. One call copies all pairs
without the interpreter's lock, and never wakes torch's threads, which belong to the forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers import simd
from workers.kernels import Case
from workers.native import Body, NativeKernel, argument_reader, log_reference_once

NAME = "copy_blocks"


def reference(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for a, b in pairs:
        target[b].copy_(source[a])


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """No row of the target may stand in two pairs. The caller has checked the numbers."""
    size = source.shape[1] * source.itemsize
    tables = (source.data_ptr(), source.stride(0) * source.itemsize, target.data_ptr(), target.stride(0) * target.itemsize)
    if source.device.type != "cpu" or target.device.type != "cpu" or any(number % simd.VECTOR_BYTES for number in (*tables, size)):
        log_reference_once(NAME, source.device.type)
        return reference(source, target, pairs)
    numbers = array("q", [number for pair in pairs for number in pair])
    _COPY((), 1, *_Arguments(*tables, size=size, pairs=numbers.buffer_info()[0], num_pairs=len(pairs)))


class _Arguments(NamedTuple):
    source: int
    source_stride: int  #: in bytes, as all of these
    target: int
    target_stride: int
    size: int
    pairs: int
    num_pairs: int


_read = argument_reader(_Arguments)


def _build() -> Body:
    def copy(arguments: int) -> None:
        given = _read(arguments)
        for pair in range(given.pairs, given.pairs + 16 * given.num_pairs, 16):
            read = given.source + simd.read_int64(pair) * given.source_stride
            write = given.target + simd.read_int64(pair + 8) * given.target_stride
            for i in range(0, given.size, simd.VECTOR_BYTES):
                simd.stream(read + i, write + i)
        simd.publish()

    return copy


_COPY = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    """Bytes are bytes: one function whatever the type."""
    _COPY.compile()


def _case(name: str, source_rows: int, target_rows: int, size: int, target_stride: int) -> Case:
    """Tables of float32 `size` wide, for results are compared as floats."""

    def arguments() -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        draw = torch.Generator().manual_seed(size)
        source, wide = _aligned(source_rows, size, draw), _aligned(target_rows, target_stride, draw)
        places = torch.randperm(target_rows, generator=draw).tolist()
        picks = torch.randint(source_rows, (target_rows - 1,), generator=draw).tolist()
        return source, wide[:, :size], list(zip(picks, places, strict=False))

    return Case(name, arguments, 0.0)


def _aligned(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    values = torch.rand(rows * columns + simd.LANES, generator=draw)
    start = -values.data_ptr() % simd.VECTOR_BYTES // values.itemsize
    return values[start : start + rows * columns].view(rows, columns)


CASES = [
    _case("one vector", 2, 2, 16, 16),
    _case("many rows", 9, 40, 48, 48),
    _case("rows of the target further apart", 5, 7, 1040, 2048),
    _case("no whole number of vectors", 5, 7, 20, 20),
]
