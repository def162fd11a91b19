"""The pool: what a layer sees lies inside its block, apart from everything else, and moves with the block's bytes."""

from __future__ import annotations

import pytest
import torch

from pagemill.messages.sequences import KvGroup
from workers.kv_cache import KvCache, attention_spec, full_attention_spec
from workers.pages import ALIGNMENT_BYTES


@pytest.fixture
def cache() -> KvCache:
    cache = KvCache(full_attention_spec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16), num_blocks=5)
    cache.blocks.zero_()
    return cache


def test_views_of_layers_do_not_overlap(cache: KvCache) -> None:
    for layer in range(3):
        for i, part in enumerate(cache.layer(layer)[:2]):
            assert part.shape == (5, 2, 4, 8)
            part.fill_(2 * layer + i + 1)
    for layer in range(3):
        for i, part in enumerate(cache.layer(layer)[:2]):
            assert torch.all(part == 2 * layer + i + 1)


def test_one_copy_of_a_block_moves_all_layers(cache: KvCache) -> None:
    for layer in range(3):
        for part in cache.layer(layer)[:2]:
            part[2] = torch.randn(2, 4, 8)
    cache.blocks[4].copy_(cache.blocks[2])
    for layer in range(3):
        for part in cache.layer(layer)[:2]:
            assert torch.equal(part[4], part[2])
            assert not part[3].any()


def test_writing_a_layer_of_one_block_touches_no_other_block(cache: KvCache) -> None:
    for part in cache.layer(1)[:2]:
        part[2] = 1
    assert cache.blocks[2].any()
    assert not cache.blocks[[0, 1, 3, 4]].any()


def test_views_start_on_cache_lines(cache: KvCache) -> None:
    for layer in range(3):
        for part in cache.layer(layer)[:2]:
            assert part.data_ptr() % ALIGNMENT_BYTES == 0


def test_block_bytes_are_the_sum_of_all_layers() -> None:
    spec = full_attention_spec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
    assert spec.block_bytes == 2 * 30 * 3 * 64 * 16 * 4
    assert spec.groups == (KvGroup(),)


def test_spec_survives_odd_sizes_by_padding() -> None:
    spec = full_attention_spec(num_layers=2, num_kv_heads=1, head_dim=5, block_size=3, dtype=torch.float32)
    cache = KvCache(spec, num_blocks=2)
    cache.layer(1).value.fill_(7)
    cache.layer(0).value.fill_(8)
    assert torch.all(cache.layer(1).value == 7)
    assert spec.block_bytes % ALIGNMENT_BYTES == 0


def test_large_pools_lie_as_small_ones_do() -> None:
    spec = full_attention_spec(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    cache = KvCache(spec, num_blocks=100)
    assert cache.blocks.shape == (100, spec.block_bytes)
    assert cache.layer(0).key.data_ptr() == cache.blocks.data_ptr()
    cache.layer(1).value[99] = 3
    assert cache.blocks[99].any()
    assert not cache.blocks[98].any()


HYBRID = (64, 0, 64, 64, 0)  # groups of layers 1 and 4, 0 and 2, and 3 alone


def test_blocks_of_all_groups_have_the_bytes_of_equally_many_layers() -> None:
    spec = attention_spec(HYBRID, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
    assert spec.groups == (KvGroup(), KvGroup(window=64), KvGroup(window=64))
    assert spec.block_bytes == 2 * 2 * 3 * 64 * 16 * 4
    assert [views.group for views in spec.layers] == [1, 0, 1, 2, 0]


def test_a_layer_says_which_tables_are_its_own_and_how_far_it_looks_back() -> None:
    cache = KvCache(attention_spec(HYBRID, 2, 8, 4, torch.bfloat16), num_blocks=5)
    assert [(cache.layer(layer).group, cache.layer(layer).window) for layer in range(5)] == [(1, 64), (0, 0), (1, 64), (2, 64), (0, 0)]


def test_layers_of_one_group_do_not_overlap_and_groups_share_no_block_unless_told_to() -> None:
    cache = KvCache(attention_spec(HYBRID, 2, 8, 4, torch.bfloat16), num_blocks=3)
    cache.blocks.zero_()
    for layer in range(5):
        for i, part in enumerate(cache.layer(layer)[:2]):
            part[cache.layer(layer).group] = 2 * layer + i + 1
    for layer in range(5):
        for i, part in enumerate(cache.layer(layer)[:2]):
            assert torch.all(part[cache.layer(layer).group] == 2 * layer + i + 1)
    assert cache.blocks[:2].view(torch.bfloat16).all(), "full to the last byte"
    assert not cache.blocks[2, cache.spec.block_bytes // 2 :].any(), "a group of one layer leaves the rest empty"
