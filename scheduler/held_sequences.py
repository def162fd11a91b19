"""Sequences while there is no core: kept as the next one is going to be told of them, and counted.

What is asked for each of thousands of arrivals is known without looking at those that are there. Knows neither why there is
no core, nor who may be taken: limits are the keeper's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagemill.ids import num_ids
from pagemill.messages.sequences import SequenceKey
from scheduler.deadlines import Deadlines
from scheduler.events import Revive


class HeldSequences:
    """In the order in which they were added, by name. Owned by the keeper."""

    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, Revive] = {}
        self._deadlines = Deadlines()
        self.num_waiting_tokens = 0  #: prompt tokens of those that have never been started

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[SequenceKey]:
        return iter(self._by_key)

    def revives(self) -> list[Revive]:
        return list(self._by_key.values())

    def add(self, revive: Revive) -> None:
        """Takes one that is not there."""
        key, limit_s = revive.request.key, revive.request.limits.max_queue_s
        if key in self._by_key:
            raise ValueError(f"{key} is held already")
        self._by_key[key] = revive
        if revive.is_new:
            self.num_waiting_tokens += num_ids(revive.request.prompt_ids)
            if limit_s > 0:
                self._deadlines.add(revive.added_at + limit_s, key)

    def pop(self, key: SequenceKey) -> Revive | None:
        """Lets go of one, if it is there."""
        revive = self._by_key.pop(key, None)
        if revive is not None and revive.is_new:
            self.num_waiting_tokens -= num_ids(revive.request.prompt_ids)
            self._deadlines.discard(key)
        return revive

    def pop_expired(self, now: float) -> list[Revive]:
        """Lets go of those that have never been started and may wait no longer, whatever they wait for."""
        return [revive for key in self._deadlines.pop_due(now) if (revive := self.pop(key)) is not None]

    def take(self) -> list[Revive]:
        """Lets go of all, by their arrival."""
        revives = sorted(self._by_key.values(), key=lambda revive: revive.request.arrival)
        self._by_key.clear()
        self._deadlines = Deadlines()
        self.num_waiting_tokens = 0
        return revives
