"""A pool of numbered places: what is counted, and in which order what nobody refers to is used again."""

from __future__ import annotations

import pytest

from kvstore.id_pool import IdPool, PoolExhausted
from pagemill.ids import PlanId, SwapSlotId


def pool_with_cached(names: str, total: int = 4) -> tuple[IdPool[SwapSlotId], dict[str, SwapSlotId]]:
    """Cached ids by the names of their keys, released in this order."""
    pool = IdPool[SwapSlotId](total)
    numbers = {name: pool.allocate() for name in names}
    for name, number in numbers.items():
        pool.index.insert(name.encode(), number)
        pool.release(number)
    return pool, numbers


def test_there_may_be_none() -> None:
    pool = IdPool[SwapSlotId](0)
    assert (pool.num_obtainable, pool.num_used, pool.places()) == (0, 0, [])
    with pytest.raises(PoolExhausted, match="all 0"):
        pool.allocate()


def test_the_one_freed_last_is_taken_first() -> None:
    pool = IdPool[SwapSlotId](3)
    numbers = [pool.allocate() for _ in range(3)]
    for number in numbers:
        pool.release(number)
    assert pool.allocate() == numbers[-1]


def test_an_evicted_id_loses_its_key_so_that_nobody_finds_what_is_overwritten() -> None:
    pool, numbers = pool_with_cached("ab", total=2)
    assert pool.allocate() == numbers["a"]
    assert pool.index.find(b"a") is None
    assert pool.index.find(b"b") == numbers["b"]


def test_what_was_only_looked_at_goes_back_to_the_front_of_the_cached() -> None:
    pool, numbers = pool_with_cached("abc")
    for name in "bc":
        pool.reference(numbers[name])
    pool.release(numbers["c"], oldest=True)
    pool.release(numbers["b"])
    assert list(pool.oldest_cached(3)) == [numbers["c"], numbers["a"], numbers["b"]]


def test_what_is_expendable_goes_first_the_last_of_it_before_all_until_somebody_refers_to_it() -> None:
    pool, numbers = pool_with_cached("abc")
    for name in ("b", "c"):
        pool.reference(numbers[name])
        pool.release(numbers[name], expendable=True)
    assert list(pool.oldest_cached(9)) == [numbers[name] for name in "cba"]
    assert [pool.is_expendable(numbers[name]) for name in "abc"] == [False, True, True]
    pool.reference(numbers["c"])
    assert not pool.is_expendable(numbers["c"])
    pool.release(numbers["c"])
    assert list(pool.oldest_cached(9)) == [numbers[name] for name in "bac"]
    pool.forget(numbers["b"])
    pool.reference(numbers["a"])
    pool.reference(numbers["a"])
    pool.release(numbers["a"], expendable=True)
    assert not pool.is_expendable(numbers["a"]), "another still refers to it"


def test_what_is_adopted_is_as_expendable_as_it_was() -> None:
    pool = IdPool[int](6)
    assert pool.adopt([(0, b"a"), (2, b"c"), (3, b"d"), (4, b"e"), (9, b"x")], expendable=[3, 2, 5, 9]) == 4
    assert [pool.is_expendable(number) for number in range(6)] == [False, False, True, True, False, False]
    assert list(pool.oldest_cached(6)) == [2, 3, 0, 4], "5 is free, and 9 does not exist"


def test_the_oldest_cached_ones_are_those_that_go_next() -> None:
    pool, _ = pool_with_cached("abcd")
    expected = list(pool.oldest_cached(4))
    assert list(pool.oldest_cached(2)) == expected[:2]
    assert [pool.allocate() for _ in range(4)] == expected


def test_a_forgotten_cached_id_is_free_at_once_and_a_referenced_one_when_it_is_released() -> None:
    pool, numbers = pool_with_cached("ab")
    pool.reference(numbers["b"])
    for number in numbers.values():
        pool.forget(number)
    assert (pool.num_cached, pool.num_free) == (0, 3)
    pool.release(numbers["b"])
    assert (pool.num_cached, pool.num_free) == (0, 4)


def test_a_fence_is_lifted_by_its_plan_and_by_every_later_one() -> None:
    pool = IdPool[SwapSlotId](2)
    first, second = pool.allocate(), pool.allocate()
    pool.release(first, PlanId(3))
    pool.release(second, PlanId(5))
    pool.acknowledge(PlanId(2))
    assert (pool.num_fenced, pool.num_used) == (2, 2)
    pool.acknowledge(PlanId(4))
    assert (pool.num_fenced, pool.num_used) == (1, 1)
    pool.acknowledge(PlanId(6))
    assert pool.num_free == 2


def test_an_id_in_two_places_or_in_none_is_told() -> None:
    pool = IdPool[SwapSlotId](2)
    number = pool.allocate()
    pool._free.append(number)
    with pytest.raises(ValueError, match="referenced and free"):
        pool.places()
    pool._free = []
    with pytest.raises(ValueError, match="nowhere"):
        pool.places()
