"""What a server holds when nobody asks it anything: blocks, slots, descriptors, shared memory, sockets, processes.

Two looks, one before the faults and one after, must show the same. Must not know what happened in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.helpers.server import Server, open_descriptors, private_bytes, shared_memory

#: Between two looks.
_LOOK_S = 0.1


@dataclass(frozen=True)
class Holdings:
    """One look at a server at rest. Titles are those of its processes, the launcher's among them."""

    sequences: int
    blocks: int  #: used by sequences; cached ones are nobody's
    swap_slots: int  #: held by sequences
    broken_invariant: str  #: "" if there is none
    titles: tuple[str, ...]
    zombies: int
    orphans: int
    descriptors: Mapping[str, int]  #: by title
    shared_memory: int  #: pieces, of all processes together
    sockets: int  #: in the directory of the run
    private_bytes: Mapping[str, int]  #: anonymous and swapped out, by title


def look(server: Server, run_folder: Path) -> Holdings:
    """`run_folder` is the TMPDIR of this server alone. Raises httpx.HTTPError, OSError or psutil.NoSuchProcess while it is being repaired."""
    response = httpx.get(f"{server.url}/debug/state", timeout=10)
    response.raise_for_status()
    state = response.json()
    pids = {"launcher": server.pid} | server.processes()
    return Holdings(
        sequences=len(state["sequences"]),
        blocks=state["blocks"]["used"],
        swap_slots=state["swap_slots"]["held"],
        broken_invariant=state["invariants"]["error"] or "",
        titles=tuple(sorted(pids)),
        zombies=len(server.zombies()),
        orphans=len(server.orphans()),
        descriptors={title: open_descriptors(pid) for title, pid in pids.items()},
        shared_memory=len(set[str]().union(*map(shared_memory, pids.values()))),
        sockets=sum(1 for path in run_folder.glob("*/*")),
        private_bytes={title: private_bytes(pid) for title, pid in pids.items()},
    )


def leaks(before: Holdings, after: Holdings) -> list[str]:
    """What is there afterwards and should not be, a line each."""
    found = [
        f"{count} {what} left"
        for what, count in (
            ("sequences", after.sequences),
            ("blocks", after.blocks),
            ("swap slots", after.swap_slots),
            ("zombies", after.zombies),
            ("orphans", after.orphans),
        )
        if count
    ]
    if after.broken_invariant:
        found.append(f"an invariant does not hold: {after.broken_invariant}")
    if after.titles != before.titles:
        found.append(f"processes are {', '.join(after.titles)} instead of {', '.join(before.titles)}")
    for title, count in after.descriptors.items():
        if count > before.descriptors.get(title, count):
            found.append(f"{title} has {count} descriptors instead of {before.descriptors[title]}")
    for what, one, other in (
        ("pieces of shared memory", before.shared_memory, after.shared_memory),
        ("sockets in its directory", before.sockets, after.sockets),
    ):
        if one != other:
            found.append(f"{other} {what} instead of {one}")
    return found


def settle(server: Server, run_folder: Path, before: Holdings | None = None, timeout_s: float = 30.0) -> Holdings:
    """Waits until nothing is held, or leaked since `before`; looks once more when time is out."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            found = look(server, run_folder)
            if not leaks(before or found, found):
                return found
        except (httpx.HTTPError, OSError, psutil.NoSuchProcess):
            pass  # still being repaired
        time.sleep(_LOOK_S)
    return look(server, run_folder)
