"""One step's work: which sequences compute how many tokens, under the token budget.

    1. running sequences with one token left (decode), in order, leaving a token for the head
    2. the head, if it does not run yet and may: it starts
    3. running sequences with more left (chunked prefill), in order, with what is left of the budget
    4. sequences that start: preempted and waiting ones together, in order, the first that does not fit
       ends the search, so nobody is overtaken for want of memory

The head gets at least one token in every step, unless the policy lets nobody in. A sequence whose next block
one ahead of it is computing waits for that block; others may pass it meanwhile. It knows nothing of rows,
messages or workers.
"""

from __future__ import annotations

import msgspec

from scheduler.core_config import CoreConfig
from scheduler.kv_memory import KvMemory
from scheduler.policies import Policy
from scheduler.preemption import Preemption
from scheduler.queues import Queues
from scheduler.sequence import Sequence, Status


class PlannedSlice(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` positions of one sequence from `start` on; `sample` if they reach its last known token."""

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool


class StepBuilder:
    """Builds the slices of one step. Starting and preempting sequences are its side effects."""

    def __init__(self, config: CoreConfig, policy: Policy, queues: Queues, memory: KvMemory, preemption: Preemption) -> None:
        self._config = config
        self._policy = policy
        self._queues = queues
        self._memory = memory
        self._preemption = preemption
        self._slices: dict[int, PlannedSlice] = {}
        self._tokens_left = 0

    def build(self) -> list[PlannedSlice]:
        """The slices of the next step, none if nothing can run."""
        self._slices = {}
        self._tokens_left = self._config.max_num_batched_tokens
        running = list(self._queues.running)
        admits = self._policy.admits(len(running))
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in running:
            (decodes if sequence.num_uncomputed_tokens == 1 else prefills).append(sequence)
        head = self._queues.head()
        starting = head if head is not None and (head.status is Status.PREEMPTED or (head.status is Status.WAITING and admits)) else None
        reserved = 1 if starting is not None or (prefills and prefills[0] is head) else 0
        for sequence in decodes:
            if sequence.status is Status.RUNNING and self._tokens_left > reserved:
                self._plan_decode(sequence)
        if starting is not None:
            self._start(starting)
        for sequence in prefills:
            self._plan(sequence)
        self._start_candidates(admits)
        return list(self._slices.values())

    def forget(self, sequence: Sequence) -> None:
        """A sequence was preempted while the step is being built: what it was given goes back to the budget."""
        planned = self._slices.pop(sequence.seq_id, None)
        if planned is not None:
            self._tokens_left += planned.num_tokens

    def _start_candidates(self, admits: bool) -> None:
        num_passed = 0
        for candidate in self._queues.candidates() if admits else list(self._queues.preempted):
            if self._tokens_left == 0 or num_passed > self._config.max_num_seqs:
                return
            if self._memory.is_being_computed_ahead(candidate):
                num_passed += 1
                continue
            if not self._start(candidate):
                return

    def _start(self, candidate: Sequence) -> bool:
        """Lets a sequence run, if there is room."""
        if not self._preemption.make_room(candidate):
            return False
        if candidate.status is Status.WAITING:
            self._memory.num_query_tokens += candidate.num_prompt_tokens
        self._queues.move(candidate, Status.RUNNING)
        self._plan(candidate)
        return True

    def _plan(self, sequence: Sequence) -> None:
        """Gives a running sequence its slice, or nothing if it must wait for a block."""
        if sequence.status is not Status.RUNNING or self._tokens_left == 0:
            return
        if sequence.num_uncomputed_tokens > 1:
            self._plan_prefill(sequence)
        else:
            self._plan_decode(sequence)

    def _plan_decode(self, sequence: Sequence) -> None:
        """The commonest case by far, kept short: one token, and a new block only at a block's border."""
        start = sequence.num_computed_tokens + sequence.num_planned_tokens
        if start % self._config.block_size or self._preemption.extend(sequence, start + 1):
            self._tokens_left -= 1
            self._slices[sequence.seq_id] = PlannedSlice(sequence, start, 1, True)

    def _plan_prefill(self, sequence: Sequence) -> None:
        self._memory.adopt_prefix(sequence)
        if self._memory.is_being_computed_ahead(sequence):
            return
        start = sequence.num_computed_tokens + sequence.num_planned_tokens
        num_tokens = min(sequence.num_uncomputed_tokens, self._tokens_left)
        if not self._preemption.extend(sequence, start + num_tokens):
            num_tokens = min(num_tokens, self._num_positions_obtainable(sequence) - start)
            if num_tokens <= 0 or not self._memory.extend(sequence, start + num_tokens):
                return
        self._memory.announce(sequence)
        self._tokens_left -= num_tokens
        self._slices[sequence.seq_id] = PlannedSlice(sequence, start, num_tokens, start + num_tokens == sequence.num_tokens)

    def _num_positions_obtainable(self, sequence: Sequence) -> int:
        """How far the tables can reach without anybody yielding."""
        memory = self._memory
        per_table = len(sequence.tables[0]) + memory.pool.num_obtainable // memory.num_groups
        return per_table * self._config.block_size
