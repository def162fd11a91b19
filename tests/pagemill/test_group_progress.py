"""Several ranks load, one bar moves."""

from __future__ import annotations

from pagemill.group_progress import GroupProgress, group_name
from pagemill.messages.control import Progress


def shown(group: GroupProgress, rank: int, phase: str, fraction: float, detail: str = "", incarnation: int = 0) -> tuple[str, float, str]:
    progress = group.add(rank, incarnation, Progress(phase=phase, fraction=fraction, detail=detail))
    return progress.phase, progress.fraction, progress.detail


def test_one_rank_is_its_own_group() -> None:
    group = GroupProgress(1)
    assert shown(group, 0, "weights", 0.25, "1 of 4 MiB") == ("weights", 0.25, "1 of 4 MiB")
    assert shown(group, 0, "warmup", 0.0) == ("warmup", 0.0, "")
    assert group_name(1) == "worker 0"


def test_the_group_is_as_far_as_its_ranks_on_average_and_tells_of_the_slowest() -> None:
    group = GroupProgress(2)
    assert shown(group, 1, "weights", 0.5, "2 of 4 MiB") == ("weights", 0.25, "")
    assert shown(group, 0, "weights", 0.25, "1 of 4 MiB") == ("weights", 0.375, "1 of 4 MiB, the slowest of 2 ranks")
    assert shown(group, 1, "weights", 0.25, "1 of 4 MiB") == ("weights", 0.25, "1 of 4 MiB"), "none is slower than the other"
    assert group_name(2) == "workers 0-1"


def test_the_group_enters_a_phase_with_the_last_of_its_ranks() -> None:
    group = GroupProgress(2)
    shown(group, 0, "weights", 1.0, "4 of 4 MiB")
    assert shown(group, 0, "warmup", 0.0)[:2] == ("weights", 0.5), "the other has not even begun"
    assert shown(group, 1, "weights", 0.5, "2 of 4 MiB") == ("weights", 0.75, "2 of 4 MiB, the slowest of 2 ranks")
    assert shown(group, 1, "warmup", 0.5, "3 steps") == ("warmup", 0.25, "")


def test_a_new_incarnation_begins_anew() -> None:
    group = GroupProgress(2)
    for rank in (0, 1):
        shown(group, rank, "warmup", 1.0)
    assert shown(group, 1, "weights", 0.5, incarnation=1) == ("weights", 0.25, "")
