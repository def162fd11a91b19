"""Compiled CPU kernels: built once per machine, kept in a cache, run by torch's own threads.

A kernel is compiled to a C function that takes one address: a row of int64 arguments. Every thread of
the team enters the same call; work is shared out by an atomic counter, so a thread that was descheduled
delays nobody's next item. The team is the one that torch's operators use (its OpenMP library's pool for
the calling thread): no second pool, hence no oversubscription. What a kernel computes must not depend on
who takes which item.

Layout of the arguments: [0] the counter of claimed items, [1] the counter of threads that have entered,
[2 ...] what the caller passed. A kernel names these in a NamedTuple of ints: callers fill one, and `argument_places` of it
says where the kernel finds each.
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

#: Where a kernel finds the first argument its caller passed, in bytes.
_FIRST_ARGUMENT = 16

Body = Callable[[int], None]
log = structlog.get_logger()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = TypeVar("_Arguments", bound=NamedTuple)


def argument_places(arguments: type[_Arguments]) -> _Arguments:
    """Where a kernel finds each of these arguments, in bytes from the address that it gets."""
    return arguments._make(range(_FIRST_ARGUMENT, _FIRST_ARGUMENT + 8 * len(arguments._fields), 8))


def helper(function: _Function) -> _Function:
    """Marks a module-level function as one that kernels may call; it is compiled into them."""
    return cast(_Function, numba.njit(function))


class NativeKernel:
    """A family of compiled functions, one per tuple of constants, each compiled when first needed."""

    def __init__(self, name: str, build: Callable[..., Body]) -> None:
        self.name = name
        self._build = build
        #: The compiled functions by their constants; kept alive here.
        self._compiled: dict[tuple[int, ...], Any] = {}

    def compile(self, *constants: int) -> int:
        """The address of the function for these constants."""
        found = self._compiled.get(constants)
        if found is None:
            use_cache_folder()
            signature = numba.types.void(numba.types.int64)
            found = numba.cfunc(signature, cache=True, error_model="numpy")(self._build(*constants))
            self._compiled[constants] = found
        return cast(int, found.address)

    def __call__(self, constants: tuple[int, ...], num_threads: int, *arguments: int) -> None:
        """Runs it on up to `num_threads` threads and returns when all are done."""
        found = self._compiled.get(constants)
        address = found.address if found is not None else self.compile(*constants)
        packed = array("q", (0, 0, *arguments))
        where, _ = packed.buffer_info()
        parallel = _parallel() if num_threads > 1 else None
        if parallel is None:
            _ENTRY(address)(where)
        else:
            parallel(address, where, num_threads, 0)


_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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
