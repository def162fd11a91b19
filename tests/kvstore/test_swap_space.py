"""The swap space: slots that are held, cached, or being written."""

from __future__ import annotations

import pytest

from kvstore.id_pool import PoolExhausted
from kvstore.swap_space import SwapSpace


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


def test_a_held_slot_stays_held_when_its_writing_is_done() -> None:
    swap = SwapSpace(1)
    slot = swap.allocate()
    swap.fill(slot, 1)
    swap.filled(slot)
    assert (swap.count(slot), swap.num_obtainable) == (1, 0)
