"""The link is measured with the swapper that serves, and a broken one is told in a sentence."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.copiers import GatedCopier
from workers.kv_cache import KvCache, full_attention_spec
from workers.link_rate import LinkFailed, LinkRate, measure_link
from workers.swapper import Swapper


def parts(num_slots: int) -> tuple[KvCache, torch.Tensor, GatedCopier]:
    cache = KvCache(full_attention_spec(2, 2, 16, 4, torch.float32), 8)
    slots = torch.zeros((num_slots, 4096), dtype=torch.uint8)
    return cache, slots, GatedCopier(cache.blocks, slots[:, : cache.spec.block_bytes])


@pytest.mark.parametrize("num_slots", [1, 5, 20])
def test_both_ways_are_measured_on_no_more_than_there_is(num_slots: int) -> None:
    cache, slots, copier = parts(num_slots)
    swapper = Swapper(cache, slots, copier=copier)
    rate = measure_link(swapper, cache.spec.block_bytes)
    assert rate.out_bytes_s > 1e5
    assert rate.in_bytes_s > 1e5
    assert {direction for _, direction, *_ in copier.copied} == {"out", "in"}
    assert max(place for _, _, *places in copier.copied for place in places) == min(num_slots, 8) - 1
    assert swapper.take_done() == []
    swapper.close()


@pytest.mark.parametrize("num_slots", [3, 20])
def test_what_lies_in_the_slots_lies_there_still(num_slots: int) -> None:
    cache, slots, copier = parts(num_slots)
    before = slots.random_(0, 256).clone()
    during: list[bool] = []
    copier.before_copy = lambda: during.append(torch.equal(slots, before))
    swapper = Swapper(cache, slots, copier=copier)
    measure_link(swapper, cache.spec.block_bytes)
    assert torch.equal(slots, before)
    assert all(during), "a worker that is killed while it measures must not leave anything behind either"
    assert ("here", "out", 0, 0) in copier.copied
    swapper.close()


def test_without_an_arena_there_is_no_link() -> None:
    cache, _, _ = parts(1)
    assert measure_link(Swapper(cache, None), cache.spec.block_bytes) == LinkRate(0.0, 0.0)


def test_a_copy_that_fails_is_told_in_a_sentence() -> None:
    cache, slots, copier = parts(4)
    copier.faulty = {("out", 2, 2)}
    swapper = Swapper(cache, slots, copier=copier)
    with pytest.raises(LinkFailed, match="the swap arena cannot be used: copying blocks out fails"):
        measure_link(swapper, cache.spec.block_bytes)
    swapper.close()
