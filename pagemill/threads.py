"""How many threads each process may use, as environment variables that are set before it starts.

OpenMP and its like read them once, when they are loaded. Waiting must not spin: on a small machine one
process spinning for work takes the core on which another would produce it. Pure.
"""

from __future__ import annotations

from pagemill.machine import Machine

#: Up to here every processor computes; above, two threads on one core only get in each other's way.
_SMALL_MACHINE = 4


def worker_threads(machine: Machine) -> int:
    """Threads for the forward pass. The other processes run while it waits for them, and need little."""
    return machine.num_cpus if machine.num_cpus <= _SMALL_MACHINE else machine.num_cores


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
