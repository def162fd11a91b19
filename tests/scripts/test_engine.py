"""The engine lets core and worker talk as the server would: in which order, and with what in flight."""

from __future__ import annotations

import math

import pytest

from pagemill.ids import NO_PLAN
from pagemill.messages.worker import Plan, RowMissing, SchedulerToWorker, StepDone, TransferDone, WorkerToScheduler
from scripts.lib.costs import LinkCost, StepCost
from scripts.lib.engine import AnyWorker, Engine
from scripts.lib.simulation import SimulatedEngine

#: One block every millisecond, in steps of twenty.
LINK = LinkCost(out_bytes_s=1000.0, in_bytes_s=1000.0, both_share=1.0, per_block_s=0.0, compute_share=0.0)
PRESSED = {"num_blocks": 12, "block_size": 4, "num_swap_slots": 64, "block_bytes": 1, "prefix_caching": False}


class Witness:
    """Passes everything on and writes down what is said, in order."""

    def __init__(self, worker: AnyWorker) -> None:
        self._worker = worker
        self.heard: list[SchedulerToWorker] = []
        self.said: list[WorkerToScheduler] = []

    def handle(self, message: SchedulerToWorker) -> list[WorkerToScheduler]:
        self.heard.append(message)
        said = list(self._worker.handle(message))
        self.said += said
        return said

    def poll(self) -> list[TransferDone]:
        said = list(self._worker.poll())
        self.said += said
        return said

    @property
    def plans(self) -> list[Plan]:
        return [message for message in self.heard if isinstance(message, Plan)]


def witnessed(engine: Engine) -> Witness:
    engine.worker = witness = Witness(engine.worker)
    return witness


def pressed_engine(**limits: object) -> SimulatedEngine:
    return SimulatedEngine(StepCost(), LINK, check_invariants=True, **(PRESSED | limits))


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
def test_everything_finishes_under_pressure_and_nothing_stays_in_flight(plans_in_flight: int, preemption: str) -> None:
    engine = pressed_engine(max_plans_in_flight=plans_in_flight, preemption=preemption)
    witness = witnessed(engine)
    tokens = engine.generate([[1] * 9] * 4, max_tokens=20)
    assert [len(output) for output in tokens] == [20] * 4
    assert engine.num_preemptions > 0
    assert (engine.num_plans_in_flight, engine.transfers) == (0, set())
    ordered = {transfer.transfer_id for plan in witness.plans for transfer in plan.transfers}
    done = [number for message in witness.said if isinstance(message, TransferDone) for number in message.transfer_ids]
    assert sorted(done) == sorted(ordered)
    assert bool(ordered) == (preemption != "recompute")


def test_with_two_plans_in_flight_each_is_made_before_the_one_before_is_known() -> None:
    engine = SimulatedEngine(max_plans_in_flight=2)
    witness = witnessed(engine)
    engine.generate([[1, 2, 3]], max_tokens=5)
    decodes = [plan.slices[0] for plan in witness.plans[1:]]
    assert [piece.after_plan for piece in decodes] == [plan.plan_id for plan in witness.plans[:-1]]


def test_with_one_plan_in_flight_inputs_are_literal() -> None:
    engine = SimulatedEngine(max_plans_in_flight=1)
    witness = witnessed(engine)
    engine.generate([[1, 2, 3]], max_tokens=5)
    assert [piece.after_plan for plan in witness.plans for piece in plan.slices] == [NO_PLAN] * 5


def test_a_second_plan_costs_no_time_of_its_own() -> None:
    """The first token comes after one step, not after two, however far ahead it is planned."""
    for plans_in_flight in (1, 2):
        engine = SimulatedEngine(StepCost(per_step_s=1.0, per_token_s=0.0), max_plans_in_flight=plans_in_flight)
        key = engine.add([1, 2, 3], max_tokens=4)
        engine.run()
        assert engine.outputs[key].token_times == [1.0, 2.0, 3.0, 4.0]
        assert engine.outputs[key].gaps_s == [1.0, 1.0, 1.0]


def test_a_forced_preemption_swaps_what_it_is_told_to() -> None:
    engine = SimulatedEngine(StepCost(), LINK, check_invariants=True, num_blocks=64, block_size=4, num_swap_slots=64, block_bytes=1)
    key = engine.add([1] * 20, max_tokens=10)
    engine.step()
    engine.step()
    engine.preempt(key, "swap", 3)
    engine.run()
    assert engine.outputs[key].num_preemptions == 1
    assert len(engine.outputs[key].token_ids) == 10
    assert engine.snapshot is not None
    assert engine.snapshot.preemptions == {"swap/forced": 1}


def test_an_aborted_sequence_leaves_nothing_to_do() -> None:
    engine = SimulatedEngine()
    key = engine.add([1] * 20, max_tokens=10)
    engine.step()
    engine.abort(key)
    engine.run()
    assert engine.outputs[key].finish_reason is None
    assert len(engine.outputs[key].token_ids) == 1


def test_a_step_waits_until_something_is_due_and_no_longer() -> None:
    engine = SimulatedEngine()
    assert engine.step(until=3.5)
    assert engine.clock() == 3.5
    assert engine.simulated.seconds["idle"] == 3.5
    assert not engine.step()


def test_waiting_for_what_is_not_under_way_is_refused() -> None:
    engine = SimulatedEngine()
    with pytest.raises(RuntimeError, match="nothing is under way"):
        engine.wait(math.inf)
    with pytest.raises(RuntimeError, match="no plan is in flight"):
        engine.apply()


def test_a_plan_that_named_an_unknown_row_is_planned_again() -> None:
    engine = SimulatedEngine(check_invariants=True)

    class Forgetful(Witness):
        def handle(self, message: SchedulerToWorker) -> list[WorkerToScheduler]:
            if isinstance(message, Plan) and len(self.plans) == 1:
                self.heard.append(message)
                return [RowMissing(message.epoch, 0, message.plan_id, message.slices[0].row, message.slices[0].version)]
            return super().handle(message)

    engine.worker = forgetful = Forgetful(engine.worker)
    assert [len(output) for output in engine.generate([[1, 2, 3]], max_tokens=4)] == [4]
    assert len(forgetful.plans) == 5


def test_a_refused_sequence_is_an_error() -> None:
    engine = SimulatedEngine(num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="exceeds_kv_cache"):
        engine.add([1] * 8, max_tokens=1)


def test_seconds_of_steps_are_added_up_by_part() -> None:
    engine = SimulatedEngine(StepCost(per_step_s=1.0, per_token_s=0.0))
    engine.generate([[1, 2, 3]], max_tokens=4)
    assert engine.seconds == {"swap_wait": 0.0, "forward": 4.0}
    assert engine.num_steps == 4


def test_a_worker_that_speaks_out_of_turn_is_an_error() -> None:
    engine = SimulatedEngine()

    class Confused(Witness):
        def handle(self, message: SchedulerToWorker) -> list[WorkerToScheduler]:
            said = super().handle(message)
            return ["hello" if isinstance(one, StepDone) else one for one in said]  # type: ignore[misc]

    engine.worker = Confused(engine.worker)
    with pytest.raises(RuntimeError, match="out of turn"):
        engine.generate([[1]], max_tokens=1)
