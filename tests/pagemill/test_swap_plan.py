"""Swap space: what `auto` comes to, and how what does not fit is refused."""

from __future__ import annotations

import pytest

from pagemill.config import Device
from pagemill.errors import UsageError
from pagemill.swap_plan import AUTO_AT_MOST, GIB, SwapPlan, plan_swap

MIB = 2**20


def planned(asked: int | None, device: Device = "cpu", *, block: int = MIB, regions: int = 1, pool: int = GIB, free: int = 8 * GIB) -> SwapPlan:
    return plan_swap(asked, device, block_bytes=block, num_regions=regions, num_blocks=pool // (block * regions), free_bytes=free)


@pytest.mark.parametrize(
    ("pool", "free", "slots"),
    [
        (GIB // 4, 8 * GIB, 512),  # twice the pool
        (GIB // 2, GIB, 512),  # half of what is left
        (16 * GIB, 64 * GIB, 1024),  # no more than is populated within a start
    ],
)
def test_auto_is_the_least_of_three_bounds(pool: int, free: int, slots: int) -> None:
    assert planned(None, pool=pool, free=free) == SwapPlan(slots, MIB)


def test_auto_beside_a_card_need_not_know_the_pool() -> None:
    assert planned(None, "cuda", block=4 * MIB, pool=0, free=512 * GIB).size_bytes == AUTO_AT_MOST["cuda"]
    assert planned(None, "cuda", block=4 * MIB, pool=0, free=8 * GIB).size_bytes == 4 * GIB
    assert planned(None, "cuda", block=4 * MIB, pool=GIB, free=512 * GIB).size_bytes == 2 * GIB


@pytest.mark.parametrize("free", [2 * MIB - 1, 0, -GIB])
def test_auto_without_room_is_none_and_says_so(free: int) -> None:
    none = planned(None, free=free)
    assert none.size_bytes == none.num_slots == 0
    (note,) = none.notes
    assert note == f"no swap space: {max(free, 0)} bytes of memory are left beside weights and KV pool; preempted requests are computed again"


def test_zero_is_none_without_a_word() -> None:
    assert planned(0, free=0) == SwapPlan(0, MIB)


def test_a_size_is_rounded_down_to_whole_slots_and_a_slot_up_to_pages() -> None:
    assert planned(10 * MIB + 5) == SwapPlan(10, MIB)
    assert planned(10 * 12288 + 5, block=8193) == SwapPlan(10, 12288)
    assert planned(10 * 12288 + 5, block=8193).size_bytes == 10 * 12288


def test_a_size_may_take_all_that_is_left_and_nothing_more() -> None:
    assert planned(8 * GIB).size_bytes == 8 * GIB
    with pytest.raises(UsageError) as refused:
        planned(9 * GIB)
    assert str(refused.value) == (
        f"--swap-memory asks for 9.0 GiB, but 8.0 GiB of memory are left beside weights and KV pool; lower it to {8 * GIB} or less, or take 0 for none"
    )


def test_regions_share_what_there_is_and_a_block_takes_the_same_slot_in_each() -> None:
    assert planned(None, regions=4, pool=GIB // 4) == SwapPlan(128, MIB, 4), "a quarter of what one region would have"
    assert planned(None, regions=4, pool=GIB // 4).size_bytes == planned(None, pool=GIB // 4).size_bytes == 512 * MIB
    assert planned(None, regions=4, pool=GIB // 4).region_bytes == 128 * MIB
    assert planned(11 * MIB, regions=4).size_bytes == 8 * MIB
    with pytest.raises(UsageError, match=f"holds no block: one takes {4 * MIB} bytes"):
        planned(3 * MIB, regions=4)
    assert planned(None, regions=4, free=8 * MIB - 2).num_slots == 0


def test_a_size_below_one_slot_is_refused() -> None:
    with pytest.raises(UsageError, match=f"--swap-memory 1000 holds no block: one takes {MIB} bytes; raise it"):
        planned(1000)
