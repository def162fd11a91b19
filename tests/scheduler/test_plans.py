"""Plans that several ranks carry out: complete when all have answered, alike, once and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagemill.ids import PlanId, RowId
from pagemill.messages.frontend import StatsSnapshot
from pagemill.messages.sequences import SamplingParams, TokenLogprobs
from pagemill.messages.worker import InstallRow, Plan, RowMissing, RowResult, StepDone, TransferDone
from scheduler.events import Distrust
from tests.helpers.core_driver import Answer, CoreDriver
from tests.helpers.prompts import VOCAB, expected, prompt


def planned(num_workers: int = 2, **numbers: Any) -> CoreDriver:
    """Three sequences are in the plan in flight."""
    driver = CoreDriver(num_workers=num_workers, block_size=4, **numbers)
    for stem in range(3):
        driver.add(prompt(5, stem), max_tokens=3)
    driver.turn()
    return driver


def finish(driver: CoreDriver) -> None:
    driver.run()
    assert list(driver.outputs.values()) == [expected(driver, prompt(5, stem), 3) for stem in range(3)]


def dropped(driver: CoreDriver, answer: Answer | TransferDone) -> int:
    """How many messages the core counts as dropped when it hears this, of which it must not do anything else."""
    before = driver.core.counters.num_dropped
    assert driver.handle(answer) == []
    return driver.core.counters.num_dropped - before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_plan_is_complete_when_the_last_rank_has_answered_in_whatever_order(order: tuple[int, ...]) -> None:
    driver = planned(3)
    for rank in order:
        assert not any(driver.outputs.values())
        driver.answer_of(rank)
    assert all(len(tokens) == 1 for tokens in driver.outputs.values())
    finish(driver)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_logprobs_are_those_of_the_first_rank_and_may_differ_in_a_bit(order: tuple[int, ...]) -> None:
    driver = CoreDriver(num_workers=2)
    key = driver.add(prompt(5), max_tokens=1, sampling=SamplingParams(num_logprobs=0))
    driver.turn()

    def with_logprob(logprob: float) -> Callable[[Answer], Answer]:
        def alter(answer: Answer) -> Answer:
            assert isinstance(answer, StepDone)
            results = [msgspec.structs.replace(result, logprobs=(TokenLogprobs(logprob, b"", b""),)) for result in answer.results]
            return msgspec.structs.replace(answer, results=tuple(results))

        return alter

    for rank in order:
        driver.answer_of(rank, with_logprob((-1.0, -1.0000001)[rank]))
    assert driver.finished[key].logprobs == (TokenLogprobs(-1.0, b"", b""),)


def test_a_rank_that_answers_twice_is_not_two_ranks() -> None:
    driver = planned()
    driver.answer_of(0)
    (answer,) = driver.in_flight
    assert dropped(driver, answer) == 1
    assert not any(driver.outputs.values())
    finish(driver)


@pytest.mark.parametrize("rank", [-1, 2, 2**62])
def test_an_answer_of_nobody_is_dropped(rank: int) -> None:
    driver = planned()
    driver.answer_of(0)
    assert dropped(driver, msgspec.structs.replace(driver.in_flight[0], rank=rank)) == 1
    finish(driver)


def test_a_rank_that_answers_a_later_plan_first_is_not_heard() -> None:
    driver = planned(max_plans_in_flight=2)
    first, second = driver.in_flight
    driver.answer_of(0)
    assert dropped(driver, msgspec.structs.replace(second, rank=1)) == 1
    assert dropped(driver, msgspec.structs.replace(second, rank=0, plan_id=first.plan_id)) == 1
    assert not any(driver.outputs.values())
    finish(driver)


def _change_first(**changes: object) -> Callable[[Answer], Answer]:
    def alter(answer: Answer) -> Answer:
        assert isinstance(answer, StepDone)
        return msgspec.structs.replace(answer, results=(msgspec.structs.replace(answer.results[0], **changes), *answer.results[1:]))

    return alter


def _without_last(answer: Answer) -> Answer:
    assert isinstance(answer, StepDone)
    return msgspec.structs.replace(answer, results=answer.results[:-1])


def _row_missing(answer: Answer) -> Answer:
    return RowMissing(answer.epoch, answer.rank, answer.plan_id, RowId(0), 1)


DIFFERENCES: dict[str, list[Callable[[Answer], Answer]]] = {
    "row 0": [
        _change_first(token_ids=(VOCAB,)),
        _change_first(version=7),
        _change_first(row=RowId(9)),
        _change_first(outcome="deferred", token_ids=()),
        _change_first(outcome="failed"),
    ],
    "the number of results": [_without_last],
    "the missing row": [_row_missing],
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("what", "alter"), [(what, alter) for what, alters in DIFFERENCES.items() for alter in alters])
def test_ranks_that_differ_are_not_believed_and_nothing_more_is_asked_of_them(what: str, alter: Callable[[Answer], Answer], is_first: bool) -> None:
    driver = planned()
    for rank in (1, 0):
        driver.answer_of(rank, alter if (rank == 1) == is_first else lambda answer: answer)
    assert driver.distrust is not None
    named = "row 9" if what == "row 0" and is_first and driver.distrust.reason.count("row 9") else what
    assert driver.distrust == Distrust(0, f"answers differ: rank 0 and rank 1 disagree about {named} of plan 1")
    assert not any(driver.outputs.values())
    driver.lose_worker()
    driver.worker_back()
    finish(driver)


def test_ranks_that_miss_different_rows_differ() -> None:
    driver = planned()
    plan = driver.in_flight[0]
    driver.handle(RowMissing(plan.epoch, 0, plan.plan_id, RowId(0), 1))
    effects = driver.handle(RowMissing(plan.epoch, 1, plan.plan_id, RowId(0), 2))
    assert effects == [Distrust(1, "answers differ: rank 1 and rank 0 disagree about the missing row of plan 1")]


def test_once_ranks_have_differed_nothing_that_they_say_counts_and_nothing_is_asked_of_them() -> None:
    driver = CoreDriver(num_workers=2, max_plans_in_flight=2)
    first = driver.add(prompt(5), max_tokens=2)
    driver.turn()
    driver.answer_of(0)
    driver.answer_of(1, _change_first(token_ids=(VOCAB,)))
    (second,) = driver.in_flight
    assert dropped(driver, second) == 1
    assert dropped(driver, msgspec.structs.replace(second, rank=1)) == 1
    assert dropped(driver, TransferDone(second.epoch, 0, (1, 2, 3), True, 0.1)) == 1
    driver.abort(first)
    driver.core.plans.pop()  # there would be room for another
    driver.add(prompt(5))
    assert not any(isinstance(effect, Plan) for effect in driver.turn())


def test_a_request_on_which_ranks_differ_again_and_again_ends_and_the_others_do_not() -> None:
    driver = planned()
    (culprit, *others) = driver.requests
    for _ in range(10):
        for _ in range(50):
            if driver.distrust is not None or not driver.core.sequences:
                break
            driver.turn()
            sequence = driver.core.sequences.get(culprit)
            rows = {slice_.row for plan in driver.core.plans for slice_ in plan.slices if slice_.piece.sequence is sequence}
            driver.answer_of(0)
            driver.answer_of(1, lambda answer, rows=rows: _differing_on(rows, answer))  # type: ignore[misc]
        if driver.distrust is not None:
            driver.lose_worker()
            driver.worker_back()
    assert driver.finished[culprit].error == "killed_worker"
    assert [driver.outputs[key] for key in others] == [expected(driver, prompt(5, stem), 3) for stem in (1, 2)]


def _differing_on(rows: set[RowId], answer: Answer) -> Answer:
    assert isinstance(answer, StepDone)
    changed = [msgspec.structs.replace(result, token_ids=(VOCAB,)) if result.row in rows else result for result in answer.results]
    return msgspec.structs.replace(answer, results=tuple(changed))


def test_a_row_that_all_ranks_miss_is_installed_anew_once() -> None:
    driver = planned()
    driver.answer()
    driver.worker.rows.clear()
    driver.turn()
    installs_before = len(installed(driver))
    driver.answer_of(1)
    driver.turn()
    assert len(installed(driver)) == installs_before, "the other rank may still be at it"
    driver.answer_of(0)
    assert len(installed(driver)) == installs_before
    driver.turn()
    assert len(installed(driver)) == 2 * installs_before
    again = next(event for _, event, _ in reversed(driver.log) if isinstance(event, RowMissing))
    assert dropped(driver, again) == 1
    assert dropped(driver, StepDone(again.epoch, 1, again.plan_id, (), {})) == 1
    finish(driver)


def installed(driver: CoreDriver) -> list[InstallRow]:
    return [effect for _, _, effects in driver.log for effect in effects if isinstance(effect, InstallRow)]


def test_each_part_of_a_step_takes_as_long_as_on_its_slowest_rank_and_the_step_as_long_as_the_slowest_rank() -> None:
    driver = planned()
    parts = {0: {"forward": 0.4, "agree": 0.1}, 1: {"forward": 0.1, "agree": 0.3, "swap_wait": 0.05}}
    before = driver.core.swapping.transfers.step_s
    for rank, seconds in parts.items():
        driver.answer_of(rank, lambda answer, seconds=seconds: msgspec.structs.replace(answer, seconds=seconds))  # type: ignore[misc]
    assert driver.core.counters.step_seconds == {"forward": 0.4, "agree": 0.3, "swap_wait": 0.05}
    assert driver.core.swapping.transfers.step_s == pytest.approx(before + 0.2 * (0.5 - before))
    driver.now += 1.0
    (snapshot,) = [effect for effect in driver.turn() if isinstance(effect, StatsSnapshot)]
    assert snapshot.step_seconds["forward"] == 0.4


def test_what_a_forward_waited_for_copies_is_no_part_of_what_computing_costs() -> None:
    rates: list[tuple[float, float]] = []
    for waited in ((0.0, 0.0), (9.0, 0.0), (0.0, 9.0)):
        driver = CoreDriver(num_workers=2, prefill_tok_s=100.0)
        driver.add(prompt(64), max_tokens=1)
        driver.turn()
        for rank, seconds in enumerate(waited):
            parts = {"swap_wait": seconds, "forward": 0.1}
            driver.answer_of(rank, lambda answer, parts=parts: msgspec.structs.replace(answer, seconds=parts))  # type: ignore[misc]
        rates.append((driver.core.prefill.per_token_s, driver.core.prefill.per_pair_s))
    assert rates[0][0] < 0.01
    assert rates == [rates[0]] * 3


def test_an_answer_to_a_plan_that_does_not_exist_is_dropped() -> None:
    driver = planned()
    assert dropped(driver, StepDone(1, 0, PlanId(99), (RowResult(RowId(0), 1, "accepted", (1,), (), ""),), {})) == 1
    finish(driver)
