"""The scheduler core: a state machine from events to effects.

`SchedulerCore.handle(event, now)` is the only way in. No sockets, tensors, clock, randomness or logging; no
iteration over sets. It validates before it mutates, so an event that is refused changes nothing. `Turn` is
the only event on which a plan may be emitted: the shell drains its sockets through `handle` first and asks
for work last. The same events at the same times give the same effects, so a recorded log is a test case.

    AddRequest, FinishRequest, AbortRequest   from frontends: sequences come and go
    StepDone, RowMissing, TransferDone        from workers: what became of a plan and of its copies
    PeerLost, Drain                           from the launcher
    Adopt, Revive                             what a former core leaves to this one, before anything else
    Preempt                                   from tests and tools
    Turn                                      nothing more to read: plan a step
"""

from __future__ import annotations

from itertools import chain
from typing import assert_never

from pagemill.ids import NO_PLAN, NO_ROW, PlanId, SeqId
from pagemill.messages.control import Drain, PeerLost, PeerUp
from pagemill.messages.frontend import AbortRequest, AddRequest, FinishRequest, Rejection
from pagemill.messages.sequences import FinishReason, SequenceKey
from pagemill.messages.worker import InstallRow, Plan, RowMissing, StepDone, TransferDone, WorkerReady
from scheduler import admission
from scheduler.core_config import CoreConfig
from scheduler.counters import Counters, snapshot
from scheduler.deadlines import Deadlines
from scheduler.early_copies import EarlyCopies
from scheduler.events import Adopt, Distrust, Effect, Event, Preempt, Revive, Turn
from scheduler.kv_memory import KvMemory
from scheduler.outputs import Outputs
from scheduler.plans import PlanInFlight, SliceInFlight
from scheduler.policies import load_policies
from scheduler.preemption import Preemption
from scheduler.queues import Queues
from scheduler.ranks import all_ranks, includes
from scheduler.rates import PrefillRate, num_pairs
from scheduler.results import Results
from scheduler.rows import Rows
from scheduler.sequence import Sequence, Status
from scheduler.slices import PlannedSlice, StepBuilder
from scheduler.suspicion import Suspects
from scheduler.swapping import Swapping


