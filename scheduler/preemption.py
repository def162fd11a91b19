"""Preemption: who yields when blocks or seats run out, and how.

The policy gives an order; this file says whom among those behind. The head, the first unfinished sequence,
may take from everybody; a running sequence may take from running ones behind it; one that wants to start
may take only from running ones of larger urgency, so that equals never push each other out. Victims yield
from the end of the order and lose all their blocks; their tokens stay, and what the prefix index still
holds of them when they come back need not be computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.kv_memory import KvMemory
from scheduler.queues import Queues
from scheduler.sequence import Sequence, Status


class Preemption:
    """Chooses and carries out. `on_preempted` lets the owner of rows and plans forget the victim."""

    def __init__(self, queues: Queues, memory: KvMemory, max_num_seqs: int, on_preempted: Callable[[Sequence], None]) -> None:
        self._queues = queues
        self._memory = memory
        self._max_num_seqs = max_num_seqs
        self._on_preempted = on_preempted
        self.num_recomputed = 0  #: preemptions whose KV will be computed again

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows a running sequence to `num_tokens` positions, at the cost of those behind it if need be.

        False, and nobody yields, if that would not be enough; then the sequence parks until others finish.
        """
        memory = self._memory
        if memory.extend(sequence, num_tokens):
            return True
        victims = self._victims(sequence)
        missing = memory.blocks_for(num_tokens) - sequence.num_table_blocks
        is_first = sequence is self._queues.running[0]  # all the others may yield to it, and then there is enough
        if not is_first and missing > memory.pool.num_obtainable + memory.num_blocks_gained(victims, sequence):
            return False
        for victim in victims:
            self._preempt(victim)
            if memory.extend(sequence, num_tokens):
                return True
        return False

    def make_room(self, candidate: Sequence) -> bool:
        """Finds a seat and blocks for the whole known context of a sequence that wants to start.

        False, and nobody yields, if there is not enough.
        """
        if self._fits(candidate):
            return True
        victims = self._victims(candidate)
        if candidate is not self._queues.head():
            seats = self._max_num_seqs - len(self._queues.running) + len(victims)
            if not victims or seats < 1 or self._shortage(candidate) > self._memory.num_blocks_gained(victims, candidate):
                return False
        for victim in victims:
            self._preempt(victim)
            if self._fits(candidate):
                return True
        return False

    def _victims(self, needy: Sequence) -> list[Sequence]:
        """Running sequences that `needy` may take from, last in the order first."""
        behind = [victim for victim in reversed(self._queues.running) if victim.order > needy.order]
        if needy.status is Status.RUNNING or needy is self._queues.head():
            return behind
        return [victim for victim in behind if victim.order[0] > needy.order[0]]

    def _fits(self, candidate: Sequence) -> bool:
        return len(self._queues.running) < self._max_num_seqs and self._shortage(candidate) <= 0

    def _shortage(self, candidate: Sequence) -> int:
        """Blocks lacking for the candidate's whole known context beside what the running ones were promised.

        All but the head leave a little headroom, so that the next decoded tokens do not push it out again.
        """
        memory = self._memory
        needed = memory.num_needed_blocks(candidate)
        if candidate is self._queues.head():
            return needed - memory.pool.num_obtainable
        promised = sum(max(0, memory.blocks_for(running.num_tokens) - running.num_table_blocks) for running in self._queues.running)
        headroom = max(1, memory.pool.num_blocks // 64)
        return needed + promised + headroom - memory.pool.num_obtainable

    def _preempt(self, victim: Sequence) -> None:
        self._queues.move(victim, Status.PREEMPTED)
        self._memory.release(victim, victim.planned_in)
        victim.num_computed_tokens = 0
        victim.num_planned_tokens = 0
        victim.num_preemptions += 1
        self.num_recomputed += 1
        self._on_preempted(victim)
