"""Sets of ranks: whoever has answered is not in one, and who is none of the group never was."""

from __future__ import annotations

import pytest

from scheduler.ranks import all_ranks, includes, without


def test_each_rank_is_in_the_set_until_it_is_taken_out() -> None:
    ranks = all_ranks(3)
    for rank in (1, 0, 2):
        assert includes(ranks, rank)
        ranks = without(ranks, rank)
        assert not includes(ranks, rank)
    assert not ranks


@pytest.mark.parametrize("rank", [-1, 3, 64, 2**62, -(2**62)])
def test_whoever_is_no_rank_is_in_no_set(rank: int) -> None:
    assert not includes(all_ranks(3), rank)
