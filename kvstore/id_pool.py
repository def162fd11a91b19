"""A pool of numbered places: reference counts, and the order in which unreferenced ones are reused.

Pure accounting: no bytes, no tokens, no clock. Device blocks (`block_pool`) and swap slots (`swap_space`) are
counted alike. Every id is in exactly one of four places:

    free        nobody refers to it and no key names it
    cached      nobody refers to it, but the prefix index still names it; least recently released first
    fenced      nobody refers to it, but a plan in flight may still read or write it
    referenced  its count says by how many tables and transfers

    allocate: free, else the oldest cached        release: referenced -> (fenced ->) cached or free
    reference: cached or fenced -> referenced     acknowledge: fenced -> cached or free

In the words of the metrics, free + cached + used = total, where used counts the fenced too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar, cast

from kvstore.prefix_index import PrefixIndex
from pagemill.ids import NO_PLAN, PlanId

Id = TypeVar("Id", bound=int)


class PoolExhausted(Exception):
    """Nothing is free or cached. Callers ask `num_obtainable` first, so this is a fault of theirs."""


class IdPool(Generic[Id]):
    """Owns the ids 0 to total - 1 and the prefix index over them. Mutated by the scheduler core only."""

    #: What an id is, for error messages.
    NOUN = "id"

    def __init__(self, total: int) -> None:
        self.total = total
        self.index: PrefixIndex[Id] = PrefixIndex()
        self._counts = [0] * total
        #: Used as a stack: the one freed last is the likeliest to be warm in a cache.
        self._free: list[Id] = [cast(Id, number) for number in reversed(range(total))]
        #: Order of eviction, and whether it is expendable: hardly anybody will want it again.
        self._cached: OrderedDict[Id, bool] = OrderedDict()
        #: Unreferenced, waiting for the acknowledgement of this plan.
        self._fenced: dict[Id, PlanId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    @property
    def num_behind_plans(self) -> int:
        """Those that come free as soon as plans in flight are acknowledged."""
        return len(self._fenced)

    @property
    def num_used(self) -> int:
        return self.total - self.num_free - self.num_cached

    @property
    def num_obtainable(self) -> int:
        """What `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def count(self, number: Id) -> int:
        """How many refer to it."""
        return self._counts[number]

    def is_cached(self, number: Id) -> bool:
        return number in self._cached

    def is_expendable(self, number: Id) -> bool:
        """It is cached, but not worth any effort to keep."""
        return self._cached.get(number, False)

    def oldest_cached(self, limit: int) -> Iterator[Id]:
        """The first `limit` that `allocate` would take once nothing is free."""
        return islice(self._cached, limit)

    def allocate(self) -> Id:
        """One with one reference and no key: a free one, else the least recently released cached one."""
        if self._free:
            number = self._free.pop()
        elif self._cached:
            number, _ = self._cached.popitem(last=False)
            self.index.remove(number)
        else:
            raise PoolExhausted(f"all {self.total} {self.NOUN}s are in use")
        self._counts[number] = 1
        return number

    def adopt(self, entries: Iterable[tuple[Id, bytes]], expendable: Iterable[Id] = ()) -> int:
        """Ids of an untouched pool have the contents that these keys stand for, from before it existed: they are cached. Returns how many."""
        adopted = {number: False for number, key in entries if 0 <= number < self.total and self.index.insert(key, number)}
        self._free = [number for number in self._free if number not in adopted]
        self._cached.update(adopted)
        for number in expendable:
            if number in adopted:
                self._expend(number)
        return len(adopted)

    def reference(self, number: Id) -> None:
        """One more refers to what the index named: a hit."""
        if self._counts[number] == 0 and not self._unplace(number):
            raise ValueError(f"{self.NOUN} {number} is free: nothing can refer to it")
        self._counts[number] += 1

    def release(self, number: Id, fence: PlanId = NO_PLAN, *, oldest: bool = False, expendable: bool = False) -> None:
        """One reference less. The last one leaves it cached or free, once plan `fence` is acknowledged.

        `oldest`: it goes back to the front of the cached ones, because it was only looked at, not used. So does what is
        `expendable`.
        """
        if self._counts[number] == 0:
            raise ValueError(f"{self.NOUN} {number} released twice")
        self._counts[number] -= 1
        if self._counts[number] == 0:
            if fence == NO_PLAN:
                self._settle(number)
                if expendable and number in self._cached:
                    self._expend(number)
                elif oldest and number in self._cached:
                    self._cached.move_to_end(number, last=False)
            else:
                self._fenced[number] = fence

    def forget(self, number: Id) -> None:
        """Takes the key away: what is there is of no use to anybody else. A cached one becomes free."""
        self.index.remove(number)
        if number in self._cached:
            del self._cached[number]
            self._free.append(number)

    def acknowledge(self, plan: PlanId) -> None:
        """Lifts the fences of this plan and of all before it."""
        if self._fenced:
            for number in [number for number, fence in self._fenced.items() if fence <= plan]:
                del self._fenced[number]
                self._settle(number)

    def counts(self) -> list[int]:
        """How many refer to each: a copy, for invariants."""
        return list(self._counts)

    def places(self) -> list[str]:
        """The place of every id, re-derived from the containers. Raises ValueError if one is in none or in two."""
        places: list[str] = ["referenced" if count else "" for count in self._counts]
        for name, numbers in self._containers():
            for number in numbers:
                if places[number]:
                    raise ValueError(f"{self.NOUN} {number} is {places[number]} and {name}")
                places[number] = name
        if "" in places:
            raise ValueError(f"{self.NOUN} {places.index('')} is nowhere")
        return places

    def _containers(self) -> list[tuple[str, list[Id]]]:
        return [("free", self._free), ("cached", list(self._cached)), ("fenced", list(self._fenced))]

    def _unplace(self, number: Id) -> bool:
        """Takes an unreferenced id out of the place from which it can be referred to again."""
        if number in self._cached:
            if self._cached.pop(number):
                self.index.mark(number, is_expendable=False)
        elif number in self._fenced:
            del self._fenced[number]
        else:
            return False
        return True

    def _expend(self, number: Id) -> None:
        """A cached one is the next to be overwritten."""
        self._cached[number] = True
        self._cached.move_to_end(number, last=False)
        self.index.mark(number, is_expendable=True)

    def _settle(self, number: Id) -> None:
        if number in self.index:
            self._cached[number] = False
        else:
            self._free.append(number)
