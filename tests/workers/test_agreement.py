"""Ranks carry out the same plans or none, whatever reached which of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.ids import PlanId, RowId
from tests.helpers.rank_threads import RankThread, on_all_ranks
from workers.agreement import Agreed, Agreement, NamedRow
from workers.parallel import ALONE, PeerRankLost

EPOCH = 5
Ask = Callable[[Agreement], object]


def meet(incarnation: int) -> Ask:
    return lambda agreement: agreement.on_scheduler(incarnation)


def plan(plan_id: int, *, epoch: int = EPOCH, missing: NamedRow | None = None) -> Ask:
    return lambda agreement: agreement.on_plan(epoch, PlanId(plan_id), missing)


def answers(*asked: list[Ask]) -> list[list[object]]:
    """Of each rank to all that it asks, one thing after the other; `asked` has an entry for each rank."""

    def ask(rank: RankThread) -> list[object]:
        agreement = Agreement(rank)
        return [each(agreement) for each in asked[rank.rank]]

    return on_all_ranks(len(asked), ask)


def test_one_rank_agrees_with_itself() -> None:
    agreement = Agreement(ALONE)
    assert agreement.on_scheduler(3)
    assert agreement.on_plan(EPOCH, PlanId(1), None) == Agreed(None)
    assert agreement.on_plan(EPOCH, PlanId(2), (RowId(4), 7)) == Agreed((RowId(4), 7))


def test_ranks_with_the_same_plan_carry_it_out() -> None:
    assert answers(*[[meet(0), plan(1), plan(2)]] * 3) == [[True, Agreed(None), Agreed(None)]] * 3


def test_a_row_that_some_ranks_miss_is_named_by_all_as_the_first_of_them_does() -> None:
    lost = Agreed((RowId(0), 9))
    assert answers([plan(1)], [plan(1, missing=(RowId(0), 9))], [plan(1, missing=(RowId(3), 2))]) == [[lost]] * 3


def test_a_plan_that_reached_one_rank_alone_is_given_up_when_the_others_meet_the_next_scheduler() -> None:
    lonely, others = [meet(0), plan(17), plan(18), meet(1), plan(1, epoch=9)], [meet(0), meet(1), plan(1, epoch=9)]
    assert answers(others, lonely, others) == [[True, True, Agreed(None)], [True, None, None, True, Agreed(None)], [True, True, Agreed(None)]]


def test_a_plan_that_got_lost_on_its_way_to_one_rank_is_given_up_by_the_other() -> None:
    assert answers([plan(1), plan(2), plan(3)], [plan(1), plan(3)]) == [[Agreed(None), None, Agreed(None)], [Agreed(None)] * 2]


def test_a_plan_of_an_older_core_is_given_up_whatever_its_number() -> None:
    assert answers([plan(99), plan(1, epoch=EPOCH + 1)], [plan(1, epoch=EPOCH + 1)]) == [[None, Agreed(None)], [Agreed(None)]]


def test_a_scheduler_that_is_gone_before_all_ranks_have_met_it_is_met_by_none() -> None:
    assert answers([meet(0), meet(1)], [meet(1)]) == [[False, True], [True]]


def test_plans_of_an_older_scheduler_are_older_whatever_their_epoch() -> None:
    assert answers([meet(0), plan(5, epoch=1000), meet(1)], [meet(0), meet(1)]) == [[True, None, True], [True, True]]


def test_who_waits_for_a_rank_that_is_gone_is_told_so() -> None:
    def wait_or_leave(rank: RankThread) -> None:
        if rank.rank == 1:
            return rank.leave()
        Agreement(rank).on_plan(EPOCH, PlanId(1), None)

    with pytest.raises(PeerRankLost, match="rank 0 of 2 has lost another rank"):
        on_all_ranks(2, wait_or_leave)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=5))
def test_however_early_schedulers_die_all_ranks_carry_out_what_all_were_sent(sent: list[list[int]]) -> None:
    """`sent` has an entry for each scheduler: how many plans reached each of three ranks. The last one lives."""
    sent = [*sent, [2, 2, 2]]

    def carried_out(rank: RankThread) -> list[tuple[int, int]]:
        agreement, done = Agreement(rank), list[tuple[int, int]]()
        for incarnation, numbers in enumerate(sent):
            assert agreement.on_scheduler(incarnation)
            done += [(incarnation, number) for number in range(numbers[rank.rank]) if agreement.on_plan(incarnation, PlanId(number), None)]
        return done

    expected = [(incarnation, number) for incarnation, numbers in enumerate(sent) for number in range(min(numbers))]
    assert on_all_ranks(3, carried_out) == [expected] * 3
