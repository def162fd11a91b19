"""A core that fails: the request that is the cause fails alone, all others go on in a new core, which believes nothing of the old books."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.messages.frontend import AbortRequest, FinishRequest, StepOutput
from pagemill.messages.sequences import SamplingParams, SequenceKey
from pagemill.messages.worker import RowResult
from scheduler.core import SchedulerCore
from scheduler.events import Adopt
from scheduler.sequence import Sequence
from tests.helpers.core_driver import CoreDriver, break_core
from tests.helpers.fake_worker import expected_tokens

PROMPT = list(range(1, 20))


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    return expected_tokens(prompt, SamplingParams(), 0, 8192, max_tokens, 32)


def driver(**numbers: object) -> CoreDriver:
    return CoreDriver(None, **({"num_blocks": 32, "block_size": 4, "num_swap_slots": 32, "preemption": "swap"} | numbers))


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
    core = engine.core
    engine.core.results._outputs.emit = None  # type: ignore[assignment,method-assign]
    engine.expects_failure = True
    engine.step()
    assert engine.core is not core
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
    assert engine.adoptable() == Adopt((), ())


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
