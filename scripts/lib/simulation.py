"""The engine without a model: a worker that draws made-up tokens and tells how long a real one would have taken.

The clock only moves by what steps cost, so a run gives the same numbers on every machine and in an instant.
Must not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.messages import InstallRow, Plan, RowResult, SchedulerToWorker, StepDone
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scripts.lib.engine import Engine

#: Drawn tokens are all this one: whatever the simulation shows must not depend on text.
TOKEN_ID = 1


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step: what it costs to run at all, and what each token adds. The defaults suit a small model on a few cores."""

    per_step_s: float = 0.020
    per_token_s: float = 0.001

    def of(self, num_tokens: int) -> float:
        return self.per_step_s + self.per_token_s * num_tokens


class SimulatedWorker:
    """Answers every plan at once; `now` is the time at which a worker of this cost would have answered."""

    def __init__(self, cost: StepCost) -> None:
        self.now = 0.0
        self._cost = cost

    def handle(self, message: SchedulerToWorker) -> StepDone | None:
        if isinstance(message, InstallRow):
            return None
        return self._run(message)

    def _run(self, plan: Plan) -> StepDone:
        seconds = self._cost.of(sum(piece.num_tokens for piece in plan.slices))
        self.now += seconds
        results = tuple(RowResult(piece.row, piece.version, "accepted", (TOKEN_ID,), (), "") for piece in plan.slices if piece.sample)
        return StepDone(plan.epoch, 0, plan.plan_id, results, {"forward": seconds})


class SimulatedEngine(Engine):
    """The engine with a simulated worker. `limits` are fields of `CoreConfig`."""

    def __init__(self, cost: StepCost | None = None, *, check_invariants: bool = False, **limits: object) -> None:
        worker = SimulatedWorker(cost or StepCost())
        core = SchedulerCore(CoreConfig(**limits))  # type: ignore[arg-type]
        super().__init__(core, worker, lambda: worker.now, check_invariants=check_invariants)
