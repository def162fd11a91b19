"""Facts about the host: limits of containers count, and what cannot be read is unknown."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from pagemill import machine
from pagemill.machine import read_machine


@pytest.fixture
def control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_cgroup_folder", lambda: tmp_path)
    return tmp_path


def test_without_limits_the_machine_is_the_machine(control_group: Path) -> None:
    (control_group / "memory.max").write_text("max\n")
    (control_group / "memory.current").write_text("5\n")
    (control_group / "cpu.max").write_text("max 100000\n")
    found = read_machine()
    assert found.total_bytes == psutil.virtual_memory().total
    assert 0 < found.available_bytes <= found.total_bytes
    assert 1 <= found.num_cores <= found.num_cpus
    assert sorted(cpu for core in found.cores for cpu in core) == sorted(os.sched_getaffinity(0))


def test_a_limit_on_memory_is_the_machine_and_cache_of_files_is_free(control_group: Path) -> None:
    (control_group / "memory.max").write_text("1000000\n")
    (control_group / "memory.current").write_text("700000\n")
    (control_group / "memory.stat").write_text("anon 200000\ninactive_file 500000\n")
    found = read_machine()
    assert (found.total_bytes, found.available_bytes) == (1_000_000, 800_000)


def test_a_full_group_has_nothing_left(control_group: Path) -> None:
    (control_group / "memory.max").write_text("1000\n")
    (control_group / "memory.current").write_text("2000\n")
    assert read_machine().available_bytes == 0


def test_a_quota_on_processors_is_the_machine(control_group: Path) -> None:
    (control_group / "cpu.max").write_text("50000 100000\n")
    found = read_machine()
    assert found.num_cpus == found.num_cores == 1


def test_processors_of_one_core_belong_together_and_cores_of_one_chip_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1), 4: (0, 0), 5: (1, 0), 6: (0, 1), 9: (1, 1)}  # cpu -> chip, core
    for cpu, place in places.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        for name, number in zip(("physical_package_id", "core_id"), place, strict=True):
            (folder / name).write_text(f"{number}\n")
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(places) - {3})
    assert read_machine().cores == ((0, 4), (2, 6), (1, 5), (9,))


def test_a_processor_of_which_nothing_is_known_is_a_core_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert sorted(read_machine().cores) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(("flags", "has"), [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("amx_tile amx_bf16", True)])
def test_bfloat16_is_what_the_processor_says(flags: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"processor : 0\nflags\t\t: {flags}\n"
    monkeypatch.setattr(machine, "_read_text", lambda path: text if path.name == "cpuinfo" else "")
    assert read_machine().has_bfloat16 is has


def test_gpus_are_those_that_torch_can_use_and_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert not read_machine().has_cuda
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    assert read_machine().has_cuda
    for variable, count in {"": 0, "-1": 0, "1": 1, "0,1": 2, "GPU-8f,": 1, "0,-1,1": 1, "0,1,2": 2}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert read_machine().num_gpus == count, variable
