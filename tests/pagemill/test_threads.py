"""Threads and processors: who computes on how many, and on which."""

from __future__ import annotations

import pytest

from pagemill.machine import Machine
from pagemill.threads import rank_cpus, thread_environment, worker_threads

Cores = tuple[tuple[int, ...], ...]
TWO: Cores = ((0,), (1,))
#: Eight cores of two threads each.
EIGHT: Cores = tuple((core, core + 8) for core in range(8))


def machine(cores: Cores, num_cpus: int = 0) -> Machine:
    return Machine(
        total_bytes=0,
        available_bytes=0,
        num_cpus=num_cpus or sum(map(len, cores)),
        cores=cores,
        has_bfloat16=False,
        num_gpus=0,
    )


@pytest.mark.parametrize(("cores", "num_ranks", "num_threads"), [(TWO, 1, 2), (TWO, 2, 1), (TWO, 3, 1), (EIGHT, 1, 8), (EIGHT, 3, 2), (EIGHT, 16, 1)])
def test_ranks_divide_the_threads_and_each_has_one_at_least(cores: Cores, num_ranks: int, num_threads: int) -> None:
    assert worker_threads(machine(cores), num_ranks) == num_threads


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_divide_the_cores_and_none_is_torn_apart(num_ranks: int) -> None:
    shares = [rank_cpus(machine(EIGHT), rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(cpu for share in shares for cpu in share) == list(range(16))
    for share in shares:
        assert len(share) >= 2 * worker_threads(machine(EIGHT), num_ranks)
        assert {cpu ^ 8 for cpu in share} == set(share)


@pytest.mark.parametrize(("cores", "num_cpus", "num_ranks"), [(TWO, 2, 1), (TWO, 2, 3), (EIGHT, 2, 4)])
def test_who_is_alone_or_has_too_few_cores_runs_anywhere(cores: Cores, num_cpus: int, num_ranks: int) -> None:
    assert {rank_cpus(machine(cores, num_cpus), rank, num_ranks) for rank in range(num_ranks)} == {()}


def test_no_library_is_left_to_spin_or_to_choose_its_own_number() -> None:
    environment = thread_environment(3)
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")} == {"3"}
    assert (environment["OMP_WAIT_POLICY"], environment["GOMP_SPINCOUNT"], environment["KMP_BLOCKTIME"]) == ("PASSIVE", "0", "0")
