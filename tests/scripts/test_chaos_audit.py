"""What a server holds after the faults and did not hold before is found, whatever it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.lib.chaos_audit import leaks
from tests.helpers.chaos import AT_REST


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"private_bytes": {"launcher": 31 * 2**20}, "descriptors": {"launcher": 19, "worker 0": 15}}, None),
        ({"sequences": 1}, "1 sequences left"),
        ({"blocks": 3}, "3 blocks left"),
        ({"swap_slots": 2}, "2 swap slots left"),
        ({"zombies": 1}, "1 zombies left"),
        ({"orphans": 1}, "1 orphans left"),
        ({"broken_invariant": "block 3 is lost"}, "an invariant does not hold: block 3 is lost"),
        ({"titles": ("launcher",)}, "processes are launcher instead of frontend 0, launcher, scheduler 0, worker 0"),
        ({"descriptors": {"launcher": 21, "worker 0": 15}}, "launcher has 21 descriptors instead of 20"),
        ({"shared_memory": 3}, "3 pieces of shared memory instead of 2"),
        ({"shared_memory": 1}, "1 pieces of shared memory instead of 2"),
        ({"sockets": 5}, "5 sockets in its directory instead of 2"),
    ],
)
def test_whatever_is_left_is_found(changed: dict[str, Any], says: str | None) -> None:
    assert leaks(AT_REST, replace(AT_REST, **changed)) == ([] if says is None else [says])
