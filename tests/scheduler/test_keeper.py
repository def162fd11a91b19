"""The keeper: sequences outlive their workers, their core and, with the directory's help, their scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    Effect,
    Event,
    FinishRequest,
    PeerLost,
    Preempt,
    RowResult,
    SamplingParams,
    SequenceKey,
    StatsSnapshot,
    StepOutput,
    Turn,
)
from scheduler.core import SchedulerCore
from scheduler.sequence import Sequence
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

PROMPT = list(range(1, 20))


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    return expected_tokens(prompt, SamplingParams(), 0, 8192, max_tokens, 32)


def driver(**numbers: object) -> CoreDriver:
    return CoreDriver(None, **({"num_blocks": 32, "block_size": 4, "num_swap_slots": 32, "preemption": "swap"} | numbers))


def break_core(driver: CoreDriver, name: str) -> None:
    """Its next call of `handle` for an event of this name raises."""
    core, handle = driver.core, driver.core.handle

    def failing(event: Event, now: float) -> list[Effect]:
        if type(event).__name__ == name:
            raise ZeroDivisionError("planted")
        return handle(event, now)

    core.handle = failing  # type: ignore[method-assign]
    driver.expects_failure = True


# --- workers -----------------------------------------------------------------------------------------------


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


# --- the scheduler -----------------------------------------------------------------------------------------


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


# --- the core ----------------------------------------------------------------------------------------------


def test_the_request_on_which_the_core_fails_fails_and_no_other() -> None:
    engine = driver()
    others = [engine.add(PROMPT[:length]) for length in (5, 11)]
    engine.step()
    break_core(engine, "AddRequest")
    bad = engine.add([1, 2, 3])
    assert (engine.finished[bad].finish_reason, engine.finished[bad].error) == ("error", "core_failed")
    assert isinstance(engine.failure, ZeroDivisionError)
    engine.run()
    assert [engine.outputs[key] for key in others] == [expected(PROMPT[:length]) for length in (5, 11)]


def test_a_finish_on_which_the_core_fails_ends_its_sequence() -> None:
    engine = driver()
    key, other = engine.add([1, 2, 3], max_tokens=20), engine.add([4, 5])
    engine.step()
    break_core(engine, "FinishRequest")
    effects = engine.handle(FinishRequest(key, "stop", 1))
    (output,) = [output for effect in effects if isinstance(effect, StepOutput) for output in effect.outputs]
    assert (output.key, output.first_index, output.error) == (key, 1, "core_failed")
    assert list(engine.core.sequences) == [other]


@pytest.mark.parametrize("name", ["StepDone", "Turn", "AbortRequest"])
def test_a_core_that_fails_at_any_event_is_rebuilt_and_nothing_is_sent_twice(name: str) -> None:
    engine = driver()
    keys = [engine.add(PROMPT[:length]) for length in (5, 11)]
    engine.step()
    break_core(engine, name)
    if name == "AbortRequest":
        engine.handle(AbortRequest(SequenceKey(0, 1, 10**6, 0)))
    engine.step()
    engine.run()
    assert engine.failure is not None
    assert [engine.outputs[key] for key in keys] == [expected(PROMPT[:length]) for length in (5, 11)]


def test_tokens_that_were_drawn_and_not_sent_are_drawn_again() -> None:
    engine = driver()
    keys = [engine.add(PROMPT[:length]) for length in (5, 11)]
    engine.step()
    retire = engine.core.results.on_end
    engine.core.results._outputs.emit = None  # type: ignore[assignment,method-assign]
    engine.expects_failure = True
    engine.step()
    assert engine.core.results.on_end is not retire, "a new core"
    engine.run()
    assert [engine.outputs[key] for key in keys] == [expected(PROMPT[:length]) for length in (5, 11)]


def test_what_a_core_has_said_before_its_books_were_found_wrong_is_sent() -> None:
    engine = driver()
    keys = [engine.add(PROMPT[:length], max_tokens=1 + length) for length in (1, 5)]
    engine.step()
    engine.keeper._check_invariants = True
    engine.turn()
    engine.core.memory.pool.reference(engine.core.sequences[keys[1]].tables[0][0])  # found when the next answer has been applied
    engine.expects_failure = True
    engine.answer()
    assert "references" in str(engine.failure)
    engine.run()
    assert [engine.outputs[key] for key in keys] == [expected(PROMPT[:1], 2), expected(PROMPT[:5], 6)]


def test_a_sequence_on_whose_results_the_core_fails_twice_is_ended_and_the_others_go_on() -> None:
    engine = driver()
    keys = [engine.add(PROMPT[:length]) for length in (3, 5, 11)]
    engine.expects_failure = True
    for _ in range(200):
        results = engine.core.results
        if "_append" not in vars(results):
            append = results._append

            def deadly(sequence: Sequence, result: RowResult, append: Callable[[Sequence, RowResult], None] = append) -> None:
                if sequence.key == keys[1]:
                    raise ZeroDivisionError("planted")
                append(sequence, result)

            results._append = deadly  # type: ignore[method-assign]
        if not engine.step():
            break
    assert (engine.finished[keys[1]].finish_reason, engine.finished[keys[1]].error) == ("error", "core_failed")
    assert [engine.outputs[key] for key in (keys[0], keys[2])] == [expected(PROMPT[:3]), expected(PROMPT[:11])]
    assert len(engine.keeper._failures) == 2


def test_a_rebuilt_core_believes_nothing_that_the_old_one_said_of_kv() -> None:
    engine = driver()
    engine.add(PROMPT)
    engine.run()
    assert engine.core.memory.pool.num_cached > 0
    break_core(engine, "Turn")
    engine.turn()
    assert (engine.core.memory.pool.num_cached, engine.core.swapping.swap.num_cached) == (0, 0)
    assert engine._adopt().blocks == ()


def test_books_that_do_not_balance_are_found_by_the_audit() -> None:
    engine = driver()
    key = engine.add(PROMPT)
    engine.step()
    assert engine.keeper.audit(engine.now) == []
    engine.core.memory.pool.reference(engine.core.sequences[key].tables[0][0])
    engine.expects_failure = True
    engine._carry_out(engine.keeper.audit(engine.now))
    assert "counts 2 references, there are 1" in str(engine.failure)
    engine.run()
    assert engine.outputs[key] == expected(PROMPT)


def test_a_core_that_fails_again_and_again_is_not_rebuilt_for_ever() -> None:
    engine = driver()
    for _ in range(5):
        break_core(engine, "Turn")
        engine.turn()
    break_core(engine, "Turn")
    with pytest.raises(ZeroDivisionError):
        engine.turn()


def test_failures_long_ago_are_forgiven() -> None:
    engine = driver()
    for _ in range(12):
        engine.now += 130.0
        break_core(engine, "Turn")
        engine.turn()
    assert isinstance(engine.core, SchedulerCore)


# --- numbers -----------------------------------------------------------------------------------------------


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
