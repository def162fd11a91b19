"""Facts about the host: limits of containers count, and what cannot be read is unknown."""

from __future__ import annotations

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
    assert read_machine().num_cpus == 1


@pytest.mark.parametrize(("flags", "has"), [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("amx_tile amx_bf16", True)])
def test_bfloat16_is_what_the_processor_says(flags: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"processor : 0\nflags\t\t: {flags}\n"
    monkeypatch.setattr(machine, "_read_text", lambda path: text if path.name == "cpuinfo" else "")
    assert read_machine().has_bfloat16 is has


def test_a_cpu_build_of_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert not read_machine().has_cuda
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    assert read_machine().has_cuda
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not read_machine().has_cuda
