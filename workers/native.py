"""Compiled CPU kernels: built once per machine, kept in a cache, run by torch's own threads.

A kernel is compiled to a C function that takes one address: a row of int64 arguments. Every thread of
the team enters the same call; work is shared out by an atomic counter, so a thread that was descheduled
delays nobody's next item. The team is the one that torch's operators use (its OpenMP library's pool for
the calling thread): no second pool, hence no oversubscription. What a kernel computes must not depend on
who takes which item.

Layout of the arguments: [0] the counter of claimed items, [1] the counter of threads that have entered,
[2 ...] what the caller passed. A kernel names these in a NamedTuple of ints: callers fill one, and the kernel gets
another with the operation that `argument_reader` makes.
"""

# Numba's decorators are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import structlog
import torch
from llvmlite import ir

from workers.simd import define, emit_peek

#: Where a kernel finds the first argument its caller passed, in bytes.
_FIRST_ARGUMENT = 16

Body = Callable[[int], None]
log = structlog.get_logger()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = TypeVar("_Arguments", bound=NamedTuple)


def argument_reader(arguments: type[_Arguments]) -> Callable[[int], _Arguments]:
    """Makes the operation by which a kernel reads these arguments, from the address that it gets."""
    element, count = ir.IntType(64), len(arguments._fields)

    @define(numba.types.NamedUniTuple(numba.types.int64, count, arguments), numba.types.int64)
    def read_arguments(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        values = ir.Constant(ir.ArrayType(element, count), ir.Undefined)
        for index in range(count):
            place = builder.add(address, element(_FIRST_ARGUMENT + 8 * index))
            values = builder.insert_value(values, emit_peek(builder, place, element, align=8), index)
        return values

    return cast(Callable[[int], _Arguments], read_arguments)


def helper(function: _Function) -> _Function:
    """Marks a module-level function as one that kernels may call; it is compiled into them."""
    return cast(_Function, numba.njit(function))


def inlined(function: _Function) -> _Function:
    """Marks a module-level function as a part of kernels: it is written into them where they call it, and their constants stay constants in it."""
    return cast(_Function, numba.njit(inline="always")(function))


_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Compiled(NamedTuple):
    """One function of a kernel."""

    address: int
    run: Callable[[int], None]  #: calls it, on this thread; made once, for that takes as long as a small call
    owner: Any  #: what keeps its code in memory


class NativeKernel:
    """A family of compiled functions, one per tuple of constants, each compiled when first needed."""

    def __init__(self, name: str, build: Callable[..., Body]) -> None:
        self.name = name
        self._build = build
        self._compiled: dict[tuple[int, ...], _Compiled] = {}  #: by their constants

    def compile(self, *constants: int) -> None:
        """Compiles the function for these constants, or finds it on disk, so that the first call need not."""
        if constants in self._compiled:
            return
        use_cache_folder()
        signature = numba.types.void(numba.types.int64)
        owner: Any = numba.cfunc(signature, cache=True, error_model="numpy")(self._build(*constants))
        self._compiled[constants] = _Compiled(owner.address, _ENTRY(owner.address), owner)

    def __call__(self, constants: tuple[int, ...], num_threads: int, *arguments: int) -> None:
        """Runs it on up to `num_threads` threads and returns when all are done."""
        function = self._compiled.get(constants)
        if function is None:
            self.compile(*constants)
            function = self._compiled[constants]
        packed = array("q", (0, 0, *arguments))
        where, _ = packed.buffer_info()
        parallel = _parallel() if num_threads > 1 else None
        if parallel is None:
            function.run(where)
        else:
            parallel(function.address, where, num_threads, 0)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel of the OpenMP library torch has loaded (GNU's, or LLVM's, which offers the same entry)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if any(name in path.rpartition("/")[2] for name in ("libgomp", "libomp", "libiomp")):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                function.restype = None
                return function  # type: ignore[no-any-return]
    log.warning("openmp_not_found", effect="compiled kernels use one thread")
    return None


@cache
def use_cache_folder() -> None:
    """Points numba's cache at a folder named after what all kernels depend on.

    Numba itself notices only changes of the file that holds a kernel.
    """
    shared = b"\0".join(Path(__file__).with_name(name).read_bytes() for name in ("native.py", "simd.py", "matrix_product.py"))
    digest = hashlib.sha256(shared + numba.__version__.encode()).hexdigest()
    home = Path(os.environ.get("PAGEMILL_HOME") or Path.home() / ".cache" / "pagemill")
    folder = home / "kernels" / digest[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    numba.config.reload_config()


def float32_bits(value: float) -> int:
    """A float among the integer arguments of a kernel."""
    return int.from_bytes(struct.pack("<f", value), "little")


def num_threads_for(work: int) -> int:
    """Threads worth waking for about `work` elements of memory traffic: one for little, else torch's number."""
    return 1 if work < 1 << 15 else torch.get_num_threads()


@cache
def log_reference_once(kernel: str, device: str) -> None:
    """Says that an operation runs in plain torch, which is correct but slow."""
    log.warning("kernel_runs_reference", kernel=kernel, device=device)
