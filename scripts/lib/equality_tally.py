"""Sums over cells: how many, on which axes, what happened in them, and which differed.

A tally is a message from a process that runs cells to the one that started it, and a table for people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from scripts.lib.equality import Found
from scripts.lib.equality_cells import every_place
from scripts.lib.equality_run import EVENTS


class Tally(msgspec.Struct):
    """Grows only."""

    num_cells: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    places: dict[str, int] = {}  #: on the axes -> cells, or requests
    happened: dict[str, int] = {}
    failures: list[str] = []  #: a story for each cell that differed, or raised

    @classmethod
    def of(cls, found: Found) -> Tally:
        return cls(
            num_cells=1,
            num_sequences=found.num_sequences,
            num_tokens=found.num_tokens,
            places=dict(found.cell.places),
            happened=dict(found.happened),
            failures=[str(found)] if found.differences else [],
        )

    def merge(self, other: Tally) -> None:
        self.num_cells += other.num_cells
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.places = dict(Counter(self.places) + Counter(other.places))
        self.happened = dict(Counter(self.happened) + Counter(other.happened))
        self.failures += other.failures

    @property
    def missing(self) -> list[str]:
        """Values of axes that no cell had, and events that never took place."""
        return [place for place in every_place() if place not in self.places] + [event for event in EVENTS if event not in self.happened]

    def table(self) -> Iterator[str]:
        yield f"{self.num_cells:,} cells with {self.num_sequences:,} sequences and {self.num_tokens:,} output tokens"
        yield "Where they were, counted in cells or requests:"
        yield from _lines(self.places, every_place())
        yield "What happened in them:"
        yield from _lines(self.happened, EVENTS)


def _lines(counts: dict[str, int], known: Iterable[str]) -> Iterator[str]:
    for name in dict.fromkeys([*known, *sorted(counts)]):
        yield f"{counts.get(name, 0):12,}  {name}"
