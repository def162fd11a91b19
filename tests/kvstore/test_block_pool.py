"""The block pool: every block in exactly one place, and reuse in the right order."""

from __future__ import annotations

import random

import pytest

from kvstore.block_pool import BlockPool
from kvstore.id_pool import PoolExhausted
from pagemill.ids import NO_PLAN, BlockId, PlanId


def places(pool: BlockPool) -> dict[str, int]:
    found = pool.places()
    return {name: found.count(name) for name in ("free", "cached", "fenced", "referenced")}


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(3)
    assert places(pool) == {"free": 3, "cached": 0, "fenced": 0, "referenced": 0}
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_obtainable) == (3, 0, 0, 3)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_an_unkeyed_block_is_free_again_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.index.insert(b"k", block)
    pool.reference(block)
    pool.release(block)
    assert pool.count(block) == 1
    pool.index.remove(block)
    pool.release(block)
    assert places(pool)["free"] == 2


def test_a_keyed_block_stays_cached_and_can_be_referenced_again() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.index.insert(b"k", block)
    pool.release(block)
    assert (pool.num_cached, pool.num_used) == (1, 0)
    found = pool.index.find(b"k")
    assert found == block
    pool.reference(block)
    assert (pool.num_cached, pool.num_used) == (0, 1)


def test_free_blocks_are_taken_before_cached_ones_and_the_oldest_cached_one_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(2)]
    for name, block in zip((b"old", b"new"), blocks, strict=True):
        pool.index.insert(name, block)
        pool.release(block)
    assert pool.allocate() not in blocks
    assert pool.allocate() == blocks[0]
    assert pool.index.find(b"old") is None, "a recycled block must lose its key"
    assert pool.index.find(b"new") == blocks[1]


def test_a_referenced_block_is_never_handed_out() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(PoolExhausted):
        pool.allocate()


def test_a_fenced_block_is_used_until_its_plan_is_acknowledged() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.release(first, PlanId(7))
    pool.release(second, PlanId(8))
    assert (pool.num_used, pool.num_obtainable) == (2, 0)
    pool.acknowledge(PlanId(7))
    assert (pool.num_free, pool.num_fenced) == (1, 1)
    pool.acknowledge(PlanId(8))
    assert pool.num_free == 2


def test_a_fenced_block_with_a_key_can_be_hit_and_then_outlives_its_fence() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.index.insert(b"k", block)
    pool.release(block, PlanId(3))
    pool.reference(block)
    pool.acknowledge(PlanId(3))
    assert places(pool)["referenced"] == 1


def test_releasing_twice_is_a_fault() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="twice"):
        pool.release(block)


def test_a_free_block_cannot_be_referenced() -> None:
    with pytest.raises(ValueError, match="free"):
        BlockPool(1).reference(BlockId(0))


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_operations_keeps_every_block_in_one_place(seed: int) -> None:
    dice = random.Random(seed)
    pool = BlockPool(dice.randint(1, 12))
    held: list[BlockId] = []
    fence = 0
    for number in range(2000):
        match dice.randrange(5):
            case 0 if pool.num_obtainable:
                held.append(pool.allocate())
            case 1 if held:
                pool.release(held.pop(dice.randrange(len(held))), dice.choice((NO_PLAN, PlanId(fence + 1))))
            case 2 if held:
                block = dice.choice(held)
                if block not in pool.index:
                    pool.index.insert(number.to_bytes(4, "little"), block)
            case 3 if pool.index.entries():
                block = dice.choice(list(pool.index.entries().values()))
                pool.reference(block)
                held.append(block)
            case 4:
                fence += 1
                pool.acknowledge(PlanId(fence))
        found = pool.places()
        assert [name == "referenced" for name in found] == [held.count(BlockId(block)) > 0 for block in range(pool.num_blocks)]
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks


# --- weak references ---------------------------------------------------------------------------------------


def test_a_block_is_reclaimable_while_only_weak_references_are_left() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.weaken(block)
    assert (pool.num_reclaimable, pool.num_strong_to_free(block), pool.num_obtainable) == (1, 0, 1), "held all the same"
    pool.reference(block)
    assert (pool.num_reclaimable, pool.num_strong_to_free(block)) == (0, 1)
    pool.release(block)
    assert pool.num_reclaimable == 1
    pool.strengthen(block)
    assert (pool.num_reclaimable, pool.num_strong_to_free(block)) == (0, 1)
    pool.release(block)
    assert pool.num_free == 2


def test_a_weak_reference_cannot_be_given_back_as_a_strong_one() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.weaken(block)
    for give_back in (pool.release, lambda block: pool.leave(block, 1)):
        with pytest.raises(ValueError, match="twice"):
            give_back(block)
    pool.strengthen(block)
    with pytest.raises(ValueError, match="no weak reference"):
        pool.strengthen(block)


# --- blocks that are being copied out ----------------------------------------------------------------------


