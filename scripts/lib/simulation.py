"""The engine without a model: a worker that draws made-up tokens and tells how long a real one would have taken.

The clock only moves by what steps and copies cost, so a run gives the same numbers on every machine and in an
instant. Compute and link are separate: copies go on while forwards run, a forward waits only for the transfers
that its plan names as needed, and a wait with nothing to compute ends with the next copy. Must not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagemill.ids import RowId, SeqId
from pagemill.messages.worker import InstallRow, Plan, RowResult, SchedulerToWorker, Slice, StepDone, TransferDone, WorkerToScheduler
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scripts.lib.costs import Cost, LinkCost, StepCost, Work, prefill_tok_s
from scripts.lib.engine import Engine
from scripts.lib.link import Copy, Link

__all__ = ["SimulatedEngine", "SimulatedWorker", "StepCost"]

#: Drawn tokens are all this one: whatever the simulation shows must not depend on text.
TOKEN_ID = 1
#: Where time goes: computing a token to draw the next one, prompts, what was computed before, a forward or everybody
#: waiting for the link, and nobody there.
PARTS = ("decode", "prefill", "recompute", "link", "idle")


class SimulatedWorker:
    """Answers every plan with what a worker of this cost would say; `now` is the time at which it would."""

    def __init__(self, cost: Cost, link: LinkCost, block_bytes: int) -> None:
        self.now = 0.0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._cost, self._link_cost = cost, link
        self._link = Link(link, block_bytes)
        self._done: list[Copy] = []  #: not yet told
        self._sequences: dict[RowId, SeqId] = {}
        self._highest: dict[SeqId, int] = {}  #: positions below were computed before

    def handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        if isinstance(message, InstallRow):
            self._sequences[message.row] = message.seq_id
            return []
        return self._run(message)

    def poll(self) -> Sequence[TransferDone]:
        """One message for each direction in which something was done."""
        done, self._done = self._done, []
        by_direction = ([copy for copy in done if copy.transfer.to_tier == tier] for tier in ("arena", "device"))
        return [_done_message(copies) for copies in by_direction if copies]

    def pass_time(self, until: float, part: str) -> None:
        """Nothing to compute: goes to `until`, or to the end of the next copy if that is earlier."""
        until = min(until, self._link.next_completion())
        if math.isinf(until):
            raise RuntimeError("nothing is under way that could end")
        self._advance(until, {part: 1.0})

    def _run(self, plan: Plan) -> Sequence[WorkerToScheduler]:
        started = self.now
        for transfer in plan.transfers:
            self._link.put(transfer, plan.epoch)
        for transfer in plan.transfers:
            while transfer.needed_by == plan.plan_id and transfer.transfer_id in self._link:
                self._advance(self._link.next_completion(), {"link": 1.0})
        computing = self.now
        if plan.slices:
            self._compute([Work(piece.start, piece.num_tokens, piece.sample) for piece in plan.slices], self._num_recomputed(plan.slices))
        results = tuple(RowResult(piece.row, piece.version, "accepted", (TOKEN_ID,), (), "") for piece in plan.slices if piece.sample)
        seconds = {"swap_wait": computing - started, "forward": self.now - computing}
        return [*self.poll(), StepDone(plan.epoch, 0, plan.plan_id, results, seconds)]

    def _compute(self, works: Sequence[Work], num_recomputed: int) -> None:
        """Lets the step's cost pass; busy copy engines slow it down."""
        left = self._cost.of(works)
        shares = self._shares(works, left, num_recomputed)
        while left > 0:
            rate = 1.0 - self._link_cost.compute_share * self._link.num_busy()
            step_end, copy_end = self.now + left / rate, self._link.next_completion()
            left = 0.0 if step_end <= copy_end else left - (copy_end - self.now) * rate
            self._advance(min(step_end, copy_end), shares)

    def _shares(self, works: Sequence[Work], total_s: float, num_recomputed: int) -> dict[str, float]:
        """Prefill is what the step takes longer than its decodes alone would."""
        decodes = [work for work in works if work.is_decode]
        num_prefill_tokens = sum(work.num_tokens for work in works if not work.is_decode)
        if not num_prefill_tokens:
            return {"decode": 1.0}
        prefill = 1.0 - (self._cost.of(decodes) / total_s if decodes else 0.0)
        again = prefill * num_recomputed / num_prefill_tokens
        return {"decode": 1.0 - prefill, "prefill": prefill - again, "recompute": again}

    def _num_recomputed(self, slices: Sequence[Slice]) -> int:
        """Positions of prefills that were computed before. Notes what is computed now."""
        num_recomputed = 0
        for piece in slices:
            sequence = self._sequences[piece.row]
            highest, end = self._highest.get(sequence, 0), piece.start + piece.num_tokens
            if piece.num_tokens > 1:
                num_recomputed += max(0, min(highest, end) - piece.start)
            self._highest[sequence] = max(highest, end)
        return num_recomputed

    def _advance(self, until: float, shares: dict[str, float]) -> None:
        """Moves the clock no further than the end of the next copy, and says what the time was spent on."""
        for part, share in shares.items():
            self.seconds[part] += share * (until - self.now)
        self._done += self._link.advance(until)
        self.now = until


class SimulatedEngine(Engine):
    """The engine with a simulated worker. `limits` are fields of `CoreConfig`; rates that they leave out are those of the costs."""

    def __init__(self, cost: Cost | None = None, link: LinkCost | None = None, *, check_invariants: bool = False, **limits: object) -> None:
        cost, link = cost or StepCost(), link or LinkCost()
        rates = {"prefill_tok_s": prefill_tok_s(cost), "swap_out_bytes_s": link.out_bytes_s, "swap_in_bytes_s": link.in_bytes_s}
        core = SchedulerCore(CoreConfig(**(rates | limits)))  # type: ignore[arg-type]
        self.simulated = SimulatedWorker(cost, link, core.config.block_bytes)
        super().__init__(core, self.simulated, lambda: self.simulated.now, self._let_time_pass, check_invariants=check_invariants)

    def _let_time_pass(self, until: float) -> None:
        self.simulated.pass_time(until, "link" if self.core.sequences else "idle")


def _done_message(copies: Sequence[Copy]) -> TransferDone:
    seconds = sum(copy.seconds for copy in copies)
    return TransferDone(copies[0].epoch, 0, tuple(copy.transfer.transfer_id for copy in copies), True, seconds)
