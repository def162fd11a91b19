"""One step's work: which sequences compute how many tokens, under the token budget.

    1. running sequences with one token left (decode), in order, leaving a token for the head
    2. the head, if it does not run yet: it starts
    3. running sequences with more left (chunked prefill), in order, with what is left of the budget
    4. sequences that start: preempted and waiting ones together, in order, the first that does not fit
       ends the search, so nobody is overtaken for want of memory

The head is the first sequence that may run; it gets at least one token in every step unless its KV is on the
way from the arena, or a plan in flight is going to give back the blocks that it lacks. A sequence whose blocks are
on the way, or whose next block one ahead of it is computing, waits for them; others may pass it meanwhile. It knows
nothing of rows, messages or workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec

from kvstore.block_table import blocks_for
from pagemill.ids import NO_PLAN, NO_ROW, PlanId
from scheduler.core_config import CoreConfig
from scheduler.early_copies import EarlyCopies
from scheduler.kv_memory import KvMemory
from scheduler.policies import Policy
from scheduler.preemption import Preemption
from scheduler.queues import Queues
from scheduler.sequence import Sequence, Status
from scheduler.swapping import Swapping


class PlannedSlice(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` positions of one sequence from `start` on; `sample` if they reach its last known token.

    `after_plan`: the last of these tokens is not known yet, that plan draws it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool
    after_plan: PlanId = NO_PLAN


class StepBuilder:
    """Builds the slices of one step. Starting and preempting sequences, and transfers, are its side effects."""

    def __init__(
        self, config: CoreConfig, policy: Policy, queues: Queues, memory: KvMemory, swapping: Swapping, early_copies: EarlyCopies, preemption: Preemption
    ) -> None:
        self._config = config
        self._policy = policy
        self._queues = queues
        self._memory = memory
        self._swapping = swapping
        self._early_copies = early_copies
        self._preemption = preemption
        self._longest = min(config.max_model_len, memory.capacity_tokens())
        self._slices: dict[int, PlannedSlice] = {}
        self._tokens_left = 0
        self._alone: Sequence | None = None  #: the step is built for this one

    def build_alone(self, suspect: Sequence) -> list[PlannedSlice]:
        """The slice of a suspect that has the step to itself; none if it cannot run now, and then `build` may follow."""
        self._slices = {}
        self._tokens_left = self._config.max_num_batched_tokens
        self._swapping.coming_step_s = 0.0
        self._preemption.head = self._alone = suspect
        if suspect.status is Status.RUNNING:
            self._plan(suspect)
        else:
            self._start(suspect)
        self._alone = None
        return list(self._slices.values())

    def build(self) -> list[PlannedSlice]:
        """The slices of the next step, none if nothing can run. `begin` of the planner precedes it."""
        self._slices = {}
        self._tokens_left = self._config.max_num_batched_tokens
        running = list(self._queues.running)
        self._swapping.transfers.nothing_runs = not running
        admits = self._policy.admits(len(running) + len(self._queues.preempted))
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in running:
            if sequence.must_be_alone:
                continue
            (decodes if sequence.num_uncomputed_tokens == 1 else prefills).append(sequence)
        self._swapping.coming_step_s = max(map(self._swapping.chunk_s, prefills), default=0.0)
        head = self._preemption.head = self._queues.head(admits)
        starting = head if head is not None and head.status is not Status.RUNNING and not head.must_be_alone else None
        reserved = 1 if starting is not None or (prefills and prefills[0] is head) else 0
        for sequence in decodes:
            if sequence.status is Status.RUNNING and self._tokens_left > reserved:
                self._plan_decode(sequence)
        head_fits = starting is None or self._start(starting)
        for sequence in prefills:
            self._plan(sequence)
        if head_fits:
            self._start_candidates(admits)
            self._early_copies.make(self._likely_victims())
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
            if candidate is self._preemption.head:
                continue  # it was asked already
            if candidate.planned_in != NO_PLAN or candidate.must_be_alone or self._memory.is_being_computed_ahead(candidate):
                num_passed += 1
                continue
            if not self._start(candidate):
                return

    def _start(self, candidate: Sequence) -> bool:
        """Lets a sequence run, or its KV come, if there is room. False if there is none."""
        if candidate.planned_in != NO_PLAN:
            return True  # what became of its last slices is not known yet
        memory, swapping = self._memory, self._swapping
        first_blocks = swapping.num_first_blocks(candidate) if candidate.num_absent else memory.num_groups * blocks_for(self._tokens_left, memory.block_size)
        if not self._preemption.make_room(candidate, first_blocks):
            return False
        memory.adopt_prefix(candidate)
        swapping.adopt(candidate)
        if not swapping.bring_in(candidate):
            self._preemption.num_returning += 1
            self._preemption.num_reserved += memory.num_awaited_blocks(candidate) - candidate.num_device_blocks
            return True
        if candidate.status is Status.WAITING:
            memory.num_query_tokens += candidate.num_prompt_tokens
        self._preemption.resume(candidate)
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
        after_plan = NO_PLAN
        if sequence.planned_in != NO_PLAN:
            if not self._may_overlap(sequence):
                return
            after_plan = sequence.drawn_in if sequence.num_pending_tokens else NO_PLAN
        if start % self._config.block_size or self._preemption.extend(sequence, start + 1):
            self._tokens_left -= 1
            self._slices[sequence.seq_id] = PlannedSlice(sequence, start, 1, True, after_plan)

    def _plan_prefill(self, sequence: Sequence) -> None:
        if sequence.planned_in != NO_PLAN and not self._may_overlap(sequence):
            return
        self._memory.adopt_prefix(sequence)
        if self._memory.is_being_computed_ahead(sequence) and sequence is not self._alone:
            return
        start = sequence.num_computed_tokens + sequence.num_planned_tokens
        num_tokens = min(sequence.num_uncomputed_tokens, self._tokens_left)
        if sequence.suspicion is not None and sequence.suspicion.alone and sequence is not self._alone:
            num_tokens = min(num_tokens, sequence.suspicion.first - start)
            if num_tokens <= 0:
                return
        if not self._preemption.extend(sequence, start + num_tokens):
            num_tokens = min(num_tokens, self._num_positions_obtainable(sequence) - start)
            if num_tokens <= 0 or not self._memory.extend(sequence, start + num_tokens):
                return
        self._memory.announce(sequence)
        self._tokens_left -= num_tokens
        self._slices[sequence.seq_id] = PlannedSlice(sequence, start, num_tokens, start + num_tokens == sequence.num_tokens)

    def _may_overlap(self, sequence: Sequence) -> bool:
        """Whether a sequence with slices in flight may have another: its row must be known, and its end not certain to come first."""
        if sequence.row == NO_ROW:
            return False
        num_pending = sequence.num_pending_tokens
        ends = sequence.num_output_tokens + num_pending >= sequence.limits.max_tokens or sequence.num_tokens + num_pending >= self._longest
        return not (num_pending and ends)

    def _likely_victims(self) -> Iterator[Sequence]:
        """Whose blocks will be wanted next: those that do not run but hold some, then running ones; last in the order first, never the head."""
        for sequence in chain(reversed(self._queues.preempted), reversed(self._queues.running)):
            if sequence.num_device_blocks and sequence is not self._preemption.head:
                yield sequence

    def _num_positions_obtainable(self, sequence: Sequence) -> int:
        """How far the tables can reach without anybody yielding."""
        memory = self._memory
        per_table = len(sequence.tables[0]) + memory.pool.num_obtainable // memory.num_groups
        return per_table * self._config.block_size
