"""The keeper: sequences outlive their workers and, with the help of the directory, their scheduler."""

from __future__ import annotations

import pytest

from pagemill.messages.control import Drain, PeerLost
from pagemill.messages.frontend import AddRequest, StatsSnapshot
from pagemill.messages.sequences import SamplingParams
from scheduler.core import SchedulerCore
from scheduler.events import Effect, Event, Preempt, Turn
from tests.helpers.core_driver import CoreDriver, break_core
from tests.helpers.fake_worker import expected_tokens

PROMPT = list(range(1, 20))


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    return expected_tokens(prompt, SamplingParams(), 0, 8192, max_tokens, 32)


def driver(**numbers: object) -> CoreDriver:
    return CoreDriver(None, **({"num_blocks": 32, "block_size": 4, "num_swap_slots": 32, "preemption": "swap"} | numbers))


# --- workers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_lost_worker_costs_a_pause_and_no_token(num_steps: int) -> None:
    engine = driver()
    keys = [engine.add(PROMPT[:length]) for length in (3, 9, 19)]
    for _ in range(num_steps):
        engine.step()
    engine.turn()
    epoch = engine.keeper.epoch
    engine.lose_worker()
    engine.worker_back()
    assert engine.keeper.epoch == epoch + 1
    engine.run()
    assert [engine.outputs[key] for key in keys] == [expected(PROMPT[:length]) for length in (3, 9, 19)]


def test_what_lay_in_the_arena_need_not_be_computed_again() -> None:
    engine = driver()
    key = engine.add(PROMPT, max_tokens=12)
    engine.step()
    engine.handle(Preempt(key, "swap", 100))
    engine.turn()
    engine.tell_transfers()
    engine.lose_worker()
    engine.worker_back()
    engine.run()
    assert engine.outputs[key] == expected(PROMPT, 12)
    assert engine.core.swapping.num_arena_hit_tokens + engine.core.swapping.num_moved_tokens >= 16
    assert engine.core.counters.tokens_computed < len(PROMPT)


def test_a_slot_that_was_being_written_is_not_believed() -> None:
    engine = driver()
    engine.auto_transfers = False
    key = engine.add(PROMPT, max_tokens=12)
    engine.step()
    engine.handle(Preempt(key, "swap", 100))
    engine.turn()
    engine.lose_worker()
    engine.worker_back()
    engine.auto_transfers = True
    engine.run()
    assert engine.outputs[key] == expected(PROMPT, 12)
    assert engine.core.swapping.num_arena_hit_tokens == 0


def test_requests_come_and_go_while_there_is_no_core() -> None:
    engine = driver(max_num_seqs=4)
    before, gone, finished = engine.add([1, 2, 3]), engine.add([4, 5]), engine.add([6, 7], max_tokens=20)
    of_lost_frontend = engine.add([8, 9], frontend=3)
    engine.step()
    engine.lose_worker()
    engine.abort(gone)
    engine.finish(finished, 1)
    engine.handle(PeerLost("frontend", 3, 1))
    engine.abort(gone)
    during = engine.add([1, 2, 3, 4])
    engine.handle(engine.requests[during])
    assert engine.keeper.num_sequences == 2
    engine.turn()
    engine.worker_back()
    engine.run()
    assert engine.outputs[before] == expected([1, 2, 3])
    assert engine.outputs[during] == expected([1, 2, 3, 4])
    assert not {gone, finished, of_lost_frontend} & set(engine.finished)


def test_without_a_core_no_more_is_taken_than_can_be_held() -> None:
    engine = driver()
    engine.keeper._max_num_held = 2
    engine.lose_worker()
    keys = [engine.add([1, number]) for number in range(3)]
    assert [engine.rejected[key].reason for key in keys[2:]] == ["queue_full"]
    engine.worker_back()
    engine.run()
    assert set(engine.finished) == set(keys[:2])


def test_who_waits_for_workers_does_not_wait_for_longer_than_it_said() -> None:
    engine = driver()
    started = engine.add([1, 2, 3], max_queue_s=0.5)
    engine.step()
    engine.lose_worker()
    late, patient = engine.add([4, 5], max_queue_s=0.5), engine.add([6, 7])
    engine.now += 1.0
    engine.turn()
    assert {key: rejection.reason for key, rejection in engine.rejected.items()} == {late: "queue_timeout"}
    engine.worker_back()
    engine.run()
    assert set(engine.finished) == {started, patient}


@pytest.mark.parametrize("expires", ["without a core", "in the next core"])
@pytest.mark.parametrize("comes_to", ["no core", "a core that is lost"])
def test_a_stream_begun_by_a_former_scheduler_is_never_refused_for_having_waited(comes_to: str, expires: str) -> None:
    engine = driver()
    begun = expected([1, 2, 3])[:1]
    if comes_to == "no core":
        engine.lose_worker()
    key = engine.add([1, 2, 3], output=begun, max_queue_s=0.5)
    if comes_to == "a core that is lost":
        engine.lose_worker()
    engine.now += 1.0
    if expires == "without a core":
        engine.turn()
    engine.worker_back()
    engine.run()
    assert engine.rejected == {}
    assert engine.outputs[key] == expected([1, 2, 3])


