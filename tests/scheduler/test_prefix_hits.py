"""The longest prefix at hand: the search against trying every length, and how little it asks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pagemill.messages.sequences import KvGroup
from scheduler.prefix_hits import longest_hit

FULL = KvGroup()
SIZE = 4


@dataclass
class Shelf:
    """Blocks are where `there` says; each is at a place of its own."""

    there: set[tuple[int, int]]
    num_asked: int = 0

    def find(self, index: int, group: int) -> str | None:
        self.num_asked += 1
        return f"{group}:{index}" if (group, index) in self.there else None

    def find_run(self, first: int, last: int, group: int) -> list[str]:
        run: list[str] = []
        for index in range(first, last):
            place = self.find(index, group)
            if place is None:
                break
            run.append(place)
        return run


def needed(group: KvGroup, first: int, end: int) -> range:
    """The blocks from `first` on that the position after block `end` - 1 looks back to, position by position."""
    lowest = max(0, end * SIZE - group.window + 1) if group.window else 0
    return range(max(first, lowest // SIZE), end)


@pytest.mark.parametrize("seed", range(60))
def test_it_is_as_long_as_trying_every_length_finds(seed: int) -> None:
    dice = random.Random(seed)
    windows = [dice.choice((0, 1, 2, 4, 5, 6, 9, 13)) for _ in range(dice.randint(1, 4))]
    groups = [KvGroup(window) for window in windows]
    first, last = dice.randint(0, 3), dice.randint(4, 24)
    share = dice.choice((0.3, 0.7, 0.9, 1.0))
    shelf = Shelf({(group, index) for group in range(len(groups)) for index in range(last + 2) if dice.random() < share})
    lengths = [
        end - first
        for end in range(first, last + 1)
        if all((number, index) in shelf.there for number, group in enumerate(groups) for index in needed(group, first, end))
    ]
    hit = longest_hit(groups, shelf, first, last, SIZE)
    assert hit.num_blocks == max(lengths)
    for number, group in enumerate(groups):
        assert hit.runs[number] == [f"{number}:{index}" for index in needed(group, first, first + hit.num_blocks)]


def test_a_prefix_longer_than_one_whose_window_is_lost_is_found() -> None:
    there = {(0, index) for index in range(10)} | {(1, index) for index in (8, 9)}
    hit = longest_hit([FULL, KvGroup(5)], Shelf(there), 0, 10, SIZE)
    assert (hit.num_blocks, hit.runs[1]) == (10, ["1:9"])
    hit = longest_hit([FULL, KvGroup(6)], Shelf(there), 0, 10, SIZE)
    assert (hit.num_blocks, hit.runs[1]) == (10, ["1:8", "1:9"])
    hit = longest_hit([FULL, KvGroup(10)], Shelf(there), 0, 10, SIZE)
    assert hit == (0, [[], []])


def test_windows_that_are_nowhere_are_ruled_out_one_by_one_and_not_block_by_block() -> None:
    groups = [FULL, *[KvGroup(32 * SIZE)] * 5]
    shelf = Shelf({(0, index) for index in range(2000)})
    assert longest_hit(groups, shelf, 0, 2000, SIZE).num_blocks == 0
    assert shelf.num_asked - 2000 < 2000 // 32 + 5
    shelf.num_asked, shelf.there = 0, shelf.there | {(1, index) for index in range(2000)}
    assert longest_hit(groups, shelf, 0, 2000, SIZE).num_blocks == 0
    assert shelf.num_asked - 2000 < 2000 // 32 + 40, "nor is a window that is there looked through for each that is not"
