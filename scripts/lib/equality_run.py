"""One cell under way: who comes, goes and is made to yield at which step, and what of all this really took place.

It drives an engine and looks at it from outside: messages to the worker, decisions and counters of the core.
Must not know what the tokens should be.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagemill.ids import NONE
from pagemill.messages.decisions import Decision
from pagemill.messages.sequences import SequenceKey
from pagemill.messages.worker import Plan, SchedulerToWorker, TransferDone, WorkerToScheduler
from scheduler.decisions import RING_SIZE
from scheduler.invariants import check
from scripts.lib.engine import AnyWorker, Engine, Output
from scripts.lib.equality_cells import Asked, Cell, Request

#: A cell that takes more is never going to end.
_MAX_STEPS = 20_000
#: News of a copy come late by at most so many messages or looks.
_MOST_LATE = 4

#: Names of what `CellRun.happened` counts, where a run of many cells should have seen all of it.
EVENTS = (
    "slice of a prompt cut short",
    "slice after a plan in flight",
    "copy out",
    "copy in",
    "copy that a forward waits for",
    "block copied early",
    "preempted: keep/forced",
    "preempted: swap/forced",
    "preempted: recompute/forced",
    "preempted: swap/growth",
    "preempted: recompute/growth",
    "preempted: swap/start",
    "preempted: recompute/start",
    "preempted: keep/seat",
    "recomputed because the arena was full",
    "swapped with copies made before",
    "token computed again",
    "token found in the arena",
    "prompt: cold",
    "prompt: partial hit",
    "prompt: full hit",
    "output ended by a stop id",
    "client went away",
)


class Witness:
    """Stands between core and worker: counts what slices and transfers there are, and may tell late that a copy is done."""

    def __init__(self, worker: AnyWorker, *, late: random.Random | None) -> None:
        self.happened: Counter[str] = Counter()
        self._worker, self._late = worker, late
        self._news: deque[tuple[int, TransferDone]] = deque()  #: when to tell, and what
        self._now = 0  #: messages and looks so far

    def handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        if isinstance(message, Plan):
            self._count(message)
        answers = self._worker.handle(message)
        done = [answer for answer in answers if isinstance(answer, TransferDone)]
        return [*self._due(done), *(answer for answer in answers if not isinstance(answer, TransferDone))]

    def poll(self) -> Sequence[TransferDone]:
        return self._due(self._worker.poll())

    def _due(self, done: Sequence[TransferDone]) -> Sequence[TransferDone]:
        """What is told now: later news may overtake earlier ones."""
        if self._late is None:
            return done
        self._now += 1
        self._news += ((self._now + self._late.randint(0, _MOST_LATE), one) for one in done)
        due = [one for when, one in self._news if when <= self._now]
        self._news = deque((when, one) for when, one in self._news if when > self._now)
        return due

    def _count(self, plan: Plan) -> None:
        happened = self.happened
        for piece in plan.slices:
            happened["slice after a plan in flight"] += piece.after_plan != NONE
            happened["slice of a prompt cut short"] += not piece.sample
        for transfer in plan.transfers:
            happened["copy out" if transfer.from_tier == "device" else "copy in"] += 1
            happened["copy that a forward waits for"] += transfer.needed_by != NONE


@dataclass
class _Stay:
    """A sequence that came, and when its client goes away."""

    key: SequenceKey
    asked: Asked
    leaves_at: float = float("inf")
    went_away: bool = False


class CellRun:
    """Used once."""

    def __init__(self, cell: Cell, engine: Engine) -> None:
        self._cell, self._engine = cell, engine
        self._draw = random.Random(cell.number)
        self._witness = Witness(engine.worker, late=self._draw if cell.late_news else None)
        engine.worker = self._witness
        self._stays: list[_Stay] = []

    def run(self) -> None:
        """Raises RuntimeError if a sequence never ends or something is left when all have, InvariantError if the books do not balance."""
        for request in self._cell.warm_up:
            self._add(request)
            self._engine.run()
        arrivals = deque(sorted(self._cell.arrivals, key=lambda arrival: arrival.at_step))
        forced = deque(self._cell.forced)
        step, force_at = 0, forced[0].steps_later if forced else 0
        is_busy = True
        while is_busy or arrivals:
            while arrivals and (arrivals[0].at_step <= step or not is_busy):
                arrival = arrivals.popleft()
                is_busy = True
                self._add(arrival.request, step + arrival.stays_steps if arrival.stays_steps is not None else float("inf"))
            self._let_go(step)
            running = self._engine.core.queues.running
            if forced and step >= force_at and running:
                order = forced.popleft()
                self._engine.preempt(running[int(order.whom * len(running))].key, order.kind, order.num_blocks)
                force_at = step + (forced[0].steps_later if forced else 0)
            is_busy = self._engine.step()
            step += 1
            if step > _MAX_STEPS:
                raise RuntimeError(f"still busy after {step} steps, with {list(self._engine.core.sequences.values())}")
        self._engine.require_idle()
        self._require_nothing_left()

    def outcomes(self) -> Iterator[tuple[Asked, Output, bool]]:
        """What each sequence asked and got, and whether its client went away before the end."""
        for stay in self._stays:
            yield stay.asked, self._engine.outputs[stay.key], stay.went_away

    def happened(self) -> Counter[str]:
        """How often what took place."""
        core = self._engine.core
        happened = +self._witness.happened
        happened.update({f"preempted: {name}": count for name, count in core.preemption.decisions.preemptions.items()})
        for decision in core.preemption.decisions.newest(RING_SIZE):
            happened += _of_decision(decision, has_arena=core.swapping.swap.total > 0)
        happened["block copied early"] = core.swapping.transfers.num_early_copies
        happened["token found in the arena"] = core.swapping.num_arena_hit_tokens
        happened["token computed again"] = core.counters.tokens_recomputed
        for asked, output, went_away in self.outcomes():
            sharable = (len(asked.prompt_ids) - 1) // core.config.block_size * core.config.block_size
            hit = "cold" if not output.num_cached_tokens else "full hit" if output.num_cached_tokens == sharable else "partial hit"
            happened[f"prompt: {hit}"] += 1
            happened["output ended by a stop id"] += output.finish_reason == "stop"
            happened["client went away"] += went_away
        return +happened

    def _add(self, request: Request, leaves_at: float = float("inf")) -> None:
        for asked in request.asked:
            key = self._engine.add(
                asked.prompt_ids, max_tokens=asked.max_tokens, sampling=asked.sampling, seed=asked.seed, prefix_caching=request.prefix_caching
            )
            self._stays.append(_Stay(key, asked, leaves_at))

    def _let_go(self, step: int) -> None:
        for stay in self._stays:
            if stay.leaves_at <= step and stay.key in self._engine.core.sequences:
                stay.went_away = True
                self._engine.abort(stay.key)

    def _require_nothing_left(self) -> None:
        core = self._engine.core
        check(core)
        left = {
            "blocks": core.memory.pool.num_used,
            "swap slots": core.swapping.swap.num_used,
            "transfers": len(core.swapping.transfers),
            "announced blocks": len(core.memory.announced()),
        }
        if any(left.values()):
            raise RuntimeError(f"all sequences have ended, and there are left: {left}")


def _of_decision(decision: Decision, *, has_arena: bool) -> Counter[str]:
    happened: Counter[str] = Counter()
    for victim in decision.victims:
        if victim.yielded and victim.blocks:
            happened["recomputed because the arena was full"] += has_arena and victim.swap_s is None and victim.kind == "recompute"
            happened["swapped with copies made before"] += victim.kind == "swap" and victim.blocks_to_copy < victim.blocks
    return happened