def test_without_a_core_prompt_tokens_that_wait_are_bounded() -> None:
    engine = driver()
    engine.keeper._max_tokens_held = 10
    engine.lose_worker()
    keys = [engine.add([1] * length) for length in (19, 1)]
    assert {key: rejection.reason for key, rejection in engine.rejected.items()} == {keys[1]: "queue_tokens"}


def test_a_draining_server_stays_so_over_a_loss() -> None:
    engine = driver()
    running = engine.add([1, 2, 3])
    engine.step()
    engine.handle(Drain(5.0))
    engine.lose_worker()
    late = engine.add([1, 2])
    engine.worker_back()
    later = engine.add([3, 4])
    engine.run()
    assert engine.outputs[running] == expected([1, 2, 3])
    assert [engine.rejected[key].reason for key in (late, later)] == ["draining", "draining"]


def test_a_pool_that_has_become_too_small_refuses_what_it_cannot_hold() -> None:
    engine = driver()
    key = engine.add(PROMPT, max_tokens=30)
    engine.step()
    engine.lose_worker()
    engine._config = engine._config.__class__(num_blocks=4, block_size=4)
    engine.worker_back()
    assert engine.rejected[key].reason == "exceeds_kv_cache"


# --- the scheduler ---------------------------------------------------------------------------------------


def test_a_new_scheduler_finds_the_kv_that_the_old_one_has_left_on_the_device() -> None:
    engine = driver()
    key = engine.add(PROMPT, max_tokens=12)
    for _ in range(4):
        engine.step()
    engine.restart_scheduler()
    engine.run()
    assert engine.outputs[key] == expected(PROMPT, 12)
    assert engine.core.memory.num_hit_tokens >= 16
    assert engine.core.counters.tokens_computed <= 6 + 8


def test_a_new_scheduler_finds_the_kv_that_the_old_one_has_left_in_the_arena() -> None:
    engine = driver()
    key = engine.add(PROMPT, max_tokens=12)
    engine.step()
    engine.handle(Preempt(key, "swap", 100))
    engine.turn()
    engine.tell_transfers()
    engine.lose_worker()
    engine.restart_scheduler()
    engine.run()
    assert engine.outputs[key] == expected(PROMPT, 12)
    assert engine.core.swapping.num_arena_hit_tokens >= 16


def test_a_new_scheduler_and_new_workers_together_lose_no_token() -> None:
    engine = driver()
    key = engine.add(PROMPT, max_tokens=12)
    for _ in range(4):
        engine.step()
    engine.lose_worker()
    engine.restart_scheduler()
    engine.run()
    assert engine.outputs[key] == expected(PROMPT, 12)
    assert engine.core.memory.num_hit_tokens == 0, "the pool is gone"


def test_what_is_sent_again_is_taken_whatever_stands_in_the_queue() -> None:
    engine = driver(max_num_queued=2)
    keys = []
    for number in range(5):
        keys.append(engine.add([1, 2, number]))
        engine.step()
    engine.restart_scheduler()
    engine.run()
    assert not engine.rejected
    assert all(engine.outputs[key] == expected([1, 2, number]) for number, key in enumerate(keys))


# --- numbers ---------------------------------------------------------------------------------------------


def test_the_numbers_of_every_core_balance_and_every_end_is_counted_once() -> None:
    engine = driver()
    for number in range(6):
        engine.add([1, 2, number], max_tokens=4)
        engine.step()
    engine.lose_worker()
    during = engine.add([3, 4], max_tokens=4)
    engine.abort(engine.add([5, 6]))
    engine.worker_back()
    engine.step()
    break_core(engine, "AddRequest")
    engine.add([7, 8])
    engine.run()
    engine.now += 10.0
    engine.handle(Turn())
    for told in engine.snapshots:
        assert told.sequences_received == sum(told.sequences_finished.values()) + told.num_waiting + told.num_running + told.num_preempted
    last: dict[int, StatsSnapshot] = {snapshot.epoch: snapshot for snapshot in engine.snapshots}
    assert len(last) == 3
    ended = [sum(snapshot.sequences_finished.get(reason, 0) for snapshot in last.values()) for reason in ("length", "abort", "error")]
    assert ended == [7, 1, 1]
    handed_on = sum(snapshot.sequences_finished.get("handed_on", 0) for snapshot in last.values())
    assert sum(snapshot.sequences_received for snapshot in last.values()) == 9 + handed_on
    assert sum(snapshot.core_rebuilds for snapshot in last.values()) == 1
    assert during in engine.finished


def test_an_added_request_that_is_known_is_counted_once() -> None:
    engine = driver()
    key = engine.add([1, 2])
    engine.handle(engine.requests[key])
    assert engine.core.counters.sequences_received == 1
    assert isinstance(engine.requests[key], AddRequest)


def test_what_a_revived_core_was_told_makes_another_core_do_the_same() -> None:
    engine = driver()
    for length in (5, 11, 19):
        engine.add(PROMPT[:length])
        engine.step()
    engine.lose_worker()
    told: list[tuple[float, Event, list[Effect]]] = []
    engine.keeper.on_event = lambda now, event, effects: told.append((now, event, effects))
    engine.worker_back()
    engine.run()
    again = SchedulerCore(engine.core.config)
    assert len(told) > 20
    for now, event, effects in told:
        assert again.handle(event, now) == effects