class SchedulerCore:
    """Owns every live sequence, the order of work and the one global block table."""

    def __init__(self, config: CoreConfig | None = None) -> None:
        self.config = config or CoreConfig()
        policies = load_policies()
        if self.config.scheduling_policy not in policies:
            raise ValueError(f"unknown scheduling policy {self.config.scheduling_policy!r}: there are {', '.join(policies)}")
        self.policy = policies[self.config.scheduling_policy]()
        self.counters = Counters()
        self.memory = KvMemory(self.config.num_blocks, self.config.block_size, self.config.groups, self.config.max_num_batched_tokens)
        self.prefill = PrefillRate(self.config.prefill_tok_s)
        self.swapping = Swapping(self.config, self.memory, self.prefill, self._on_lost)
        self.early_copies = EarlyCopies(self.config, self.memory, self.swapping, self.prefill)
        self.queues = Queues()
        self.rows = Rows(self.config.epoch, len(self.config.groups))
        self.preemption = Preemption(
            self.config, self.queues, self.memory, self.swapping, self.prefill, on_preempted=self._on_preempted, on_resumed=self.counters.count_resume
        )
        self.steps = StepBuilder(self.config, self.policy, self.queues, self.memory, self.swapping, self.early_copies, self.preemption)
        self.sequences: dict[SequenceKey, Sequence] = {}  #: every live one, by its name
        self.plans: list[PlanInFlight] = []  #: oldest first
        self.suspects = Suspects()
        self.longest = min(self.config.max_model_len, self.memory.capacity_tokens())  #: tokens of any one sequence
        self._next_seq_id = 1
        self._next_plan_id = 1
        self._draining = False
        self.is_distrusted = False  #: the ranks do not agree: this core and its workers are at their end
        self._forced: list[Preempt] = []  #: to be obeyed at the next turn
        self._deadlines = Deadlines()  #: until when sequences may wait to be started
        self._outputs = Outputs(self.config.epoch)
        self.results = Results(
            self.memory, self.swapping, self.rows, self.suspects, self.plans, self.counters, self._outputs, longest=self.longest, on_end=self._retire
        )

    def handle(self, event: Event, now: float) -> list[Effect]:  # noqa: C901, PLR0912 - one arm for each event
        """Takes one event at time `now` (seconds, any origin, never backwards) and returns what must be done, in order."""
        effects: list[Effect] = []
        match event:
            case AddRequest():
                self._add(event, now)
            case FinishRequest():
                self._finish_request(event)
            case AbortRequest():
                self._abort(event)
            case StepDone() | RowMissing():
                effects += self._answered(event)
            case PeerLost():
                self._peer_lost(event)
            case Drain():
                self._draining = True
            case Adopt():
                self.memory.pool.adopt(event.blocks, event.expendable_blocks)
                self.swapping.swap.adopt(event.swap_slots)
                self.counters.adopt(event)
            case Revive():
                self._revive(event, now)
            case Turn():
                effects += self._turn(now)
                effects += self._snapshot_if_due(now)
            case TransferDone():
                self._transfer_done(event)
            case Preempt():
                self._forced.append(event)
            case WorkerReady() | PeerUp():
                pass  # the core is built after all workers are ready, and addresses are the shell's business
            case _:
                assert_never(event)
        return effects + self._outputs.take()

    def take_outputs(self) -> list[Effect]:
        """What was to be told when an event could not be handled to its end."""
        return self._outputs.take()

    # --- frontends -------------------------------------------------------------------------------------

    def _add(self, request: AddRequest, now: float) -> None:
        if request.key in self.sequences:
            return
        self.counters.sequences_received += 1
        rejection = admission.reject(request, self.config, self.memory.capacity_tokens(), len(self.queues.waiting), self.queues.num_waiting_tokens)
        if rejection is None and self._draining and not request.resubmitted:
            rejection = Rejection(request.key, "draining", 0, 0)
        if rejection is not None:
            self._reject(rejection)
            return
        self._enter(request, now)
        if request.limits.max_queue_s > 0 and not request.output_ids:
            self._deadlines.add(now + request.limits.max_queue_s, request.key)

    def _enter(self, request: AddRequest, now: float) -> Sequence:
        sequence = Sequence(SeqId(self._next_seq_id), request, now=now, block_size=self.config.block_size, num_groups=len(self.config.groups))
        self._next_seq_id += 1
        sequence.order = self.policy.key(sequence)
        sequence.waiting_since_step = self.counters.num_plans
        if not self.config.prefix_caching:
            sequence.root = b""
        self.sequences[sequence.key] = sequence
        self.queues.add(sequence)
        self.counters.changed = True
        return sequence

    def _revive(self, event: Revive, now: float) -> None:
        """It was taken before, so no limit of a queue stands against it, but the pool may have become smaller."""
        self.counters.sequences_received += 1
        rejection = admission.reject(event.request, self.config, self.memory.capacity_tokens(), 0, 0)
        if rejection is not None:
            self._reject(rejection)
            return
        sequence = self._enter(event.request, now)
        sequence.added_at, sequence.queue_s = event.added_at, event.queue_s
        sequence.num_cached_tokens, sequence.num_preemptions = event.num_cached_tokens, event.num_preemptions
        sequence.has_prefilled, sequence.has_decoded, sequence.suspicion = event.has_prefilled, event.has_decoded, event.suspicion
        if event.suspicion is not None and event.suspicion.alone:
            self.suspects.add(sequence)
        if event.is_new and event.request.limits.max_queue_s > 0:
            self._deadlines.add(event.added_at + event.request.limits.max_queue_s, sequence.key)

    def _reject(self, rejection: Rejection) -> None:
        self.counters.count_end("rejected")
        self._outputs.reject(rejection)

    def _expire(self, now: float) -> None:
        """Sequences that have waited too long to be started are refused."""
        for key in self._deadlines.pop_due(now):
            sequence = self.sequences[key]
            waited_ms, limit_ms = round(1000 * (now - sequence.added_at)), round(1000 * sequence.limits.max_queue_s)
            self._reject(Rejection(key, "queue_timeout", waited_ms, limit_ms))
            self._remove(sequence)

    def _finish_request(self, request: FinishRequest) -> None:
        sequence = self.sequences.get(request.key)
        if sequence is None or not 0 <= request.keep <= sequence.num_output_tokens:
            self.counters.num_dropped += 1
            return
        del sequence.token_ids[sequence.num_prompt_tokens + request.keep :]
        self._retire(sequence, request.reason)

    def _abort(self, request: AbortRequest) -> None:
        sequence = self.sequences.get(request.key)
        if sequence is None:
            self.counters.num_dropped += 1
            return
        self._retire(sequence, "abort")

    def _peer_lost(self, peer: PeerLost) -> None:
        if peer.kind != "frontend":
            return
        for sequence in list(self.sequences.values()):
            if (sequence.key.frontend, sequence.key.incarnation) == (peer.index, peer.incarnation):
                self._retire(sequence, "abort")

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        self.counters.count_end(reason)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Its blocks and row are free at once, or behind the plan that still uses them."""
        fence = sequence.planned_in
        self.queues.move(sequence, Status.FINISHED)
        del self.sequences[sequence.key]
        self._deadlines.discard(sequence.key)
        self.memory.release(sequence, fence)
        self.swapping.release(sequence)
        self.rows.release(sequence, fence)
        if sequence.suspicion is not None:
            self.suspects.discard(sequence)
        self.counters.changed = True

    # --- planning --------------------------------------------------------------------------------------

    def _turn(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._expire(now)
        while not self.is_distrusted and len(self.plans) < self.config.max_plans_in_flight and not (self.plans and self.plans[-1].is_alone):
            planned = self._plan(now)
            if not planned:
                break
            effects += planned
        return effects

    def _plan(self, now: float) -> list[Effect]:
        """The next plan with the rows it needs, or nothing. A plan without slices carries transfers only."""
        plan_id = PlanId(self._next_plan_id)
        self.swapping.plan_id = plan_id
        self.preemption.begin(now, self.counters.num_plans)
        for order in self._forced:
            sequence = self.sequences.get(order.key)
            if sequence is not None and sequence.status is Status.RUNNING:
                self.preemption.force(order, sequence)
        self._forced.clear()
        planned, is_alone = self._build()
        transfers = self.swapping.transfers.take()
        self.memory.pool.close_plan()
        if not planned and not transfers:
            return []
        self._next_plan_id += 1
        installs: list[InstallRow] = []
        slices = []
        in_flight: list[SliceInFlight] = []
        for piece in planned:
            sequence = piece.sequence
            if sequence.row == NO_ROW:
                installs.append(self.rows.install(sequence))
            slices.append(self.rows.slice_of(piece))
            in_flight.append(SliceInFlight(piece, sequence.row, sequence.row_version, sequence.kv_version))
            sequence.num_planned_tokens += piece.num_tokens
            sequence.planned_in = plan_id
            if piece.sample:
                sequence.num_pending_tokens += 1
                sequence.drawn_in = plan_id
            if sequence.queue_s < 0:
                sequence.queue_s = now - sequence.added_at
                self._deadlines.discard(sequence.key)
        self.plans.append(PlanInFlight(plan_id, in_flight, all_ranks(self.config.num_workers), is_alone))
        self.counters.count_plan(planned)
        return [*installs, Plan(self.config.epoch, plan_id, tuple(slices), transfers, self.rows.take_released(installs))]

    def _build(self) -> tuple[list[PlannedSlice], bool]:
        """The slices of the next plan, and whether a suspect has it to itself: in its turn, or because nobody else has work."""
        step = self.counters.num_plans
        suspects = self.suspects.due(step)
        if suspects and self.plans:
            return [], False  # what is in flight comes to its end first
        if suspects:
            self.suspects.had_turn(step)
            if planned := self._build_alone(suspects):
                return planned, True
        planned = self.steps.build()
        if planned or self.plans or suspects:
            return planned, False
        planned = self._build_alone(self.suspects.due(step, at_once=True))
        return planned, bool(planned)

    def _build_alone(self, suspects: list[Sequence]) -> list[PlannedSlice]:
        return next((planned for suspect in suspects if (planned := self.steps.build_alone(suspect))), [])

    def _on_preempted(self, sequence: Sequence) -> None:
        self.steps.forget(sequence)
        self.rows.release(sequence, sequence.planned_in)

    def _on_lost(self, sequence: Sequence) -> None:
        """A copy that a forward waited for has failed: what the sequence computed on it means nothing."""
        self.results.void_slices(sequence)
        self.preemption.stop(sequence)

    # --- workers ---------------------------------------------------------------------------------------

    def _answered(self, answer: StepDone | RowMissing) -> list[Effect]:
        """A plan is carried out, or known not to be, when all ranks have said the same of it."""
        plan = self._plan_in_flight(answer)
        if plan is None:
            return []
        if difference := plan.take(answer):
            self.is_distrusted = True
            return [Distrust(answer.rank, difference)]
        if not plan.ranks_left:
            self._acknowledge(plan)
            if isinstance(answer, StepDone):
                self._step_done(plan)
            else:
                self._row_missing(plan)
        return []

    def _step_done(self, plan: PlanInFlight) -> None:
        self._measure(plan)
        for slice_ in plan.slices:
            if slice_.piece.sequence.status is not Status.FINISHED and not slice_.is_void:
                self.results.apply(slice_, plan.results.get((slice_.row, slice_.row_version)))
        self.results.current = None

    def _row_missing(self, plan: PlanInFlight) -> None:
        """The workers changed nothing: everything of that plan is planned again, the missing row after a new installation."""
        for slice_ in plan.slices:
            # What the slice told the row is lost with it, so every row of the plan is installed anew.
            sequence = slice_.piece.sequence
            if sequence.status is not Status.FINISHED and slice_.counts():
                self.results.give_back_unused(sequence)
            self.results.void_slices(sequence)  # also where they do not count any more: what they computed on is not there

    def _transfer_done(self, done: TransferDone) -> None:
        if done.epoch != self.config.epoch or self.is_distrusted:
            self.counters.num_dropped += 1
            return
        self.counters.num_dropped += self.swapping.done(done, chain(self.queues.preempted, self.queues.waiting))
        self.counters.changed = True

    def _plan_in_flight(self, answer: StepDone | RowMissing) -> PlanInFlight | None:
        """The plan an answer is about: of those that its rank has not answered the oldest, for ranks answer in order.

        Any other answer is dropped and counted: of an older epoch, to an unknown plan, said twice, of no rank.
        """
        if answer.epoch == self.config.epoch and not self.is_distrusted:
            plan = next((plan for plan in self.plans if includes(plan.ranks_left, answer.rank)), None)
            if plan is not None and plan.plan_id == answer.plan_id:
                return plan
        self.counters.num_dropped += 1
        return None

    def _acknowledge(self, plan: PlanInFlight) -> None:
        self.plans.remove(plan)
        for slice_ in plan.slices:
            sequence = slice_.piece.sequence
            if sequence.planned_in == plan.plan_id:
                sequence.planned_in = NO_PLAN
            if slice_.counts():
                sequence.num_planned_tokens -= slice_.piece.num_tokens
                sequence.num_pending_tokens -= slice_.piece.sample
        self.memory.pool.acknowledge(plan.plan_id)
        self.rows.acknowledge(plan.plan_id)
        self.counters.changed = True

    def _measure(self, plan: PlanInFlight) -> None:
        """Lets the planner learn from a step what computing costs."""
        if plan.slices:
            self.counters.count_step(plan.seconds)
            self.swapping.transfers.measure_step(plan.step_s)
        prompts = [slice_.piece for slice_ in plan.slices if slice_.piece.num_tokens > 1]
        if prompts:
            num_tokens = sum(piece.num_tokens for piece in prompts)
            pairs = sum(num_pairs(piece.start, piece.start + piece.num_tokens) for piece in prompts)
            self.prefill.measure(num_tokens, pairs, num_tokens + len(plan.slices) - len(prompts), plan.computing_s)

    def _snapshot_if_due(self, now: float) -> list[Effect]:
        counters = self.counters
        if not counters.is_snapshot_due(self.config, now):
            return []
        counters.changed = False
        counters.last_snapshot = now
        return [snapshot(self.config, self.queues, self.memory, self.swapping, self.preemption.decisions, counters, len(self.suspects))]
