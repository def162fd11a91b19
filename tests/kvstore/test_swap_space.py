"""The swap space: slots that are held, cached, or being written."""

from __future__ import annotations

import pytest

from kvstore.id_pool import PoolExhausted
from kvstore.swap_space import SwapSpace
from pagemill.ids import SwapSlotId


def test_a_slot_being_written_is_held_by_its_transfer_whoever_else_lets_go() -> None:
    swap = SwapSpace(1)
    slot = swap.allocate()
    swap.fill(slot, 7)
    swap.release(slot)
    assert (swap.is_filling(slot), swap.filling(), swap.num_used) == (True, {slot: 7}, 1)
    with pytest.raises(PoolExhausted, match="swap slot"):
        swap.allocate()
    swap.filled(slot)
    assert (swap.is_filling(slot), swap.filling(), swap.num_free) == (False, {}, 1)


def test_a_written_slot_with_a_key_stays_as_a_clean_copy_until_the_room_is_needed() -> None:
    swap = SwapSpace(1)
    slot = swap.allocate()
    swap.index.insert(b"k", slot)
    swap.fill(slot, 1)
    swap.release(slot)
    swap.filled(slot)
    assert (swap.num_cached, swap.num_obtainable) == (1, 1)
    assert swap.allocate() == slot
    assert swap.index.find(b"k") is None


def fill(swap: SwapSpace, slot: SwapSlotId, *, ok: bool) -> None:
    """A copy into it that nobody holds it for."""
    swap.fill(slot, 1)
    swap.release(slot)
    swap.filled(slot, ok=ok)


def test_a_slot_that_could_not_be_written_is_used_after_all_others_until_it_has_been_written() -> None:
    swap = SwapSpace(3)
    failed = swap.allocate()
    swap.index.insert(b"failed", failed)
    fill(swap, failed, ok=False)
    assert (swap.num_free, swap.num_obtainable, swap.num_used, swap.index.find(b"failed")) == (3, 3, 0, None)
    assert swap.places() == ["free"] * 3
    assert swap.num_spare == 2, "not for what nobody needs yet"
    others = [swap.allocate(), swap.allocate()]
    for slot in others:
        swap.index.insert(bytes([slot]), slot)
        fill(swap, slot, ok=True)
    assert [swap.allocate() for _ in range(3)] == [*others, failed], "even what is kept as a copy goes before"
    assert swap.is_distrusted(failed)
    fill(swap, failed, ok=True)
    assert not swap.is_distrusted(failed)
    assert swap.allocate() == failed
    with pytest.raises(PoolExhausted):
        swap.allocate()


def test_of_several_that_failed_the_one_is_tried_first_that_has_been_free_longest() -> None:
    swap = SwapSpace(3)
    slots = [swap.allocate() for _ in range(3)]
    for slot in slots:
        fill(swap, slot, ok=False)
    assert swap.num_spare == 3, "there are no others"
    assert [swap.allocate() for _ in range(3)] == slots


def test_a_slot_that_cannot_be_read_holds_nothing_any_more_and_is_used_last_when_its_holders_let_go() -> None:
    swap = SwapSpace(2)
    slot = swap.allocate()
    swap.index.insert(b"k", slot)
    swap.distrust(slot)
    assert (swap.count(slot), swap.index.find(b"k")) == (1, None)
    swap.release(slot)
    assert [swap.allocate(), swap.allocate()][-1] == slot


def test_a_held_slot_stays_held_when_its_writing_is_done() -> None:
    swap = SwapSpace(1)
    slot = swap.allocate()
    swap.fill(slot, 1)
    swap.filled(slot)
    assert (swap.count(slot), swap.num_obtainable) == (1, 0)
