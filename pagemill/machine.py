"""Facts about the host, without torch: memory, cores, what the CPU multiplies, whether there is a GPU.

Everything is read, nothing is decided, and containers count: a limit of a control group is the machine.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_TOPOLOGY = Path("/sys/devices/system/cpu")
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """What this process may use."""

    total_bytes: int
    available_bytes: int
    num_cpus: int  #: logical processors this process may run on
    cores: tuple[tuple[int, ...], ...]  #: the logical processors in its affinity mask by physical core, neighbours on one chip beside each other
    has_bfloat16: bool  #: the CPU multiplies bfloat16 in hardware
    num_gpus: int  #: that the installed torch can use

    @property
    def num_cores(self) -> int:
        """Physical cores behind the processors, as far as known."""
        return min(self.num_cpus, len(self.cores))

    @property
    def has_cuda(self) -> bool:
        return self.num_gpus > 0


def read_machine() -> Machine:
    """The facts as of now."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    return Machine(
        total_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, max(limit - used, 0) if limit else memory.available),
        num_cpus=_num_cpus(),
        cores=_cores(),
        has_bfloat16=bool(_cpu_flags() & {"amx_bf16", "avx512_bf16"}),
        num_gpus=_num_gpus(),
    )


def _num_cpus() -> int:
    """Processors in this process's affinity mask, cut to the quota of its control group."""
    usable = len(os.sched_getaffinity(0))
    quota = _read_words(_cgroup_folder() / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def _cores() -> tuple[tuple[int, ...], ...]:
    """Processors that share a core belong together, and cores that share a chip stand side by side."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
        chip, core = (_read_text(topology / name).strip() for name in ("physical_package_id", "core_id"))
        known = chip.isdecimal() and core.isdecimal()
        # What does not say where it is counts as a core of its own, which no other can be mistaken for.
        cores.setdefault((int(chip), int(core)) if known else (-1, -1 - cpu), []).append(cpu)
    return tuple(tuple(cores[place]) for place in sorted(cores))


def _cgroup_memory() -> tuple[int, int]:
    """(limit, bytes in use that cannot be reclaimed); (0, 0) without a limit."""
    folder = _cgroup_folder()
    limit = _read_words(folder / "memory.max")
    current = _read_words(folder / "memory.current")
    if not (limit and limit[0].isdigit() and current):
        return 0, 0
    statistics = _read_words(folder / "memory.stat")
    counts = dict(zip(statistics[::2], statistics[1::2], strict=False))
    return int(limit[0]), max(0, int(current[0]) - int(counts.get("inactive_file", 0)))


def _cgroup_folder() -> Path:
    """This process's folder in the unified hierarchy; one that does not exist where there is none."""
    for line in _read_words(Path("/proc/self/cgroup")):
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    return Path("/sys/fs/cgroup")


def _cpu_flags() -> set[str]:
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _num_gpus() -> int:
    """GPUs that are visible, if the installed torch can use them."""
    try:
        cpu_build = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return 0
    num_gpus = 0 if cpu_build else len(list(_GPUS.glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return num_gpus if visible is None else min(num_gpus, len(_visible_gpus(visible)))


def _visible_gpus(variable: str) -> list[str]:
    """As CUDA reads it: the list ends at the first entry that names no GPU."""
    names = [name.strip() for name in variable.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def _read_words(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_text(path: Path) -> str:
    """Empty where the file does not exist or may not be read: then the fact is unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