def leaving(key: bytes | None = None) -> tuple[BlockPool, BlockId]:
    """A pool of one block, which is being copied out by transfer 7 of the plan being built."""
    pool = BlockPool(1)
    block = pool.allocate()
    if key is not None:
        pool.index.insert(key, block)
    assert pool.leave(block, 7)
    return pool, block


def test_a_leaving_block_may_be_handed_out_in_the_plan_that_copies_it() -> None:
    pool, block = leaving(b"k")
    assert (pool.num_obtainable, pool.num_leaving, pool.num_used) == (1, 1, 1)
    assert pool.take_leaving() == (block, 7)
    assert (pool.index.find(b"k"), pool.count(block), pool.take_leaving()) == (None, 1, None)
    pool.close_plan()
    pool.departed(block, 7)
    assert pool.count(block) == 1, "the copy is done, but somebody else has the block by now"


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_leaving_block_that_nobody_took_waits_for_its_copy(key: bytes | None) -> None:
    pool, block = leaving(key)
    pool.close_plan()
    assert (pool.num_obtainable, pool.num_fenced, places(pool)["fenced"]) == (0, 1, 1)
    pool.departed(block, 6)
    assert pool.num_obtainable == 0, "that was another copy"
    pool.departed(block, 7)
    assert (pool.num_obtainable, pool.num_cached) == (1, int(key is not None))


@pytest.mark.parametrize("closed", [False, True])
def test_a_leaving_block_that_is_wanted_again_is_not_overwritten_before_its_copy_is_done(closed: bool) -> None:
    pool, block = leaving(b"k")
    if closed:
        pool.close_plan()
    pool.reference(block)
    assert (pool.count(block), pool.copied(), pool.num_leaving) == (2, [(7, block)], 0)
    pool.close_plan()
    pool.release(block)
    assert pool.num_obtainable == 0
    pool.departed(block, 7)
    assert (pool.num_cached, pool.copied()) == (1, [])


def shared() -> tuple[BlockPool, BlockId]:
    """A pool of one block, which one of two has given up: it is being copied out by transfer 7 of the plan being built."""
    pool = BlockPool(1)
    block = pool.allocate()
    pool.reference(block)
    assert not pool.leave(block, 7)
    assert (pool.count(block), pool.num_leaving, pool.copied(), pool.num_to_free(block)) == (2, 0, [(7, block)], 1)
    return pool, block


def test_a_shared_block_that_one_gives_up_is_held_by_the_copy_and_by_the_other() -> None:
    pool, block = shared()
    pool.close_plan()
    assert pool.num_to_free(block) == 2
    pool.release(block)
    assert pool.num_obtainable == 0
    pool.departed(block, 7)
    assert pool.num_free == 1


@pytest.mark.parametrize("is_weak", [False, True])
def test_a_shared_block_is_leaving_when_the_last_one_gives_it_up_in_the_same_plan(is_weak: bool) -> None:
    pool, block = shared()
    if is_weak:
        pool.weaken(block)
        pool.strengthen(block)
    pool.release(block)
    assert (pool.num_obtainable, pool.num_leaving, pool.copied()) == (1, 1, [])
    assert pool.take_leaving() == (block, 7)
    pool.departed(block, 7)
    assert pool.count(block) == 1, "the copy is done, but somebody else has the block by now"


def test_a_shared_block_that_is_copied_twice_waits_for_both_copies() -> None:
    pool, block = shared()
    pool.reference(block)
    pool.close_plan()
    assert not pool.leave(block, 8), "the first copy is of no use to this one"
    pool.close_plan()
    pool.release(block)
    for transfer_id, num_left in ((7, 1), (8, 0)):
        pool.departed(block, transfer_id)
        assert pool.count(block) == num_left
    assert pool.num_free == 1


def test_of_what_keeps_a_block_from_being_obtainable_strong_references_are_told_apart() -> None:
    pool, block = shared()
    pool.reference(block)
    pool.weaken(block)
    assert (pool.num_to_free(block), pool.num_strong_to_free(block)) == (2, 1)


def test_that_a_copy_was_in_vain_is_known_until_the_block_is_overwritten() -> None:
    pool = BlockPool(1)
    for number in range(2):
        block = pool.allocate()
        assert not pool.was_copied_in_vain(block)
        pool.copied_in_vain(block)
        pool.index.insert(b"k%d" % number, block)
        pool.release(block)
        assert pool.was_copied_in_vain(block)
    pool.leave_cached(block, 3)
    assert pool.take_leaving() == (block, 3)
    assert not pool.was_copied_in_vain(block)


def test_a_block_that_a_plan_in_flight_reads_waits_for_that_plan_though_its_copy_was_ordered_now() -> None:
    pool, block = shared()
    pool.release(block, PlanId(3))
    assert pool.num_obtainable == 0


def test_a_cached_block_leaves_before_it_is_overwritten() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.index.insert(b"k", block)
    pool.release(block)
    pool.leave_cached(block, 3)
    assert (pool.num_cached, pool.num_obtainable) == (0, 1)
    assert pool.take_leaving() == (block, 3)
