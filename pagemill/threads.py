"""How many threads each process may use, and on which processors: decided before it starts.

OpenMP and its like read the number from environment variables once, when they are loaded. Waiting must not spin: on a
small machine one process spinning for work takes the core on which another would produce it. Tensor-parallel ranks
compute at the same time and wait for each other, so each has cores of its own, or one thread if there are too few. Pure.
"""

from __future__ import annotations

from pagemill.machine import Machine

#: Up to here every processor computes; above, two threads on one core only get in each other's way.
_SMALL_MACHINE = 4


def worker_threads(machine: Machine, num_ranks: int = 1) -> int:
    """Threads for the forward pass of each rank. The other processes run while it waits for them, and need little."""
    return max(1, (machine.num_cpus if machine.num_cpus <= _SMALL_MACHINE else machine.num_cores) // num_ranks)


def rank_cpus(machine: Machine, rank: int, num_ranks: int) -> tuple[int, ...]:
    """The processors that are one rank's own. None, which is any, if it is alone or cores are fewer than ranks."""
    if num_ranks == 1 or machine.num_cores < num_ranks:
        return ()
    first, end = (len(machine.cores) * number // num_ranks for number in (rank, rank + 1))
    return tuple(cpu for core in machine.cores[first:end] for cpu in core)


def thread_environment(num_threads: int) -> dict[str, str]:
    """What OpenMP (GNU and LLVM), BLAS libraries and rayon read."""
    count = str(num_threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "RAYON_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false" if num_threads == 1 else "true",
        "OMP_DYNAMIC": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
