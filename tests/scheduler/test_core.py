"""The core as a table of events and what they must lead to."""

from __future__ import annotations

import pytest

from pagemill.messages.control import PeerLost
from pagemill.messages.frontend import StepOutput
from pagemill.messages.sequences import KvGroup
from pagemill.messages.worker import Plan
from scheduler.core import SchedulerCore
from scheduler.events import Turn
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.prompts import expected, prompt


def test_a_core_is_built_in_one_line_and_has_nothing_to_do() -> None:
    effects = SchedulerCore().handle(Turn(), 0.0)
    assert not any(isinstance(effect, Plan) for effect in effects)


def test_a_request_runs_to_its_length() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=4)
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(5), 4)
    assert driver.finished[key].finish_reason == "length"


def test_only_a_turn_emits_a_plan_and_only_one_is_in_flight() -> None:
    driver = CoreDriver()
    driver.add(prompt(5))
    assert not driver.plans
    driver.turn()
    driver.turn()
    assert len(driver.plans) == 1
    driver.answer()
    assert len(driver.plans) == 1


def test_adding_a_request_twice_changes_nothing() -> None:
    driver = CoreDriver()
    driver.add(prompt(5), max_tokens=2)
    driver.handle(driver.log[0][1])
    assert len(driver.core.sequences) == 1
    driver.run()


def test_a_resubmitted_request_continues_behind_the_outputs_received() -> None:
    driver = CoreDriver()
    whole = expected(driver, prompt(5), 6)
    key = driver.add(prompt(5), max_tokens=6, output=whole[:4])
    driver.run()
    assert driver.outputs[key] == whole


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_frees_everything_at_the_latest_with_the_plan_in_flight(in_flight: bool) -> None:
    driver = CoreDriver()
    key = driver.add(prompt(40), max_tokens=50)
    driver.step()
    if in_flight:
        driver.turn()
    driver.abort(key)
    pool = driver.core.memory.pool
    assert pool.num_fenced == pool.num_used == (3 if in_flight else 0)
    driver.answer()
    assert (pool.num_used, len(driver.core.sequences)) == (0, 0)
    assert key not in driver.finished
    driver.run()


def test_finishing_keeps_the_first_tokens_and_says_nothing_more() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=50)
    for _ in range(4):
        driver.step()
    driver.finish(key, 2)
    driver.run()
    assert len(driver.outputs[key]) == 4
    assert driver.core.memory.pool.num_used == 0


def test_a_lost_frontend_takes_its_own_requests_with_it_and_no_others() -> None:
    driver = CoreDriver()
    driver.add(prompt(5), max_tokens=50)
    driver.step()
    driver.handle(PeerLost("frontend", 0, 2))
    driver.handle(PeerLost("frontend", 1, 1))
    driver.handle(PeerLost("worker", 0, 1))
    assert len(driver.core.sequences) == 1
    driver.handle(PeerLost("frontend", 0, 1))
    assert not driver.core.sequences
    driver.answer()


def test_outputs_of_one_step_travel_in_one_message() -> None:
    driver = CoreDriver()
    for stem in range(4):
        driver.add(prompt(5, stem))
    driver.turn()
    driver.answer()
    messages = [effect for effect in driver.log[-1][2] if isinstance(effect, StepOutput)]
    assert [len(message.outputs) for message in messages] == [4]


def test_each_frontend_is_told_of_its_own_sequences() -> None:
    driver = CoreDriver(max_model_len=10)
    keys = [driver.add(prompt(5, frontend), max_tokens=1, frontend=frontend) for frontend in (1, 0)]
    refused = driver.add(prompt(10), frontend=1)
    assert [effect.frontend for effect in driver.log[-1][2] if isinstance(effect, StepOutput)] == [1]
    assert refused in driver.rejected
    driver.step()
    messages = [effect for effect in driver.log[-1][2] if isinstance(effect, StepOutput)]
    assert [(message.frontend, [output.key for output in message.outputs]) for message in messages] == [(0, [keys[1]]), (1, [keys[0]])]


def test_an_illegal_move_raises_with_the_story() -> None:
    driver = CoreDriver()
    driver.add(prompt(3))
    (sequence,) = driver.core.sequences.values()
    assert isinstance(sequence, Sequence)
    with pytest.raises(ValueError, match="waiting to preempted"):
        sequence.move_to(Status.PREEMPTED)


def test_snapshots_are_sent_at_most_every_interval_and_also_when_idle() -> None:
    driver = CoreDriver(snapshot_interval_s=0.1, idle_snapshot_interval_s=1.0)
    driver.add(prompt(3), max_tokens=40)
    driver.run()
    busy = len(driver.snapshots)
    assert 2 <= busy <= 1 + driver.now / 0.1
    for _ in range(250):
        driver.turn()
    assert 2 <= len(driver.snapshots) - busy <= 4
    last = driver.snapshots[-1]
    assert last.blocks_free + last.blocks_cached + last.blocks_used == last.blocks_total
    assert (last.num_running, last.tokens_generated) == (0, 40)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_snapshot_counts_what_was_computed_shared_and_planned(num_groups: int) -> None:
    driver = CoreDriver(block_size=4, groups=(KvGroup(),) * num_groups, snapshot_interval_s=0.0)
    driver.add(prompt(9), max_tokens=2)
    driver.run()
    driver.add(prompt(9), max_tokens=1)
    driver.turn()
    last = driver.snapshots[-1]
    assert (last.prefix_query_tokens, last.prefix_hit_tokens) == (18, 8)
    assert (last.tokens_computed, last.tokens_recomputed) == (9 + 1 + 1, 0)
    assert last.steps_with_tokens == {16: 1, 1: 2}
    assert (last.num_running, last.blocks_used, last.slot_utilization) == (1, 3 * num_groups, 9 / 12)
    driver.abort(next(iter(driver.core.sequences)))
    driver.turn()
    assert (driver.snapshots[-1].blocks_used, driver.snapshots[-1].slot_utilization) == (3 * num_groups, 0.0)


def test_the_time_in_the_queue_ends_with_the_first_slice() -> None:
    driver = CoreDriver(max_num_seqs=1)
    keys = [driver.add(prompt(5, stem), max_tokens=2) for stem in range(2)]
    driver.run()
    # the clock of the driver moves by 0.01 s with each event
    assert [round(driver.finished[key].queue_s, 3) for key in keys] == [0.02, 0.05]
