"""Compiled kernels: run by every thread of the team, once per item, and kept in the cache between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from workers import native, simd
from workers.native import Body, NativeKernel, argument_reader, inlined


class _Arguments(NamedTuple):
    num_items: int
    done: int


_read = argument_reader(_Arguments)


@inlined
def _count(place: int, offset: int) -> None:
    simd.claim(place + offset)


def _build(offset: int) -> Body:
    def count_items(arguments: int) -> None:
        given = _read(arguments)
        while True:
            item = simd.claim(arguments)
            if item >= given.num_items:
                return
            _count(given.done + item * 8, offset)

    return count_items


COUNT = NativeKernel("count", _build)


def test_every_item_is_done_once_whatever_the_number_of_threads() -> None:
    for threads in (1, 2, 5):
        done = np.zeros(1000, dtype=np.int64)
        COUNT((0,), threads, len(done), done.ctypes.data)
        assert (done == 1).all()


def test_constants_select_the_compiled_variant() -> None:
    done = np.zeros(11, dtype=np.int64)
    COUNT((8,), 2, 10, done.ctypes.data)
    assert done.tolist() == [0] + [1] * 10


def test_the_team_is_that_of_torch() -> None:
    torch.ones(1 << 20).exp_()
    COUNT((0,), torch.get_num_threads(), 0, 0)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        torch.ones(1 << 20).exp_()
        COUNT((0,), torch.get_num_threads(), 0, 0)
    assert len(os.listdir("/proc/self/task")) == before
    assert native._parallel() is not None


def test_compiled_kernels_are_found_again_on_disk() -> None:
    COUNT.compile(0)
    kept = {path: path.stat().st_mtime_ns for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*count_items*")}
    assert any(path.suffix == ".nbc" for path in kept)
    done = np.zeros(3, dtype=np.int64)
    again = NativeKernel("count", _build)
    again((0,), 1, len(done), done.ctypes.data)
    assert done.tolist() == [1, 1, 1]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "it was compiled, and written, anew"
